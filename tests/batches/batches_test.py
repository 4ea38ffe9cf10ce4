# SPDX-License-Identifier: Apache-2.0
"""Padded, masked batches: nothing dropped, nothing invented, nothing seen twice."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.batches import batches as batches_lib
from tfdp_adaptive.batches import padding
from tfdp_adaptive.privacy import plan as plan_lib

N = 120


def make_plan(**changes):
  fields = dict(population_size=N, batch_size=16, steps=12, l2_norm_clip=1.0,
                noise_multiplier=1.0, target_delta=1e-5, seed=5)
  fields.update(changes)
  return plan_lib.PrivacyPlan(**fields)


def make_data():
  x = np.arange(1, N + 1, dtype=np.float32)[:, None] * np.ones(3, np.float32)
  return x, np.arange(1, N + 1)


@pytest.mark.parametrize('scheme', [
    sampling.Poisson(), sampling.CyclicPoisson(cycle=3), sampling.FixedOrder()], ids=repr)
def test_batches_hold_exactly_the_records_of_the_plan(scheme):
  plan = make_plan(sampling=scheme)
  expected = list(plan.index_batches())
  batches = list(plan.batches(make_data()).as_numpy_iterator())
  assert len(batches) == plan.steps
  for (x, y, weight), indices in zip(batches, expected):
    assert x.dtype == np.float32 and weight.dtype == np.float64
    weight = weight.astype(np.float32)  # The lower digits carry the tag of the step.
    assert len(x) == len(y) == len(weight) >= max(1, len(indices))
    np.testing.assert_array_equal(weight, np.arange(len(weight)) < len(indices))
    np.testing.assert_array_equal(y[weight == 1], indices + 1)
    np.testing.assert_array_equal(x[weight == 1, 0], indices + 1)
    assert not np.any(x[weight == 0]) and not np.any(y[weight == 0])  # No record pads.


def test_shapes_come_from_three_sizes_and_nothing_is_cut():
  plan = make_plan(steps=300)
  sizes = [len(w) for _, _, w in plan.batches(make_data()).as_numpy_iterator()]
  assert set(sizes) == {16, 20, 32}  # 16, 16 + 4 and 3 * 4 more.
  assert set(sizes[:30]) == {16, 20, 32}  # None is new after a tenth of the run.
  one = {len(w) for _, _, w in plan.batches(make_data(), pad_to=40).as_numpy_iterator()}
  assert one == {40}
  total = sum(
      np.count_nonzero(w)
      for _, _, w in plan.batches(make_data(), pad_to=10).as_numpy_iterator())
  assert total == sum(len(b) for b in plan.index_batches())
  grown = {len(w) for _, _, w in plan.batches(make_data(), pad_to=10).as_numpy_iterator()}
  assert len(grown) > 1 and all(size % 10 == 0 for size in grown)


def test_fixed_order_has_one_shape():
  plan = make_plan(sampling=sampling.FixedOrder(), steps=20)  # 120 = 7 * 16 + 8.
  shapes = {(len(w), int(w.sum())) for _, _, w in plan.batches(make_data()).as_numpy_iterator()}
  assert shapes == {(16, 16), (16, 8)}


def test_an_empty_batch_has_one_padded_row_at_least():
  plan = make_plan(batch_size=0.05, steps=30)
  batches = list(plan.batches(make_data()).as_numpy_iterator())
  empty = [w for _, _, w in batches if not w.sum()]
  assert len(batches) == 30 and empty and all(len(w) == 1 for w in empty)


def test_data_without_a_record_have_batches_of_padding():
  """Under a plan whose number of records is private, they are neighbors of one record."""
  plan = make_plan(population_size=None, sampling=sampling.Poisson(sampling_probability=0.1))
  data = tf.nest.map_structure(lambda array: array[:0], make_data())
  batches = list(plan.batches(data).as_numpy_iterator())
  assert len(batches) == plan.steps and not any(w.any() for _, _, w in batches)


@pytest.mark.pitfall(
    'The same coins are used for two passes.',
    severity='high', stops='every pass draws a new seed from the operating system')
def test_every_pass_and_every_call_draws_anew():
  plan = make_plan(seed=None, steps=8)
  one = plan.batches(make_data())
  runs = [[tuple(y) for _, y, _ in dataset.as_numpy_iterator()]
          for dataset in (one, one, plan.batches(make_data()))]
  assert len({batch for run in runs for batch in run}) == 24


def test_resuming_continues_where_the_run_stopped():
  plan = make_plan(sampling=sampling.FixedOrder())
  whole = list(plan.batches(make_data()).as_numpy_iterator())
  rest = plan.batches(make_data(), start_step=5)
  assert rest.first == 5 and int(rest.cardinality()) == 7
  for (_, a, _), (_, b, _) in zip(whole[5:], rest.as_numpy_iterator()):
    np.testing.assert_array_equal(a, b)
  with pytest.raises(ValueError, match='All 12 steps'):
    plan.batches(make_data(), start_step=12)


def test_the_data_set_says_which_plan_it_is_for():
  plan = make_plan()
  dataset = plan.batches(make_data())
  assert isinstance(dataset, batches_lib.Batches) and dataset.plan == plan and dataset.first == 0
  assert int(dataset.cardinality()) == plan.steps


def test_nested_inputs_text_and_sample_weights():
  words = np.array([f'word {i}' for i in range(N)])
  data = ({'text': words, 'pair': (np.arange(N), np.ones((N, 2, 2), np.float16))},
          np.arange(N), np.linspace(0.5, 1, N))
  plan = make_plan()
  indices = next(plan.index_batches())
  x, y, weight = next(plan.batches(data).as_numpy_iterator())
  n = len(indices)
  assert [w.decode() for w in x['text'][:n]] == [f'word {i}' for i in indices]
  assert set(x['text'][n:]) <= {b''}
  np.testing.assert_array_equal(x['pair'][0][:n], indices)
  assert x['pair'][1].dtype == np.float16 and x['pair'][1].shape[1:] == (2, 2)
  np.testing.assert_allclose(weight[:n], data[2][indices], rtol=1e-6)
  assert not weight[n:].any()


def test_weights_of_tokens_and_of_several_outputs():
  x, y = make_data()
  plan = make_plan()
  n = len(next(plan.index_batches()))
  weights = {'a': np.full((N, 3), 0.5), 'b': np.ones(N)}
  _, _, fed = next(plan.batches((x, y, weights)).as_numpy_iterator())
  fed = {name: weight.astype(np.float32) for name, weight in fed.items()}
  np.testing.assert_array_equal(fed['a'][:, 1], 0.5 * (np.arange(len(fed['a'])) < n))
  np.testing.assert_array_equal(fed['b'], np.arange(len(fed['b'])) < n)


def test_inputs_without_labels():
  dataset = make_plan().batches(make_data()[0])
  x, y, weight = next(iter(dataset))
  assert y is None and x.shape[0] == weight.shape[0]


def test_a_data_set_is_read_into_memory_once():
  x, y = make_data()
  reads = []

  def elements():
    reads.append(1)
    yield from ({'x': a, 'y': b} for a, b in zip(x, y))

  source = tf.data.Dataset.from_generator(elements, output_signature={
      'x': tf.TensorSpec((3,)), 'y': tf.TensorSpec((), tf.int64)}).map(lambda e: (e['x'], e['y']))
  plan = make_plan()
  batches = plan.batches(source)
  for (a, b, _), (c, d, _) in zip(batches.as_numpy_iterator(),
                                  plan.batches((x, y)).as_numpy_iterator()):
    np.testing.assert_array_equal(a, c)
    np.testing.assert_array_equal(b, d)
  assert len(reads) == 1


@pytest.mark.parametrize('data, message', [
    ((np.zeros((N - 1, 2)), np.zeros(N - 1)), 'Received: data with another number'),
    ((np.zeros((N, 2)), np.zeros(N - 1)),
     'same number of examples. Received: 2 arrays of 2 different lengths'),
    (([np.zeros(N), np.zeros(N)], np.zeros(N)), 'inputs are a tuple or a dict'),
    ((np.zeros((N, 2)), None), 'numeric or string arrays'),
    ((np.float32(3), np.zeros(N)), 'example as leading axis'),
    (([[1], [1, 2]] * (N // 2), np.zeros(N)), 'example as leading axis'),
])
def test_refusals(data, message):
  with pytest.raises(ValueError, match=message):
    make_plan().batches(data)


def test_refused_data_sets():
  x, y = make_data()
  base = tf.data.Dataset.from_tensor_slices((x, y))
  with pytest.raises(ValueError, match='must be finite'):
    make_plan().batches(base.repeat())
  with pytest.raises(ValueError, match='data with another number of records'):
    make_plan().batches(base.batch(30))
  with pytest.raises(ValueError, match='elements of one shape'):
    make_plan().batches(base.batch(50))
  with pytest.raises(ValueError, match='no examples'):
    make_plan().batches(base.take(0))
  ragged = tf.ragged.constant([[1.0]] * N)
  with pytest.raises(ValueError, match='must be dense arrays'):
    make_plan().batches((ragged, y))
  with pytest.raises(ValueError, match='`pad_to` must be a positive integer'):
    make_plan().batches((x, y), pad_to=0)


@pytest.mark.pitfall(
    'A plan for users is fed with batches of examples, or the other way round.',
    severity='critical', stops='ValueError')
def test_units_and_users_go_together():
  with pytest.raises(ValueError, match='unit="user".*users=ids.*tfdp.federated'):
    make_plan(unit='user').batches(make_data())
  with pytest.raises(ValueError, match='protects single examples'):
    make_plan().batches(make_data(), users=np.arange(N), examples_per_user=2)


class _Recorder(tf.keras.Model):
  """Adds up the batches it is shown."""

  def __init__(self):
    super().__init__()
    self.seen = []

  def train_step(self, data):
    _, y, weight = data
    tf.py_function(lambda *batch: self.seen.append([t.numpy() for t in batch]), [y, weight], [])
    return {'loss': tf.reduce_sum(weight)}

  def call(self, inputs):
    return inputs


@pytest.mark.parametrize('scheme', [sampling.Poisson(), sampling.FixedOrder()], ids=repr)
def test_keras_epochs_continue_through_one_pass(scheme):
  plan = make_plan(sampling=scheme, seed=5)
  model = _Recorder()
  model.compile(run_eagerly=True)
  model.fit(plan.batches(make_data()), steps_per_epoch=4, epochs=3, verbose=0)
  assert len(model.seen) == 12
  for (y, weight), indices in zip(model.seen, plan.index_batches()):
    np.testing.assert_array_equal(y[weight != 0], indices + 1)


def test_rows_hold_every_batch():
  plan = make_plan()
  for count in range(N + 1):
    for pad_to, first, more in ((None, 20, 12), (3, 3, 3), (50, 50, 50)):
      rows = padding.rows_for(plan, count, pad_to)
      assert rows >= max(1, count)
      if pad_to is None and count <= 16:
        assert rows == 16
      else:
        assert (rows - first) % more == 0 and (rows == first or rows - more < count)


@pytest.mark.parametrize('scheme, rows', [
    (sampling.FixedOrder(), 16), (sampling.BallsInBins(cycle=7, draws=0), 18),
    (sampling.TruncatedPoisson(max_batch_size=21), 21)], ids=repr)
def test_schemes_whose_batches_have_a_largest_size_have_one_static_shape(scheme, rows):
  plan = make_plan(sampling=scheme, batch_size=16 if rows != 18 else N / 7)
  x, y, weight = plan.batches(make_data()).element_spec
  assert x.shape[0] == y.shape[0] == weight.shape[0] == rows
  sizes = [np.count_nonzero(w) for _, _, w in plan.batches(make_data()).as_numpy_iterator()]
  assert len(sizes) == plan.steps and max(sizes) <= rows


@pytest.mark.pitfall(
    'A second pass over a fixed order starts from the beginning.',
    severity='critical', stops='PrivacyError that names `start_step`')
@pytest.mark.parametrize('scheme, refused', [
    (sampling.Poisson(), False), (sampling.CyclicPoisson(cycle=3), True),
    (sampling.FixedOrder(), True)], ids=repr)
def test_a_second_fit_must_not_start_an_order_over(scheme, refused):
  plan = make_plan(sampling=scheme)
  model = tfdp.DPSequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
  model.compile(optimizer=tfdp.DPSGD(learning_rate=0.1, plan=plan), loss='mse')
  data = make_data()
  dataset = plan.batches(data)
  model.fit(dataset, steps_per_epoch=5, epochs=1, verbose=0)
  if refused:
    with pytest.raises(tfdp.PrivacyError, match=r'start_step=5\)`. Received: start_step=0'):
      model.fit(dataset, steps_per_epoch=7, epochs=1, verbose=0)
  rest = plan.batches(data, start_step=5)
  model.fit(rest, verbose=0)
  with pytest.raises(tfdp.PrivacyError):
    model.fit(plan.batches(data), verbose=0)
