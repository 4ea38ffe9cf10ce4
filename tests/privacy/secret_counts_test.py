# SPDX-License-Identifier: Apache-2.0
"""No text of the library prints how many records there are, a record's value, or which one failed.

The first test feeds a secret number of records and secret values to everything that reads
records, and searches all that is printed. The second one searches the source.
"""

import ast
import functools
import json
import logging
import pathlib
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import tuning
from tfdp_adaptive.audit import shadow_models
from tfdp_adaptive.audit import subjects
from tfdp_adaptive.cli import main
from tfdp_adaptive.estimates import stddevs
from tfdp_adaptive.examples import corpus
from tfdp_adaptive.examples import tag_prediction
from tfdp_adaptive.examples import tasks
from tfdp_adaptive.federated import rounds
from tfdp_adaptive.federated import silo
from tfdp_adaptive.federated import simulation
from tfdp_adaptive.federated import sources
from tfdp_adaptive.federated import users
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.report import card_json
from tfdp_adaptive.report import registry

N, VALUE, PLACE = 4273, 98765.5, 4219
SECRETS = (str(N), f'{N:,}', str(N - 1), str(N + 1), str(PLACE), '98765')
PACKAGE = pathlib.Path(tfdp.__file__).parent


def texts(capfd, function):
  """Everything that a call says: errors with their causes, warnings, logs and output."""
  said, heard = [], logging.Handler()
  heard.emit = lambda record: said.append(record.getMessage())
  logging.getLogger().addHandler(heard)
  capfd.readouterr()
  try:
    with warnings.catch_warnings(record=True) as warned:
      warnings.simplefilter('always')
      said.append(str(function()))
  except Exception as error:  # pylint: disable=broad-except
    said.append('raised')
    while error is not None:
      said.append(str(error))
      error = error.__cause__ or (
          None if error.__suppress_context__ else error.__context__)
  finally:
    logging.getLogger().removeHandler(heard)
  return '\n'.join([*said, *(str(one.message) for one in warned), *capfd.readouterr()])


def secrets_in(said):
  """Returns the secrets that stand in a text, but not by chance in a digest or behind a point."""
  return [secret for secret in SECRETS if re.search(rf'(?<![\w.]){secret}(?!\w)', said)]


def x(count=N):
  return np.full([count, 2], VALUE, np.float32)


class Source:
  """Records of which one, far from the start, is another: by its shape, type or presence."""

  def __init__(self, other):
    self._other, self.read = other, 0

  def __len__(self):
    return N

  def __getitem__(self, number):
    self.read += 1
    if number < 2:
      return x(1)[0]
    return self._other(self) if number >= 3 else x(1)[0]


class Uneven(compat.keras.utils.Sequence):

  def __len__(self):
    return N // 10 + 1

  def __getitem__(self, number):
    return x(N % 10 if number == len(self) - 1 else 9 if number % 2 else 10)


def private(**fields):
  return tfdp.PrivacyPlan(**{**dict(
      batch_size=40, steps=2, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-5, seed=1,
      adjacency='add_remove', sampling=tfdp.sampling.Poisson(sampling_probability=.01)), **fields})


def drawn(data, plan=None, **kwargs):
  return lambda: list((plan or private()).batches(data, **kwargs).as_numpy_iterator()) and 'drawn'


def trained():
  model = tfdp.make_private(compat.keras.Sequential([
      compat.keras.layers.Input([2]), compat.keras.layers.Dense(1)]))
  plan = private()
  model.compile(tfdp.DPSGD(0.1, plan=plan), loss='mse', jit_compile=False)
  model.fit(plan.batches((x() / VALUE, np.zeros(N))), steps_per_epoch=1, epochs=2)
  return '\n'.join([model.ledger.statement(), model.ledger.to_json(), str(plan), plan.to_json(),
                    card_json.to_json(model.privacy_card())])


def moments(*args, **kwargs):
  return tfdp.estimates.second_moments(*args, **{'noise_multiplier': 1.0, **kwargs})


class Clients:

  def __init__(self, client_ids):
    self.client_ids = client_ids


RAGGED = [[98765]] * (N - 1) + [[98765, 98765]]
NORMALIZATION = compat.keras.layers.Normalization()
IDS = np.arange(N)
USERS = private(unit='user')
FAILURES = {
    'lengths': drawn((x(), np.zeros(N - 1))),
    'shapes': drawn(Source(lambda _: np.full([3], VALUE, np.float32))),
    'structure': drawn(Source(lambda _: (VALUE, VALUE))),
    'kind': drawn(Source(lambda _: 'text 98765')),
    'missing': drawn(Source(lambda _: None)),
    'changing': drawn(Source(lambda source: np.full([2], source.read, np.float32))),
    'object': drawn(np.array([object(), *range(N - 1)])),
    'columns': drawn({'a': x()}, columns=('b',)),
    'no columns': drawn(x(), columns=('a',)),
    'batches': drawn(Uneven()),
    'data set': drawn(tf.data.Dataset.from_tensor_slices(x()).repeat()),
    'batched': drawn(tf.data.Dataset.from_tensor_slices(x()).batch(N - 1)),
    'another size': drawn(x(), private(
        population_size=5000, population_is_public=True, batch_size=50,
        sampling=tfdp.sampling.Poisson())),
    'a private size': lambda: private(population_size=N),
    'a private size, bounded': lambda: private(
        population_size=N, population_is_public=False, adjacency='zero_out'),
    'a private size below the batch': lambda: private(population_size=N, batch_size=9999),
    'a private size and a large delta': lambda: private(population_size=N, target_delta=.01),
    'a private size that is not whole': lambda: private(population_size=float(N)),
    'a private size and epochs': lambda: tfdp.PrivacyPlan.calibrate(
        target_epsilon=1.0, target_delta=1e-5, population_size=N, batch_size=40,
        adjacency='add_remove', steps=tfdp.sampling.Epochs(2)),
    'users': drawn(x(), USERS, users=IDS[1:], examples_per_user=1),
    'users in two columns': drawn(x(), USERS, users=np.stack([IDS, IDS], 1), examples_per_user=1),
    'audited lengths': lambda: subjects._checked((x(), np.zeros(N - 1))),
    'canaries': lambda: tfdp.audit.insert((x(), np.zeros(N)), [0, PLACE, N + 9]),
    'no id': drawn(x(), USERS, users=[None, *map(str, IDS[1:])], examples_per_user=1),
    'ragged': drawn(RAGGED),
    'ragged users': drawn(x(), USERS, users=RAGGED, examples_per_user=1),
    'a long text': drawn(np.array('a', 'U4273')),
    'long ids': drawn(x(), USERS, users=np.broadcast_to(np.array('a', 'U4273'), [N, 2]),
                      examples_per_user=1),
    'shape of a view': drawn(x(), augment=lambda one: np.zeros(int(one[0]))),
    'type of a view': drawn(np.full([N, 1], 'text'), augment=lambda one: np.zeros(1)),
    'views that fail': drawn(x(), augment=lambda one: [VALUE, 'text 98765']),
    'ragged targets': lambda: moments(x(), RAGGED),
    'texts as targets': lambda: moments(x(), ['text 98765'] * N),
    'fewer targets': lambda: moments(x(), np.zeros(N - 1)),
    'classes': lambda: moments(x(), np.full(N, 98765), classes=2),
    'shape of features': lambda: moments(np.zeros([N, 1, 2, 2])),
    'moments without a size': lambda: moments(x(), adjacency='add_remove'),
    'moments of another size': lambda: moments(x(), population_size=5000),
    'adapted texts': lambda: tfdp.estimates.adapt(
        NORMALIZATION, [['98765', 'text']] * N, noise_multiplier=1.0, bound=1.0),
    'adapted ragged': lambda: tfdp.estimates.adapt(
        NORMALIZATION, RAGGED, noise_multiplier=1.0, bound=1.0),
    'adapted without a size': lambda: tfdp.estimates.adapt(
        NORMALIZATION, x(), noise_multiplier=1.0, bound=1.0, adjacency='add_remove'),
    'scales': lambda: stddevs.private_stddevs(
        np.zeros(N), scale=1.0, target_epsilon=1.0, target_delta=1e-5),
    'features': lambda: tfdp.features(lambda a: np.zeros(N), x(), name='f'),
    'features of another shape': lambda: tfdp.features(
        lambda a: np.zeros([len(a), len(a)]), x(), name='f', batch_size=N - 1),
    'targets of features': lambda: tfdp.features(lambda a: a, (x(), np.zeros(N - 1)), name='f'),
    'head': lambda: tfdp.heads.least_squares(x(), RAGGED, noise_multiplier=1.0),
    'scores': lambda: tuning._scores(lambda *_: np.zeros(N - 1), None, x(), x(), N),
    'shadow scores': lambda: shadow_models._checked(np.zeros(N - 1), N),
    'users of nothing': lambda: tfdp.federated.Users([x()], batch_size=1),
    'a user': lambda: tfdp.federated.Users({'ann 98765': (x(), np.zeros(N - 1))}, batch_size=1),
    'rows without users': lambda: tfdp.federated.Users.from_rows(
        {'who': np.array([*IDS[1:], VALUE], object), 'x': x()}, user='who', batch_size=1),
    'clients twice': lambda: simulation._clients(Clients(['ann 98765'] * N)),
    'no clients': lambda: simulation._clients([VALUE] * N),
    'a cohort': lambda: rounds.run(None, None, None, ['ann 98765'] * N),
}
LINES = {
    'not JSON': '{"text": "one two 98765", "client"', 'a list': '["one two 98765"]',
    'no text': '{"98765": "one two three"}', 'client': '{"text": "a b c", "client": 98765.5}',
    'no client': '{"text": "a b 98765"}'}


def a_file(path, line):
  good = json.dumps({'text': 'one two three', 'client': 1, 'tags': ['a']})
  path.write_text('\n'.join([*[good] * (PLACE - 1), line, *[good] * (N - PLACE)]), encoding='utf-8')
  return path


@pytest.mark.parametrize('line', LINES)
def test_no_reader_of_files_prints_secrets(line, tmp_path, capfd):
  path = a_file(tmp_path / 'posts.jsonl', LINES[line])
  for read in (lambda: corpus.read(path, need_client=True),
               lambda: tfdp.federated.Users.from_json_lines(path, user='client', batch_size=1),
               lambda: tag_prediction.read(a_file(path, LINES[line][:-1] + ', "tags": 98765}'))):
    said = texts(capfd, read)
    assert 'raised' in said and 'posts' in said and not secrets_in(said), said
  path.write_bytes(b'one two three. ' * N + b'\n\xff98765')
  said = texts(capfd, lambda: corpus.read(path))
  assert 'raised' in said and not secrets_in(said), said


@pytest.mark.parametrize('case', FAILURES)
def test_no_error_prints_secrets(case, capfd):
  said = texts(capfd, FAILURES[case])
  assert 'raised' in said  # Or the case has lost its sense.
  assert not secrets_in(said), said


def test_secrets_are_found():
  assert secrets_in(f'lengths=[{N}, 3]') and secrets_in(f'record {PLACE}: {VALUE}')
  assert not secrets_in(f'0.{N} a{N}f')


def test_no_copies_are_counted_aloud(capfd):
  said = texts(capfd, drawn(x()))
  assert 'copies' in said and not secrets_in(said), said


def test_training_prints_no_secrets(capfd):
  said = texts(capfd, trained)
  assert 'Guarantee' in said, said
  assert not secrets_in(said), said


def test_estimates_without_a_public_count_print_no_secrets(capfd):
  private_count = dict(adjacency='add_remove', population_size=5000, noise_multiplier=5.0)
  layer = compat.keras.layers.Normalization()

  def made():
    # Records have both signs: a variance of zero may be negative with noise, and is refused then.
    spread = x() / VALUE * np.where(np.arange(N) % 2, 1, -1)[:, None]
    found = tfdp.estimates.second_moments(spread, constant=.5, **private_count)
    head = tfdp.heads.least_squares(
        tfdp.features(lambda a: a / VALUE, (x(), np.arange(N) % 2), name='f'), **private_count)
    costs = [found.ledger, tfdp.estimates.adapt(layer, x(), bound=2 * VALUE, **private_count)]
    models = [found.whitening(), *(tfdp.make_private(compat.keras.Sequential(
        [compat.keras.layers.Input([2]), one])) for one in (head, layer))]
    costs += [weight_ledger.Ledger.of(model).ledger() for model in models]
    assert all(len(cost.entries) == 1 for cost in costs)
    return '\n'.join(text for cost in costs for text in (cost.statement(), cost.to_json()))

  said = texts(capfd, made)
  assert 'raised' not in said and '5000' in said and not secrets_in(said), said
  # The sum is divided by the public number. By the true one, which is private, it gives VALUE.
  assert float(np.asarray(layer.adapt_mean)[0]) == pytest.approx(VALUE * N / 5000, rel=.08)


def test_commands_on_a_card_print_no_secrets(tmp_path, capfd):
  model = tfdp.make_private(compat.keras.Sequential([
      compat.keras.layers.Input([2]), compat.keras.layers.Dense(1)]))
  plan = private(seed=None)
  model.compile(tfdp.DPSGD(0.1, plan=plan), loss='mse', jit_compile=False)
  weights, coins, log, out = (
      str(tmp_path / name) for name in ('m.weights.h5', 'coins', 'digests', 'out'))
  model.fit(plan.batches((x() / VALUE, np.zeros(N)), coins=coins, digests_to=log),
            steps_per_epoch=1, epochs=2, verbose=0)
  model.save_weights(weights)
  edited = tmp_path / 'edited'
  header, *lines = (tmp_path / 'digests').read_text().splitlines()
  assert str(N) in header
  edited.write_text('\n'.join([header, *(line.replace('"records": [', '"records": ["0", ', 1)
                                         for line in lines)]))
  words = [part for about in registry.REQUIRED for part in (
      '--words', f'{about}=2026-11-28')]
  commands = {
      0: [['card', weights, '--out', out], ['card', weights, '--format', 'huggingface'],
          ['card', weights, '--format', 'registry', *words],
          ['verify', out, '--weights', weights],
          ['verify', out, '--opened', coins, '--digests', log]],
      3: [['verify', out, '--opened', coins, '--digests', str(edited)]],
      2: [['verify', out, '--opened', coins, '--digests', weights],
          ['verify', out, '--opened', log, '--digests', log],
          ['card', str(tmp_path)], ['verify', log]]}
  for status, some in commands.items():
    for command in some:
      said = texts(capfd, functools.partial(main.main, command))
      assert said.split('\n')[0] == str(status), said
      assert not secrets_in(said), said
  for path in (tmp_path / 'out').iterdir():
    assert not secrets_in(path.read_text(encoding='utf-8')), path


# Names of values that come from the data. Allowed are formats whose value does not.
NAMES = {'len', 'shape', 'size', 'count', 'counts', 'length', 'lengths', 'sizes', 'index',
         'indices', 'number', 'users', 'ids', 'records', 'rows', 'population', 'data',
         'labels', 'taken', 'dtype', 'value', 'values', 'line', 'client', 'clients', 'user',
         'examples', 'cohort', 'scores', 'row', 'record', 'array', 'targets', 'text', 'error'}
READERS = [*(path for folder in ('batches', 'estimates', 'audit')
             for path in sorted((PACKAGE / folder).glob('*.py'))),
           *(PACKAGE / name for name in ('tuning.py', 'frozen_features.py', 'heads.py')),
           *(pathlib.Path(module.__file__) for module in (
               corpus, tag_prediction, tasks, simulation, rounds, sources, users, silo))]
PUBLIC = {
    ('sources.py', 'len(leaves(parts))'): 'number of arrays',
    ('sources.py', 'len(lengths)'): 'number of different lengths, at most that of arrays',
    ('sources.py', 'len(sizes)'): 'number of different lengths, at most that of arrays',
    ('sources.py', 'size'): 'batch size that the user wrote',
    ('sources.py', 'len(shape)'): 'number of axes',
    ('sources.py', 'len(shared)'): 'public examples, for whoever has them and the data',
    ('users.py', 'sizes'): 'sizes that the user wrote',
    ('sources.py', 'user'): 'name of a column', ('tuning.py', 'values'): 'settings',
    ('sources.py', 'error'): 'an error of SQLite when it opens a file',
    ('cache.py', 'error'): 'a file that is no cache', ('silo.py', 'error'): 'a field is missing',
    ('sampling_seed.py', 'error'): 'a file that is no seed',
    ('digests.py', 'str(error)[:80]'): 'a file that is none', ('silo.py', 'taken'): 'steps',
    ('moments.py', 'count'): 'noisy', ('moments.py', 'values.sum()'): 'noisy',
    ('moments.py', "', '.join(map(str, values.shape[1:]))"): 'axes of one target',
    ('frozen_features.py', 'len(trained)'): 'number of weights',
    ('subjects.py', 'len(lengths)'): 'number of different lengths',
    **{('canaries.py', f'{name}.shape'): 'number of canaries, which the auditor chose'
       for name in ('included', 'indices', 'scores')},
    ('users.py', 'sorted({type(one).__name__ for one in ids})'): 'types',
}


def test_no_message_formats_what_comes_from_the_data():
  found = set()
  for path in READERS:
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      says = isinstance(node, ast.Raise) or (
          isinstance(node, ast.Call) and ast.unparse(node.func) in ('warnings.warn', 'print'))
      for part in ast.walk(node) if says else ():
        if isinstance(part, ast.FormattedValue):
          names = {one.id for one in ast.walk(part.value) if isinstance(one, ast.Name)}
          text = ast.unparse(part.value)
          named = names | {text.rpartition('.')[2]}
          harmless = text.startswith('type(') or text.endswith(('.ndim', '.dtype.type.__name__'))
          if named & NAMES and not harmless:
            found.add((path.name, text))
  assert found == set(PUBLIC)
