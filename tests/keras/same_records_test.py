# SPDX-License-Identifier: Apache-2.0
"""Where places decide when records take part, a run goes on with its records in their places."""

import types
import zipfile

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import private_rule
from tfdp_adaptive.batches import batches as batches_lib
from tfdp_adaptive.keras import fit as fit_lib
from tfdp_adaptive.keras import run as run_lib

keras = compat.keras
N = 16
X = np.random.default_rng(0).normal(size=(N, 4)).astype('float32')
Y = np.arange(N, dtype='float32')
ORDERED = [tfdp.sampling.FixedOrder(), tfdp.sampling.FixedOrder(shuffle_seed=None),
           tfdp.sampling.CyclicPoisson(2), tfdp.sampling.BallsInBins(2, draws=0),
           tfdp.sampling.RandomAllocation(2),
           tfdp.sampling.BallsInBins(2, draws=9), tfdp.sampling.MinSeparation(2, draws=9)]


def make_plan(scheme=ORDERED[0], **changes):
  return tfdp.PrivacyPlan(**{**dict(
      population_size=N, batch_size=8, steps=8, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-3, sampling=scheme), **changes})


def resumed(first, second, steps=2):
  """Whether a run on batches `first` may go on with `second`."""
  run = run_lib.Run(first.plan, None)
  batches_lib.check_order(run, first.digest)
  noise = types.SimpleNamespace(row=steps)
  run.state = private_rule.State(None, types.SimpleNamespace(noise=noise))
  try:
    batches_lib.check_order(run, second.digest)
    return True
  except tfdp.PrivacyError as error:
    assert 'in the same order' in str(error) and 'after 2 steps' in str(error)
    return False


class Records:
  """A source of one's own; augmented if it has a generator."""

  def __init__(self, order, rng=None):
    self._order, self._rng = order, rng

  def __len__(self):
    return len(self._order)

  def __getitem__(self, place):
    noise = 0 if self._rng is None else self._rng.integers(0, 2)
    return X[self._order[place]] + np.float32(noise), Y[self._order[place]]


class Batches(keras.utils.Sequence):
  """Batches of five."""

  def __init__(self, order):
    super().__init__()
    self._order = order

  def __len__(self):
    return (len(self._order) + 4) // 5

  def __getitem__(self, number):
    places = self._order[5 * number:5 * number + 5]
    return X[places], Y[places]


def mapped(order, folder):
  path = folder / f'{len(list(folder.iterdir()))}.npy'
  np.save(path, X[order])
  return np.load(path, mmap_mode='r'), Y[order]


KINDS = {
    'arrays': lambda order, _: (X[order], Y[order]),
    'mapped': mapped,
    'records': lambda order, _: Records(order),
    'batches': lambda order, _: Batches(order),
    'tf.data': lambda order, _: tf.data.Dataset.from_tensor_slices((X[order], Y[order]))}
PLACES = np.arange(N)


@pytest.mark.pitfall(
    'A second `fit`, or one that resumes from a backup, gets other examples or another order, '
    'and the order determines who takes part when.',
    severity='critical',
    stops='PrivacyError, because the optimizer and `tfdp.callbacks.BackupAndRestore` remember '
          'digests of some examples')
@pytest.mark.parametrize('kind', KINDS)
def test_only_the_same_records_in_the_same_places_go_on(kind, tmp_path):
  plan = make_plan()
  batches = lambda order: plan.batches(KINDS[kind](order, tmp_path))
  first, swapped = batches(PLACES), PLACES.copy()
  swapped[[3, 9]] = 9, 3
  assert resumed(first, batches(PLACES))
  for order in (PLACES[::-1], np.roll(PLACES, 1), swapped, np.where(PLACES == 7, 8, PLACES)):
    other = batches(order)
    assert not resumed(first, other) and resumed(first, other, 0)  # Nothing was taken of it yet.
  for order in (PLACES[:-1], np.concatenate([[0], PLACES])):  # The plan's own check.
    with pytest.raises(ValueError, match='population_size=16'):
      batches(order)


@pytest.mark.parametrize('scheme', ORDERED, ids=str)
def test_every_scheme_in_which_places_count(scheme):
  plan, labels = make_plan(scheme), Y.copy()
  labels[5] += 1
  first = plan.batches((X, Y))
  assert resumed(first, plan.batches((X.copy(), Y))) and not resumed(
      first, plan.batches((X, labels)))
  if scheme is ORDERED[0]:  # Where every step has coins of its own, they do not.
    poisson = make_plan(tfdp.sampling.Poisson())
    assert resumed(poisson.batches((X, Y)), poisson.batches((X, labels)))


def test_users_are_known_by_their_ids_and_data_that_change_by_their_number():
  plan, ids = make_plan(unit='user', population_size=8, batch_size=4), np.arange(N) % 8
  of = lambda order, users: plan.batches(
      (X[order], Y[order]), users=users, examples_per_user=2)
  assert resumed(of(PLACES, ids), of(PLACES[::-1], ids[::-1]))  # In the order of their ids.
  assert not resumed(of(PLACES, ids), of(PLACES, ids + 1))
  augmented = make_plan().batches(
      Records(PLACES, np.random.default_rng(1)), changing='a number is added to each record')
  assert resumed(augmented, augmented)


def make_model(plan):
  model = tfdp.make_private(keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(1)]))
  model.compile(tfdp.DPSGD(0.1, plan=plan), 'mse')
  return model


class Interrupts(keras.callbacks.Callback):
  """Ends the second epoch before it begins."""

  def on_epoch_begin(self, epoch, logs=None):
    if epoch == 1:
      raise KeyboardInterrupt


def test_fits_backups_and_saved_models(tmp_path):
  plan, right, wrong = make_plan(), (X, Y), (X[::-1], Y[::-1])
  model = make_model(plan)

  def fit(data, *callbacks):
    left = plan.batches(data, start_step=model.optimizer.steps_done)
    model.fit(left, epochs=2, steps_per_epoch=2, verbose=0, callbacks=list(callbacks))

  def another_process():
    model.optimizer.run.records = None
    model.optimizer.run.state[1].noise.row.assign(0)

  backup = lambda: tfdp.callbacks.BackupAndRestore(tmp_path / 'backup')
  with pytest.raises(KeyboardInterrupt):
    fit(right, backup(), Interrupts())
  before = model.get_weights()
  another_process()
  for _ in range(2):  # In one that was refused, too, and now by what it remembers.
    with pytest.raises(tfdp.PrivacyError, match='FixedOrder.*after 2 steps, other records'):
      fit(wrong, backup())
  np.testing.assert_array_equal(model.get_weights()[0], before[0])
  another_process()
  fit(right, backup())
  assert model.optimizer.steps_done == 4
  with pytest.raises(tfdp.PrivacyError, match='after 4 steps, other records'):
    fit(wrong)
  path = tmp_path / 'model.keras'
  model.save(path)
  digest = model.optimizer.run.records.encode()
  with zipfile.ZipFile(path) as file:  # A digest tells of records, and this may be published.
    assert not any(digest in file.read(name) for name in file.namelist())
  loaded = keras.models.load_model(path)
  assert loaded.optimizer.run.records is None
  again = lambda data: fit_lib.check_fit(
      loaded.optimizer, plan.batches(data, start_step=4), None, {})
  with pytest.warns(tfdp.Caution, match='The 4 steps so far were taken elsewhere'):
    again(right)
  again(right)
  with pytest.raises(tfdp.PrivacyError, match='after 4 steps, other records'):
    again(wrong)
  loaded.optimizer.run.records = None
  with_coins = plan.batches(right, start_step=4, coins=tmp_path / 'coins')
  fit_lib.check_fit(loaded.optimizer, with_coins, None, {})  # The file knows.
