# SPDX-License-Identifier: Apache-2.0
"""A run that ends at whatever point goes on as if it had not, and never with old noise."""

import csv
import os
import pathlib
import shutil
import signal
import stat

import numpy as np
import nursery
import pytest
import regression
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import noise
from tfdp_adaptive import rules
from tfdp_adaptive.federated import rounds
from tfdp_adaptive.federated import run as run_lib
from tfdp_adaptive.federated import storage
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib

STEPS = 3
METRICS = tfdp.federated.PrivateMetrics({'loss': (0.0, 50.0)}, share=0.1)


class Killed(BaseException):
  """Nothing of ours may catch it."""


@pytest.fixture(scope='module')
def users():
  return tfdp.federated.Users(regression.make_users(), batch_size=4)


@pytest.fixture(scope='module')
def process():
  return regression.build(
      rules.dp_adam(), regression.make_plan(steps=STEPS), private_metrics=METRICS,
      quantile_clip=tfdp.federated.QuantileClip())


def simulate(process, users, out, **kwargs):
  return tfdp.federated.simulate(
      process, users, out=out, progress=False, rounds_per_evaluation=1,
      evaluate=lambda weights: {'norm': float(np.linalg.norm(regression.flat(weights)))}, **kwargs)


@pytest.fixture(scope='module')
def straight(process, users):
  return simulate(process, users, None)


def noise_keys(tree):
  """All noise keys in a state."""
  if isinstance(tree, noise.State):
    return [tuple(np.asarray(tree.key))]
  return [key for child in tree for key in noise_keys(child)] if isinstance(tree, tuple) else []


def released_rows(path):
  with open(path / 'metrics.csv', encoding='utf-8') as file:
    return list(csv.DictReader(file))


def load(path, template):
  """Returns the saved state and its record."""
  arrays, record = storage.RunFolder(path).load()
  return tf.nest.pack_sequence_as(template, [*map(tf.constant, arrays)]), record


def released_rounds(path):
  return [int(row['round']) for row in released_rows(path)]


@pytest.mark.thorough(rows=['clients'])
@pytest.mark.parametrize('point', ['clients', 'save', 'replace', 'evaluate', 'release'])
def test_a_run_that_was_cut_off_ends_like_one_that_was_not(
    point, process, users, straight, tmp_path, monkeypatch):
  place = {'clients': (rounds, 'run'), 'save': (storage.RunFolder, 'save'),
           'replace': (os, 'replace'), 'release': (run_lib.Releases, 'release')}.get(point)
  count = iter(range(100))

  def cut(*args, **kwargs):
    if (point != 'replace' or str(args[1]).endswith('state.npz')) and next(count) == 1:
      raise Killed
    return original(*args, **kwargs)

  def evaluate(weights):
    if point == 'evaluate' and next(count) == 1:
      raise Killed
    return {'norm': float(np.linalg.norm(regression.flat(weights)))}

  with monkeypatch.context() as patch:
    if place:
      original = getattr(*place)
      patch.setattr(*place, cut)
    with pytest.raises(Killed):
      tfdp.federated.simulate(process, users, out=tmp_path, progress=False,
                              rounds_per_evaluation=1, evaluate=evaluate)
  saved, _ = load(tmp_path, straight.state)
  assert released_rounds(tmp_path) == list(range(1, len(released_rounds(tmp_path)) + 1))
  assert len(released_rounds(tmp_path)) <= int(saved.round) == (
      2 if point in ('evaluate', 'release') else 1)
  resumed = simulate(process, users, tmp_path)
  np.testing.assert_allclose(
      regression.flat(resumed.weights), regression.flat(straight.weights), rtol=1e-6)
  assert released_rounds(tmp_path) == [1, 2, 3]
  rows = released_rows(tmp_path)
  for name in ('private/loss', 'private/clients', 'private/l2_norm_clip', 'norm'):
    values = [row[name] for row in straight.history]
    np.testing.assert_allclose([row[name] for row in resumed.history], values, rtol=1e-5)
    np.testing.assert_allclose([float(row[name]) for row in rows], values, rtol=1e-5)
  assert list((tmp_path / 'tensorboard').glob('events*'))
  # And when all is done, nothing more is.
  again = simulate(process, users, tmp_path)
  assert again.rounds == STEPS and len(again.history) == STEPS


SCRIPT = """
import os, signal, sys
root, out, point = sys.argv[1:]
sys.path[:0] = [root, root + '/tests/federated']
import tfdp_adaptive as tfdp
import regression, resume_test
from tfdp_adaptive.federated import rounds, run as run_lib, storage

places = {'clients': (rounds, 'run'), 'replace': (os, 'replace'),
          'saved': (storage.RunFolder, 'save'), 'release': (run_lib.Releases, 'release')}
original, calls = getattr(*places[point]), []

def killed_at_the_second_call(*args, **kwargs):
  if point != 'replace' or str(args[1]).endswith('state.npz'):
    calls.append(args)
  if point == 'saved':
    original(*args, **kwargs)
  if len(calls) == 2:
    os.kill(os.getpid(), signal.SIGKILL)
  return None if point == 'saved' else original(*args, **kwargs)

setattr(*places[point], killed_at_the_second_call)
resume_test.unseeded(resume_test.unseeded_process(), out)
"""


def unseeded_process():
  return tfdp.federated.build_private_fed_avg(
      server_rule=rules.dp_adam(), plan=regression.make_plan(steps=6), server_learning_rate=0.5,
      client_optimizer_fn=regression.client_optimizer, **regression.of_engine('in_process'))


def unseeded(process, out, **kwargs):
  """`simulate`, writing down the noise that every round draws: its key and its row."""
  original = rounds.run

  def spy(process, engine, state, *args, **kwargs):
    with open(pathlib.Path(out) / 'noise_used', 'a', encoding='utf-8') as file:
      print(noise_keys(state), int(state.round), file=file)
    return original(process, engine, state, *args, **kwargs)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(rounds, 'run', spy)
    return tfdp.federated.simulate(
        process, tfdp.federated.Users(regression.make_users(), batch_size=4), out=out,
        progress=False, **kwargs)


@pytest.mark.thorough
def test_kill_9(tmp_path):
  """At four points, one process after the other: each goes on where the last one was."""
  root = pathlib.Path(__file__).parents[2]
  process = unseeded_process()
  template = process.initialize()
  script = tmp_path / 'script.py'
  script.write_text(SCRIPT, encoding='utf-8')
  with nursery.Nursery('tensorflow', 'tfdp_adaptive.keras.named_optimizers') as mother:
    for point, saved_rounds, released in (
        ('clients', 1, 1),   # While the clients of round 2 train.
        ('replace', 2, 2),   # Round 3 is written, but not yet in its place.
        ('saved', 4, 3),     # Between saving round 4 and releasing it.
        ('release', 5, 4)):  # The fourth is released late, the fifth not.
      status, said = mother.run(tmp_path / 'output', script, root, tmp_path, point)
      assert status == -signal.SIGKILL, said
      saved, record = load(tmp_path, template)
      assert int(saved.round) == record['pending']['round'] == saved_rounds
      assert released_rounds(tmp_path) == list(range(1, released + 1))
  result = unseeded(process, tmp_path)
  assert result.rounds == 6 and [row['round'] for row in result.history] == [1, 2, 3, 4, 5, 6]
  assert released_rounds(tmp_path) == [1, 2, 3, 4, 5, 6]
  used = (tmp_path / 'noise_used').read_text(encoding='utf-8').splitlines()
  # Rounds 2 and 3 were begun twice: with the noise of other keys.
  assert [int(line.split()[-1]) for line in used] == [0, 1, 1, 2, 2, 3, 4, 5]
  assert len(set(used)) == len(used)


def test_a_run_that_goes_on_keeps_what_its_first_weights_cost_and_its_seed(tmp_path):
  """The weights are those of the folder, whatever model the process is given now."""
  plan = regression.make_plan(steps=6, seed=None)
  earlier = ledger_lib.Entry(plan, 4, run='an earlier run')
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)

  def ledger(rounds, *past, seed=None, out=tmp_path):
    def model_fn():
      model = regression.model_fn()
      weight_ledger.Ledger.of(model).attach(past)
      return model

    process = regression.build(rules.dp_adam(), plan, model_fn=model_fn, seed=seed)
    result = tfdp.federated.simulate(process, users, out=out, rounds=rounds, progress=False)
    assert len(result.card().runs) == len(result.weights.ledger.entries)
    return result.weights.ledger

  first = ledger(2, earlier, seed=3)
  assert [entry.steps for entry in first.entries] == [4, 2]
  second = ledger(3)
  assert [entry.steps for entry in second.entries] == [4, 3] and second.entries[-1].seeded
  assert second.epsilon() == tfdp.Ledger((earlier,)).begin(plan).done(3).epsilon()
  # Weights of this folder, in the model that it is then given, are no earlier run.
  third = ledger(5, *second.entries)
  assert [entry.steps for entry in third.entries] == [4, 5]
  assert ledger_lib.distinct([*first.entries, *second.entries, *third.entries]) == third
  # Two runs that part ways after a round count as two.
  other = ledger(4, out=shutil.copytree(tmp_path, tmp_path.with_name('copy')))
  assert [entry.steps for entry in other.entries] == [4, 5]
  parted = [ledger(6), ledger(6, out=tmp_path.with_name('copy'))]
  assert [entry.steps for entry in ledger_lib.distinct(
      [entry for one in parted for entry in one.entries]).entries] == [4, 6, 6]


def test_a_run_that_goes_on_draws_with_fresh_keys(tmp_path):
  process = unseeded_process()
  unseeded(process, tmp_path, rounds=1)
  saved, _ = load(tmp_path, process.initialize())
  unseeded(process, tmp_path, rounds=2)
  first, second = (tmp_path / 'noise_used').read_text(encoding='utf-8').splitlines()
  assert first.endswith(' 0') and second.endswith(' 1')
  assert not any(str(key) in second for key in noise_keys(saved))


def test_fresh_keys_reach_all_noise_and_nothing_else(process):
  state = tf.nest.map_structure(tf.constant, process.initialize())
  fresh = storage.with_fresh_keys(state)
  old, new = noise_keys(state), noise_keys(fresh)
  assert len(old) == len(new) == 2 and not set(old) & set(new)
  changed = [not np.array_equal(a, b)
             for a, b in zip(tf.nest.flatten(state), tf.nest.flatten(fresh))]
  assert sum(changed) == 2


def test_correlated_noise_goes_on_with_its_history(process):
  """The restored rows are those of C^-1 over old and new z: what was drawn is not forgotten."""
  del process
  mechanism = tfdp.mechanisms.BandedToeplitz(bands=3, steps=6)
  specs = tf.TensorSpec([2000])
  stream = noise.stream(mechanism)
  state, rows = stream.init(specs), []
  for step in range(6):
    if step == 3:
      state = storage.with_fresh_keys(state)
    row, _, state = stream.next(state, specs)
    rows.append(row.numpy())
  z = mechanism.materialize(6) @ np.asarray(rows, np.float64)
  covariance = z @ z.T / 2000
  np.testing.assert_allclose(covariance, np.eye(6), atol=0.15)


def test_the_folder_is_private_locked_and_for_one_run(process, users, tmp_path):
  simulate(process, users, tmp_path, rounds=1)
  assert stat.S_IMODE((tmp_path / 'state.npz').stat().st_mode) == 0o600
  with storage.RunFolder(tmp_path):
    with pytest.raises(BlockingIOError, match='same noise twice'):
      simulate(process, users, tmp_path)
  other = regression.build(rules.dp_adam(), regression.make_plan(steps=STEPS + 1),
                           private_metrics=METRICS,
                           quantile_clip=tfdp.federated.QuantileClip())
  with pytest.raises(ValueError, match='another plan or other settings'):
    simulate(other, users, tmp_path)
  with pytest.raises(ValueError, match=r"in \['private_metrics', 'quantile_clip', 'server_rule'\]"):
    simulate(regression.build(rules.dp_sgd(), regression.make_plan(steps=STEPS)), users, tmp_path)


def test_what_no_run_saved_is_told_apart(tmp_path):
  tree = (tf.range(3), tf.ones([2]))
  with storage.RunFolder(tmp_path) as folder:
    folder.save(tree, {'history': []})
    assert folder.load()[1] == {'history': []}
    path = tmp_path / 'state.npz'
    saved = path.read_bytes()
    for broken in (b'', b'broken', saved[:len(saved) // 2], saved[:-100] + bytes(100),
                   saved.replace(b'record', b'report'), saved.replace(b'"', b'{')):
      path.write_bytes(broken)
      with pytest.raises(tfdp.federated.SavedRunError, match='state.npz must be what a run saved'):
        folder.load()


def test_a_state_of_another_model_is_told_apart(tmp_path, process, users):
  simulate(process, users, tmp_path, rounds=1)
  with storage.RunFolder(tmp_path) as folder:
    arrays, record = folder.load()
    folder.save(arrays[:-1], record)
  with pytest.raises(tfdp.federated.SavedRunError, match='another model, rule or mechanism'):
    simulate(process, users, tmp_path)


def test_a_run_may_stop_before_the_plan_ends(process, users):
  result = simulate(process, users, None, rounds=2, facts=['Vocabulary: of another text.'])
  assert result.rounds == 2
  assert 'after 2 of the 3 planned steps' in result.statement
  assert 'Adaptive clip norm: QuantileClip(' in result.statement
  assert "Private metrics: PrivateMetrics(ranges={'loss': (0.0, 50.0)}" in result.statement
  assert result.statement.count('inside the same budget') == 2
  assert result.statement.endswith('Vocabulary: of another text.\n')


def test_stragglers_are_left_out_whatever_their_data(process, users, monkeypatch):
  sizes = []
  original = rounds.run

  def spy(process, engine, state, cohort, *args, **kwargs):
    sizes.append(len(cohort))
    return original(process, engine, state, cohort[:1], *args, **kwargs)

  monkeypatch.setattr(rounds, 'run', spy)
  everyone = tfdp.federated.Users(
      {f'user{i}': next(iter(regression.make_users().values())) for i in range(2000)},
      batch_size=4)
  plan = regression.make_plan(steps=1, population_size=2000, batch_size=2000,
                              sampling=tfdp.sampling.Poisson(sampling_probability=1),
                              noise_multiplier=1.0)
  simulate(regression.build(rules.dp_sgd(), plan), everyone, None, dropout=0.25)
  assert abs(sizes[0] - 1500) < 5 * np.sqrt(2000 * 0.25 * 0.75) and sizes[0] < 2000
