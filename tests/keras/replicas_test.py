# SPDX-License-Identifier: Apache-2.0
"""Whose rows a replica may have, and which ways of spreading a model are refused."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.batches import tags
from tfdp_adaptive.batches import workers
from tfdp_adaptive.keras import fit as fit_lib

PLAN = tfdp.PrivacyPlan(
    population_size=40, batch_size=10, steps=5, l2_norm_clip=1.0, noise_multiplier=1.0,
    target_delta=1e-6)
SCHEMES = [
    tfdp.sampling.Poisson(), tfdp.sampling.TruncatedPoisson(max_batch_size=13),
    tfdp.sampling.CyclicPoisson(cycle=2), tfdp.sampling.BallsInBins(cycle=4, draws=0),
    tfdp.sampling.MinSeparation(min_sep=2, draws=0), tfdp.sampling.FixedOrder(),
    tfdp.sampling.RandomAllocation(cycle=4), tfdp.sampling.PoissonExamples(examples_per_user=2)]


def dealt(plan, drawn, start=0, count=2):
  """What workers get of one draw of the chief's."""
  told = sampling_seed.for_workers(drawn.seed, lambda: drawn.draw(start))
  both = [sampling_seed.ReceivedSeed(plan) for _ in range(count)]
  for one in both:
    one.receive(told)
  return both


@pytest.mark.parametrize('scheme', SCHEMES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize('adjacency', ['zero_out', 'add_remove'])
def test_shares_are_disjoint_rows_of_one_batch(scheme, adjacency):
  if adjacency not in scheme.adjacencies:
    pytest.skip('the scheme has no such neighbours')
  users = dict(users=np.arange(40) // 4) if scheme.by_example else {}
  plan = dataclasses.replace(
      PLAN, sampling=scheme, adjacency=adjacency, population_is_public=True,
      unit='user' if users else 'example')
  # Each worker makes its own batches, and all take the seed of the first.
  own = [plan.batches((np.arange(1, 41), np.arange(1, 41)), **users) for _ in range(3)]
  rows = (workers.ReplicaRows(3, 0, 2), workers.ReplicaRows(3, 2, 1), workers.ReplicaRows())
  shares = [dataclasses.replace(
      drawn, start_step=lambda: 0, seed=one, beside=True, replica_rows=rows)
            for drawn, one, rows in zip(own, dealt(plan, own[0], count=3), rows)]
  first, second, alone = (list(share.as_numpy_iterator()) for share in shares)
  assert (len(first), len(second)) == (10, 5)
  for step in range(5):
    parts = [*first[2 * step:2 * step + 2], second[step]]
    assert len({part[0].shape for part in parts}) == 1  # They divide by the replicas.
    there = np.concatenate([part[0] for part in parts])
    records = there[there > 0]
    assert len(set(records)) == len(records) and not np.any(there[len(records):])
    np.testing.assert_array_equal(records, alone[step][0][alone[step][0] > 0])
    counted = [skipped(plan, step, part[-1]) for part in parts]
    assert tags.in_place(tf.constant(counted, tf.int64), several=True)
    assert not tags.in_place(tf.constant(counted, tf.int64), several=False)
  assert max(part[0].max() for part in first + second) > 0


def skipped(plan, step, weights):
  """What a replica counts of its rows."""
  rows = tags.row_of(weights.tag.astype(np.int64), plan, step) - np.arange(len(weights.tag))
  used = rows[weights.weight != 0]
  return [len(rows), *((used.min(), used.max()) if len(used) else (2**63 - 1, -2**63))]


TAG = 5 * tags.MOST_ROWS
NONE = [4, 2**63 - 1, -2**63]


@pytest.mark.parametrize('counted, several, alone', [
    ([[4, 0, 0], [4, 4, 4]], False, True),
    ([[4, TAG, TAG], [4, TAG + 4, TAG + 4]], True, False),
    ([[4, TAG, TAG], NONE], True, False),
    ([NONE, NONE], True, True),
    ([[4, 0, 0], [4, 0, 0]], False, False),  # Everybody has the same rows.
    ([[4, TAG, TAG], [4, TAG, TAG]], False, False),
    ([[4, TAG, TAG], [4, 2 * TAG + 4, 2 * TAG + 4]], False, False),  # Two different draws.
    ([[4, 4, 4], [4, 0, 0]], False, False),  # Exchanged.
    ([[4, 1, 1], [4, 5, 5]], False, False),  # The first is left out.
    ([[4, 0, 1], [4, 4, 4]], False, False),  # Moved within.
    ([[4, 77, 77], [4, 81, 81]], False, False),  # Another step.
])
def test_rows_are_those_of_their_replica(counted, several, alone):
  counted = tf.constant(counted, tf.int64)
  assert bool(tags.in_place(counted, several=True)) == several
  assert bool(tags.in_place(counted, several=False)) == alone


def test_every_worker_names_the_seed_of_the_chief(monkeypatch, tmp_path):
  """A worker draws nothing by its own file, so that its digest would be of no batch."""
  monkeypatch.setattr(workers, 'from_chief', lambda strategy, make: b'["The seed of the chief."]')
  monkeypatch.setattr(compat, 'has_workers', lambda strategy=None: strategy is not None)
  model = tfdp.DPSequential([compat.keras.Input([1]), compat.keras.layers.Dense(1)])
  model.compile(tfdp.DPSGD(0.1, plan=PLAN), loss='mse')
  data = np.ones([40, 1], np.float32), np.ones([40, 1], np.float32)
  model.fit(PLAN.batches(data, coins=tmp_path / 'coins'), steps_per_epoch=1, verbose=0)
  notes = model.ledger.entries[0].notes
  assert 'The seed of the chief.' in notes and not any('digest' in note for note in notes)


def test_two_draws_differ_and_one_is_the_same_for_all():
  drawn = PLAN.batches((np.arange(40), np.arange(40)))
  one, same = dealt(PLAN, drawn)
  other, _ = dealt(PLAN, drawn)
  assert one.of_pass() == same.of_pass() != other.of_pass()
  assert one.of_users() == same.of_users()
  assert one.draw == same.draw != 0
  later = one.draw
  assert one.of_pass() == same.of_pass() and one.draw != later  # The next pass.


class ParameterServerStrategyV2(tf.distribute.OneDeviceStrategy):
  pass


def test_what_was_not_tried_is_refused(monkeypatch):
  fit_lib.check_strategy(tf.distribute.get_strategy())
  fit_lib.check_strategy(tf.distribute.OneDeviceStrategy('CPU:0'))
  monkeypatch.setattr(fit_lib, '_TRIED', (tf.distribute.MirroredStrategy,))
  for strategy, why in ((ParameterServerStrategyV2('CPU:0'), 'at different times'),
                        (tf.distribute.OneDeviceStrategy('CPU:0'), 'not tried')):
    with strategy.scope():
      model = tfdp.DPSequential([compat.keras.Input([1]), compat.keras.layers.Dense(1)])
      model.compile(tfdp.DPSGD(0.1, plan=PLAN), loss='mse')
    batches = PLAN.batches((np.ones([40, 1], np.float32), np.ones([40, 1], np.float32)))
    refused = pytest.raises(tfdp.PrivacyError, match=why + '.*MultiWorkerMirrored')
    with refused:  # Outside the scope, as usual.
      model.fit(batches, verbose=0)
    with refused:
      model.train_on_batch(*next(iter(batches)))
    with refused, strategy.scope():
      strategy.run(model.train_step, args=(next(iter(batches)),))
    assert model.optimizer.steps_done == 0


@pytest.mark.skipif(not compat.KERAS_3, reason='Keras 2 has none')
def test_a_distribution_of_keras_is_refused_by_fit():
  keras, distribution = compat.keras, compat.keras.distribution
  model = tfdp.DPSequential([keras.Input([1]), keras.layers.Dense(1)])
  model.compile(tfdp.DPSGD(0.1, plan=PLAN), loss='mse')
  batches = PLAN.batches((np.ones([40, 1], np.float32), np.ones([40, 1], np.float32)))
  distribution.set_distribution(distribution.DataParallel(devices=['cpu:0']))
  try:
    with pytest.raises(tfdp.PrivacyError, match='one device.*set_distribution'):
      model.fit(batches, verbose=0)
    with pytest.raises(tfdp.PrivacyError, match='set_distribution'):
      model.train_on_batch(*next(iter(batches)))
  finally:
    distribution.set_distribution(None)
  assert model.optimizer.steps_done == 0


@pytest.mark.pitfall(
    'Each worker of a cluster gets a shard of the records, as Ray Train gives them.',
    severity='critical', stops='an error, because a plan draws each batch from all examples')
def test_a_shard_of_a_worker_is_refused(monkeypatch):
  data = tf.data.Dataset.from_tensor_slices((np.zeros([40, 3], 'f'), np.zeros([40, 1], 'f')))
  options = tf.data.Options()
  options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
  shard = data.with_options(options).prefetch(1)  # As `prepare_dataset_shard` does.
  PLAN.batches(shard)  # A single process has all of the data.
  monkeypatch.setenv('TF_CONFIG', '{"cluster": {"worker": ["a:1", "b:1"]}, '
                     '"task": {"type": "worker", "index": 0}}')
  PLAN.batches(data)
  with pytest.raises(errors.PrivacyError, match='from ALL records'):
    PLAN.batches(shard)
  of_ray = type('DataIterator', (), {'iter_tf_batches': None})()
  with pytest.raises(errors.PrivacyError, match='from ALL records'):
    PLAN.batches(of_ray)
