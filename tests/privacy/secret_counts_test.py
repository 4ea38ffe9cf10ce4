# SPDX-License-Identifier: Apache-2.0
"""No text of the library prints how many records there are, a record's value, or which one failed.

The first test feeds a secret number of records and secret values to everything that reads
records, and searches all that is printed. The second one searches the source.
"""

import ast
import functools
import logging
import pathlib
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.audit import subjects
from tfdp_adaptive.cli import main
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
    'users': drawn(x(), USERS, users=IDS[1:], examples_per_user=1),
    'users in two columns': drawn(x(), USERS, users=np.stack([IDS, IDS], 1), examples_per_user=1),
    'audited lengths': lambda: subjects._checked((x(), np.zeros(N - 1))),
    'canaries': lambda: tfdp.audit.insert((x(), np.zeros(N)), [0, PLACE, N + 9]),
    'no id': drawn(x(), USERS, users=[None, *map(str, IDS[1:])], examples_per_user=1),
}


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
         'labels', 'taken'}
PUBLIC = {
    ('sources.py', 'len(leaves(parts))'): 'number of arrays',
    ('sources.py', 'len(lengths)'): 'number of different lengths, at most that of arrays',
    ('sources.py', 'len(sizes)'): 'number of different lengths, at most that of arrays',
    ('sources.py', 'size'): 'batch size that the user wrote',
    ('sources.py', 'len(shape)'): 'number of axes',
    ('users.py', 'ids.ndim'): 'number of axes',
    ('users.py', 'ids.dtype'): 'type',
    ('users.py', 'sorted({type(one).__name__ for one in ids})'): 'types',
}


def test_no_message_of_the_batches_formats_what_comes_from_the_data():
  found = set()
  for path in sorted((PACKAGE / 'batches').glob('*.py')):
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      says = isinstance(node, ast.Raise) or (
          isinstance(node, ast.Call) and ast.unparse(node.func) in ('warnings.warn', 'print'))
      for part in ast.walk(node) if says else ():
        if isinstance(part, ast.FormattedValue):
          names = {one.id for one in ast.walk(part.value) if isinstance(one, ast.Name)}
          text = ast.unparse(part.value)
          named = names | {text.rpartition('.')[2]}
          if named & NAMES and not text.startswith('type('):
            found.add((path.name, text))
  assert found == set(PUBLIC)
