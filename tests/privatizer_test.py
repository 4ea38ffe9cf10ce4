# SPDX-License-Identifier: Apache-2.0
"""The privatizer as an attacker sees it: noise on everything, of the right size, or nothing."""

import math

import hypothesis
from hypothesis import strategies as st
import noise_oracle as oracle
import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privatizer
from tfdp_adaptive import trees
from tfdp_adaptive.rules import statistics

CLIP, SIGMA, BATCH, SEED = 0.5, 0.8, 4.0, 7
SPECS = [tf.TensorSpec([3]), tf.TensorSpec([2, 2])]
ONE, TWO = (contract.Ask(),), (contract.Ask(), contract.Ask())


def make(asks=ONE, specs=None, **kwargs):
  arguments = dict(l2_norm_clip=CLIP, noise_multiplier=SIGMA, batch_size=BATCH, seed=SEED)
  return privatizer.Privatizer(asks, specs or SPECS, **{**arguments, **kwargs})


def sums(value=1.0, count=1):
  total = [value * tf.ones(spec.shape) for spec in SPECS]
  return (contract.Sums(total),) * count


def shares(*values):
  return tuple(contract.Query(share=value) for value in values)


def rows(mechanism, asks, count=1):
  """[count, asks, 7]: the unit rows of a privatizer without statistics."""
  release_specs = tuple((SPECS, ()) for _ in asks)
  return oracle.rows(mechanism, oracle.row_keys(SEED, count), release_specs).reshape(
      count, len(asks), -1)


def memory():
  """A statistic of all clean means so far, like those that keep a root of past gradients."""
  def measure(mean, square, clip_norm, secret):
    del square, clip_norm
    return (trees.map(lambda s, m: 0.5 * s + m, secret, mean),) * 2

  return contract.Statistic(
      False, measure,
      lambda clip, batch, adjacency: (math.sqrt(2) * clip / batch, math.sqrt(2) * clip / batch),
      init=trees.zeros, amplifiable=False)


@pytest.mark.parametrize('name', ['independent', 'toeplitz', 'blt', 'tree'])
@pytest.mark.parametrize('adjacency, factor', [('zero_out', 1), ('add_remove', 1), ('replace', 2)])
def test_mean_is_the_sum_over_b_plus_a_row(name, adjacency, factor):
  mechanism = oracle.MECHANISMS[name]
  private = make(mechanism=mechanism, adjacency=adjacency)
  state, std = private.init(), factor * SIGMA * CLIP / BATCH
  norms = mechanism.rounded('float32').row_norms(3)
  for t in range(3):
    (release,), state = private.release(state, (contract.Query(),), sums(t + 1.0))
    expected = (t + 1.0) / BATCH + std * rows(mechanism, ONE, 3)[t, 0]
    np.testing.assert_allclose(oracle.flat(release.mean), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(release.variance, (std * norms[t])**2, rtol=1e-5)
    assert release.second == () and release.second_variance == ()
  assert state.noise.row == 3


@pytest.mark.parametrize('size', [7, 4 * trees.WORTH_COMPILING])
def test_noise_is_drawn_after_the_sums(size):
  """Else its memory comes on top of what gradients take."""
  private = make(specs=[tf.TensorSpec([size])])

  def release(state, total):
    return private.release(state, (contract.Query(),), (contract.Sums([total]),))

  state = private.init()
  graph = tf.function(release, autograph=False).get_concrete_function(
      state, tf.TensorSpec([size])).graph
  total = graph.inputs[-1]
  assert total.shape == [size]
  waiting = [op for op in graph.get_operations()
             if 'Random' in op.type and 'GetAlg' not in op.type]
  assert waiting
  for op in waiting:
    before, left = set(), [op]
    while left:
      one = left.pop()
      before.add(one.name)
      left += [i for i in (*(t.op for t in one.inputs), *one.control_inputs)
               if i.name not in before]
    assert total.op.name in before, op


def test_noise_has_its_standard_deviation_and_no_other():
  specs = [tf.TensorSpec([5000])]
  (release,), _ = make(specs=specs, seed=None).release(
      make(specs=specs, seed=None).init(), (contract.Query(),),
      (contract.Sums([tf.zeros([5000])]),))
  accepts = lambda std: stats.kstest(release.mean[0].numpy() / std, 'norm').pvalue > 1e-4
  std = SIGMA * CLIP / BATCH
  assert accepts(std) and not accepts(2 / 3 * std) and not accepts(3 / 2 * std)


@pytest.mark.parametrize('given, factors', [
    ((1.0, 0.0), (1, None)), ((0.0, 1.0), (None, 1)), ((0.5, 0.5), (2**0.5, 2**0.5)),
    ((0.25, 0.75), (2, (4 / 3)**0.5)), ((1.0, 1.0), (2**0.5, 2**0.5)),
    ((3.0, 1.0), ((4 / 3)**0.5, 2)), ((0.25, 0.0), (2, None)),
    ((2.0, -1.0), (1, None)), ((1.0, math.nan), (1, None)), ((0.0, 0.0), (None, None))])
def test_budget_shares(given, factors):
  """Noise grows by the root of the share; what exceeds one in sum is scaled back to one."""
  mechanism = mechanisms.IndependentGaussian()
  releases, _ = make(TWO).release(make(TWO).init(), shares(*given), sums(1.0, 2))
  unit = SIGMA * CLIP / BATCH
  for release, factor, row in zip(releases, factors, rows(mechanism, TWO)[0]):
    if factor is None:  # Not asked: nothing of the data, not even noise.
      np.testing.assert_array_equal(oracle.flat(release.mean), 0)
      assert release.variance == 0
    else:
      np.testing.assert_allclose(
          oracle.flat(release.mean), 1 / BATCH + factor * unit * row, rtol=1e-5)
      np.testing.assert_allclose(release.variance, (factor * unit)**2, rtol=1e-5)


@hypothesis.settings(max_examples=50)
@hypothesis.given(st.lists(st.floats(-2, 3, width=32), min_size=3, max_size=3))
def test_releases_of_a_step_never_cost_more_than_one(given):
  asks = (contract.Ask(),) * 3
  private = make(asks, mechanism=mechanisms.IndependentGaussian())
  releases, _ = private.release(private.init(), shares(*given), sums(1.0, 3))
  variances = [float(r.variance) for r in releases if r.variance > 0]
  cost = sum((CLIP / BATCH)**2 / v for v in variances) * SIGMA**2
  assert cost <= 1 + 1e-5
  if sum(max(s, 0) for s in given) >= 1:
    assert cost >= 1 - 1e-4  # Nor do they waste any.


def test_an_ask_without_share_still_uses_up_its_row():
  private = make(TWO, mechanism=oracle.MECHANISMS['toeplitz'])
  state = private.init()
  _, state = private.release(state, shares(1.0, 0.0), sums(0.0, 2))
  (_, second), _ = private.release(state, shares(0.0, 1.0), sums(0.0, 2))
  expected = rows(oracle.MECHANISMS['toeplitz'], TWO, 2)[1, 1]
  np.testing.assert_allclose(
      oracle.flat(second.mean), SIGMA * CLIP / BATCH * expected, atol=1e-6)


def test_relative_clip_scales_clip_and_noise():
  private = make()
  query = (contract.Query(relative_clip=tf.constant(3.0)),)
  np.testing.assert_allclose(private.resolve(query), [3 * CLIP])
  (release,), _ = private.release(private.init(), query, sums())
  np.testing.assert_allclose(release.variance, (3 * SIGMA * CLIP / BATCH)**2, rtol=1e-5)


@pytest.mark.thorough(rows=['None-mechanism1-4'])
@pytest.mark.parametrize('plan, mechanism, limit', [
    (3, None, 3), (None, mechanisms.BLT(1, 4), 4), (3, mechanisms.BLT(1, 4), 3),
    (9, mechanisms.BLT(1, 4), 4), (None, None, None)])
def test_the_budget_ends_with_the_plan_or_the_mechanism(plan, mechanism, limit):
  private = make(mechanism=mechanism, steps=plan)
  assert private.steps == limit
  state = private.init()
  step = tf.function(lambda state: private.release(state, (contract.Query(),), sums())[1])
  for _ in range(limit or 5):
    state = step(state)
  if limit is not None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=f'cover {limit} steps'):
      private.release(state, (contract.Query(),), sums())
    with pytest.raises(tf.errors.InvalidArgumentError, match=f'cover {limit} steps'):
      step(state)


def test_past_the_end_xla_releases_noise_alone_and_keeps_the_secret():
  private = make((contract.Ask(second=memory()),), steps=2)
  step = tf.function(
      lambda state, sums: private.release(state, (contract.Query(),), sums), jit_compile=True)
  state = private.init()
  for _ in range(2):
    (release,), state = step(state, sums(1e6))
    assert np.abs(oracle.flat(release.mean)).min() > 1e5
    assert np.abs(oracle.flat(release.second)).min() > 1e5
  clean = oracle.flat(state.secret)
  for _ in range(2):  # Neither today's sums nor the clean past.
    (release,), state = step(state, sums(1e6))
    for part in (release.mean, release.second):
      assert 0 < np.abs(oracle.flat(part)).max() < 10
    np.testing.assert_array_equal(oracle.flat(state.secret), clean)


def test_a_statistic_of_the_past_is_noised_and_stands_still_when_not_asked():
  asks = (contract.Ask(second=memory()), contract.Ask())
  private = make(asks)
  state = private.init()
  np.testing.assert_array_equal(oracle.flat(state.secret[0]), 0)
  for t, share in enumerate((1.0, 0.0, 1.0)):
    releases, state = private.release(state, shares(share, 1 - share), sums(1.0, 2))
    seen = [1, 1, 1.5][t]
    np.testing.assert_allclose(oracle.flat(state.secret[0]), seen / BATCH)
    value = oracle.flat(releases[0].second)
    if share:
      np.testing.assert_allclose(
          releases[0].second_variance, 2 * (SIGMA * CLIP / BATCH)**2, rtol=1e-5)
      assert np.all(value != seen / BATCH)
    else:
      np.testing.assert_array_equal(value, 0)
  assert state.secret[1] == ()


def test_statistics_have_noise_of_their_own():
  private = make((contract.Ask(second=statistics.square_of_mean()),), noise_multiplier=1.0)
  (release,), _ = private.release(private.init(), (contract.Query(),), sums(0.0))
  std_mean, std_value = statistics.square_of_mean().stddevs(CLIP, BATCH, 'zero_out')
  np.testing.assert_allclose(release.variance, std_mean**2, rtol=1e-5)
  np.testing.assert_allclose(release.second_variance, std_value**2, rtol=1e-5)
  mean, value = oracle.flat(release.mean) / std_mean, oracle.flat(release.second) / std_value
  assert len(np.unique(np.round(np.abs(np.concatenate([mean, value])), 5))) == 14


def test_noise_of_half_precision_parameters_is_float32():
  private = make(specs=[tf.TensorSpec([3], tf.bfloat16)])
  (release,), _ = private.release(
      private.init(), (contract.Query(),), (contract.Sums([tf.ones([3], tf.bfloat16)]),))
  assert private.specs == [tf.TensorSpec([3], tf.float32)] and release.mean[0].dtype == tf.float32


def test_fresh_keys_at_every_init_unless_seeded():
  private = make(seed=None)
  graph = tf.function(private.init)
  states = [private.init(), private.init(), make(seed=None).init(), graph(), graph()]
  assert len({tuple(s.noise.key.numpy()) for s in states}) == len(states)
  np.testing.assert_array_equal(make().init().noise.key, make().init().noise.key)


@pytest.mark.parametrize('total', [
    [tf.ones([1]), tf.ones([2, 2])], [tf.ones([3]), tf.ones([4])], [tf.ones([3, 3]), tf.ones([])]])
def test_sums_of_another_shape_are_refused(total):
  private = make()
  with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match='shape'):
    private.release(private.init(), (contract.Query(),), (contract.Sums(total),))


@pytest.mark.parametrize('queries, count', [(1, 2), (2, 1), (3, 2)])
def test_one_query_and_one_sum_per_ask(queries, count):
  private = make(TWO)
  with pytest.raises(ValueError, match='must have one entry per ask'):
    private.release(private.init(), (contract.Query(),) * queries, sums(1.0, count))


def test_a_statistic_without_noise_needs_consent():
  asks = (contract.Ask(second=statistics.clean_mean()),)
  with pytest.raises(ValueError, match='WITHOUT noise'):
    make(asks)
  assert make(asks, allow_non_private=True)


@pytest.mark.parametrize('arguments', [
    {'l2_norm_clip': 0.0}, {'l2_norm_clip': math.nan}, {'l2_norm_clip': math.inf},
    {'noise_multiplier': -1.0}, {'noise_multiplier': math.nan}, {'noise_multiplier': math.inf},
    {'batch_size': 0}, {'batch_size': math.inf}, {'adjacency': 'add'}, {'steps': 0},
    {'steps': 2.5}])
def test_invalid_arguments_are_refused(arguments):
  with pytest.raises(ValueError, match='must be'):
    make(**arguments)


def test_shapes_are_asserted_where_they_are_not_known_only():
  """A sum of another shape would share its noise; an assertion of what is known slows XLA down."""
  made = make(seed=None)

  def release(*total):
    answer, _ = made.release(made.init(), shares(1.0), (contract.Sums(list(total)),))
    return answer[0].mean

  def asserts(specs):
    graph = tf.function(release).get_concrete_function(*specs).graph
    return sum(op.type == 'EnsureShape' for op in graph.get_operations())

  assert asserts(SPECS) == 0
  assert asserts([tf.TensorSpec([None]), tf.TensorSpec(None)]) == 2
  with pytest.raises(ValueError, match='must be equal'):
    tf.function(release).get_concrete_function(tf.TensorSpec([1]), SPECS[1])
