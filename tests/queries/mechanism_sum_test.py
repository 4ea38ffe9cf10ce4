# SPDX-License-Identifier: Apache-2.0
"""MechanismSumQuery and the adaptive clip: clipped sums plus rows of the mechanism, no more."""

import math

import dp_accounting
import noise_oracle as oracle
import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import mechanisms
from tfdp_adaptive import queries

normalized_query = compat.privacy_module('normalized_query')
restart_query = compat.privacy_module('restart_query')

CLIP, SIGMA, SEED, STEPS = 0.5, 0.8, 23, oracle.STEPS
SPECS = {'kernel': tf.TensorSpec([2, 3]), 'bias': tf.TensorSpec([2])}
SOME = ['independent', 'toeplitz', 'banded_inverse', 'blt', 'dense', 'tree']


def make(name='blt', specs=SPECS, clip=CLIP, sigma=SIGMA, seed=SEED, **kwargs):
  return queries.MechanismSumQuery(
      specs, oracle.MECHANISMS[name], clip, sigma, seed=seed, **kwargs)


def cohorts(count=STEPS):
  """Records of several sizes; some steps have none at all."""
  rng = np.random.default_rng(3)
  return [[tf.nest.map_structure(
      lambda spec: tf.constant(rng.normal(size=spec.shape), spec.dtype), SPECS)
           for _ in range(t % 3)] for t in range(count)]


def clipped_sums(steps):
  total = np.zeros((len(steps), 8))
  for t, records in enumerate(steps):
    for record in records:
      v = oracle.flat(record)
      total[t] += v * min(1, CLIP / np.linalg.norm(v))
  return total


def run(query, steps, wrap=lambda f: f, state=None):
  """[steps, n] results and the last state."""
  state = query.initial_global_state() if state is None else state
  finish = wrap(lambda sums, state: query.get_noised_result(sums, state)[:2])
  results = []
  for records in steps:
    params = query.derive_sample_params(state)
    sums = query.initial_sample_state(SPECS)
    for record in records:
      sums = query.accumulate_record(params, sums, record)
    result, state = finish(sums, state)
    results.append(oracle.flat(result))
  return np.stack(results), state


def noise(name, count=STEPS, skip=0):
  keys = oracle.row_keys(SEED, skip + count)[skip:]
  return SIGMA * CLIP * oracle.rows(oracle.MECHANISMS[name], keys, SPECS)


@pytest.mark.thorough(but=['*independent', '*tree', '*toeplitz', '*blt', '*banded_inverse'])
@pytest.mark.parametrize('name', oracle.MECHANISMS)
@pytest.mark.parametrize('cumulative', [False, True])
def test_results_are_clipped_sums_plus_rows(name, cumulative):
  results, _ = run(make(name, cumulative=cumulative), cohorts(), tf.function)
  expected = clipped_sums(cohorts()) + noise(name)
  np.testing.assert_allclose(
      results, np.cumsum(expected, axis=0) if cumulative else expected, atol=1e-5)


@pytest.mark.parametrize('name', SOME)
@pytest.mark.parametrize('how', ['eager', 'xla'])
def test_eager_mode_and_xla_give_the_same(name, how):
  wrap = (lambda f: f) if how == 'eager' else lambda f: tf.function(
      f, jit_compile=True, autograph=False)

  def finish(sums, state):  # XLA has no tensors of events.
    result, state, _ = make(name).get_noised_result(sums, state)
    return result, state

  query = make(name)
  query.get_noised_result = lambda sums, state: finish(sums, state) + ((),)
  results, _ = run(query, cohorts(), wrap)
  np.testing.assert_allclose(results, clipped_sums(cohorts()) + noise(name), atol=1e-5)


@pytest.mark.parametrize('scale, jitter', [
    (1e-3, None), (10.0, None), (3e37, None), (1.0, np.inf), (1.0, -np.inf), (1.0, np.nan)])
def test_a_record_never_exceeds_the_clip_norm(scale, jitter):
  rng = np.random.default_rng(0)
  record = {name: scale * rng.uniform(0.1, 1, spec.shape).astype(np.float32)
            for name, spec in SPECS.items()}
  if jitter is not None:
    record['kernel'][0, 1] = jitter
  flat = oracle.flat(make().preprocess_record(tf.constant(CLIP), record))
  if jitter is not None:
    np.testing.assert_array_equal(flat, 0)
    return
  true_norm = np.linalg.norm(oracle.flat(record))
  np.testing.assert_allclose(flat, oracle.flat(record) * min(1, CLIP / true_norm), rtol=1e-5)


def test_types_are_mixed_safely():
  specs = [tf.TensorSpec([3], tf.float16), tf.TensorSpec([3], tf.float64), tf.TensorSpec([2])]
  query = queries.MechanismSumQuery(specs, mechanisms.BLT(1, 4), 1.0, 0.0)
  state = query.initial_global_state()
  # Ones that float16 cannot add: 2048 + 1 = 2048 there.
  record = [tf.constant([1.0, 0, 0], s.dtype) if s.shape == [3] else tf.zeros([2]) for s in specs]
  record[1] = tf.zeros([3], tf.float64)
  sums = query.initial_sample_state(specs)
  assert [t.dtype for t in sums] == [tf.float32, tf.float64, tf.float32]
  clipped = query.preprocess_record(query.derive_sample_params(state), record)
  for _ in range(2049):
    sums = query.accumulate_preprocessed_record(sums, clipped)
  assert sums[0][0] == 2049
  result, _, _ = query.get_noised_result(sums, state)
  assert [t.dtype for t in result] == [s.dtype for s in specs]


@pytest.mark.parametrize('arguments', [
    {'clip': -1.0}, {'clip': math.nan}, {'sigma': -1.0}, {'sigma': math.inf},
    {'adjacency': 'add'}])
def test_invalid_arguments_are_refused(arguments):
  with pytest.raises(ValueError, match='must be'):
    make(**arguments)


def test_noise_has_its_standard_deviation_and_no_other():
  query = queries.MechanismSumQuery(
      tf.TensorSpec([5000]), mechanisms.IndependentGaussian(), CLIP, SIGMA)
  result, _, _ = query.get_noised_result(tf.zeros([5000]), query.initial_global_state())
  accepts = lambda std: stats.kstest(result.numpy() / std, 'norm').pvalue > 1e-4
  assert accepts(SIGMA * CLIP)
  assert not accepts(SIGMA * CLIP * 2 / 3) and not accepts(SIGMA * CLIP * 3 / 2)


def test_replace_doubles_the_noise_and_not_the_multiplier():
  sums = tf.nest.map_structure(lambda s: tf.zeros(s.shape), SPECS)
  results, events = {}, {}
  for adjacency in ('zero_out', 'add_remove', 'replace'):
    query = make('independent', adjacency=adjacency)
    result, _, events[adjacency] = query.get_noised_result(sums, query.initial_global_state())
    results[adjacency] = oracle.flat(result)
  np.testing.assert_array_equal(results['add_remove'], results['zero_out'])
  np.testing.assert_allclose(results['replace'], 2 * results['zero_out'], rtol=1e-6)
  for event in events.values():
    np.testing.assert_allclose(event.noise_multiplier, SIGMA, rtol=1e-6)


@pytest.mark.parametrize('name, sigma, event', [
    ('independent', 0.0, dp_accounting.NonPrivateDpEvent),
    ('blt', 0.0, dp_accounting.NonPrivateDpEvent),
    ('blt', SIGMA, dp_accounting.UnsupportedDpEvent),
    ('one_band', SIGMA, dp_accounting.UnsupportedDpEvent)])
def test_only_independent_noise_has_an_event_per_step(name, sigma, event):
  query = make(name, sigma=sigma)
  sums = query.initial_sample_state()
  assert isinstance(query.get_noised_result(sums, query.initial_global_state())[2], event)


def test_results_after_the_last_step():
  query = make('toeplitz')
  _, state = run(query, cohorts())
  ones = tf.nest.map_structure(lambda s: 1e6 * tf.ones(s.shape), SPECS)
  with pytest.raises(tf.errors.InvalidArgumentError, match=f'cover {STEPS} steps'):
    query.get_noised_result(ones, state)
  with pytest.raises(tf.errors.InvalidArgumentError, match=f'cover {STEPS} steps'):
    tf.function(lambda state: query.get_noised_result(ones, state)[0])(state)
  # XLA drops assertions; what comes out then is noise alone.
  pure = tf.function(
      lambda state: query.get_noised_result(ones, state)[0], jit_compile=True)(state)
  assert 0 < np.abs(oracle.flat(pure)).max() < 20


@pytest.mark.parametrize('name', SOME)
def test_restart_query_begins_the_mechanism_anew(name):
  period = 5
  query = restart_query.RestartQuery(
      make(name), restart_query.PeriodicRoundRestartIndicator(period))
  steps = cohorts(3 * period)  # More than the mechanism has.
  results, _ = run(query, steps)
  expected = np.concatenate([noise(name, period, skip) for skip in (0, period, 2 * period)])
  np.testing.assert_allclose(results, clipped_sums(steps) + expected, atol=1e-5)


def test_cumulative_sums_go_on_over_a_restart():
  query = restart_query.RestartQuery(
      make('tree', cumulative=True), restart_query.PeriodicRoundRestartIndicator(4))
  steps = cohorts(8)
  results, state = run(query, steps)
  expected = clipped_sums(steps) + np.concatenate([noise('tree', 4), noise('tree', 4, 4)])
  np.testing.assert_allclose(results, np.cumsum(expected, axis=0), atol=1e-5)
  # The state has the sums as they were released, never the clean ones.
  np.testing.assert_array_equal(oracle.flat(state.inner_query_state.released), results[-1])


def test_normalized_query_divides():
  results, _ = run(normalized_query.NormalizedQuery(make(), 4.0), cohorts())
  np.testing.assert_allclose(results, run(make(), cohorts())[0] / 4, rtol=1e-6)


def test_every_state_has_a_key_of_its_own():
  query = make(seed=None)
  graph = tf.function(query.initial_global_state)
  states = [query.initial_global_state(), query.initial_global_state(), graph(), graph()]
  assert len({tuple(state.noise.key.numpy()) for state in states}) == 4


def test_argument_order_of_tensorflow_privacy():
  query = queries.MechanismSumQuery.build_l2_gaussian_query(
      CLIP, SIGMA, SPECS, SEED, mechanism=oracle.MECHANISMS['blt'], cumulative=True)
  np.testing.assert_array_equal(run(query, cohorts())[0],
                                run(make(cumulative=True), cohorts())[0])
