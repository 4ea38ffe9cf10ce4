# SPDX-License-Identifier: Apache-2.0
"""What every rule promises, whatever its algorithm: one line of table.RULES buys it all."""

import loop
import numpy as np
import pytest
import table
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees

STEPS = 3


def specs_of(dtype):
  return trees.map(lambda s: tf.TensorSpec(s.shape, dtype), loop.SPECS)


def tree(rng, dtype, *lead):
  return loop.split(rng.normal(size=lead + (loop.SIZE,)), dtype)


def public_gradients(rule, rng, dtype):
  if rule.public is None:
    return ()
  if rule.public == 'factors':
    return loop.split_factors(rng.normal(size=(6, loop.SIZE)), dtype)
  return tree(rng, dtype) if rule.public == 'mean' else tree(rng, dtype, 6)


def releases(rule, rng, dtype, scale=1.0):
  """Random answers to every ask, in the dtypes that a privatizer gives them."""

  def of(ask):
    variance = tf.constant(0.01, dtype)
    mean = trees.map(lambda x: scale * x, tree(rng, dtype))
    if ask.second is None:
      return contract.Release(mean, variance)
    second = trees.map(
        lambda s: tf.constant(scale * rng.normal(size=s.shape)**2, s.dtype),
        ask.second.specs(specs_of(dtype)))
    return contract.Release(mean, variance, second, variance)

  return tuple(of(ask) for ask in rule.asks)


def step_of(rule):
  def step(state, params, answers, public):
    queries = rule.query(state, public)
    direction, state = rule.update(state, answers, public)
    params = trees.map(lambda x, d: x - 0.1 * d, params, direction)
    if rule.project is not None:
      params = rule.project(state, params)
    queries = tuple(query._replace(scale=geometry.packed(query.scale)) for query in queries)
    return queries, direction, state, params

  return step


def trajectory(rule, step, dtype, scale=1.0):
  rng = np.random.default_rng(3)
  state, params = rule.init(specs_of(dtype)), tree(rng, dtype)
  outputs = []
  for _ in range(STEPS):
    queries, direction, state, params = step(
        state, params, releases(rule, rng, dtype, scale), public_gradients(rule, rng, dtype))
    outputs.append((queries, direction, state, params))
  return outputs


@pytest.fixture(scope='module', params=table.RULES, ids=lambda case: case.name)
def rule(request):
  return request.param.rule()


@pytest.fixture(scope='module')
def eager(rule):
  return trajectory(rule, step_of(rule), tf.float32)


def assert_close(actual, expected, tolerance):
  tf.nest.assert_same_structure(actual, expected)
  for a, b in zip(tf.nest.flatten(actual), tf.nest.flatten(expected)):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_the_table_is_not_empty():
  assert len(table.RULES) >= 25


def test_structure_shapes_and_dtypes_are_kept(rule, eager):
  specs = specs_of(tf.float32)
  state = rule.init(specs)
  assert isinstance(state, tuple) and hasattr(state, '_fields')
  assert state.step.dtype == tf.int64 and state.step.shape == []
  for queries, direction, after, params in eager:
    assert len(queries) == len(rule.asks)
    for got, want in ((after, state), (direction, specs), (params, specs)):
      tf.nest.assert_same_structure(got, want)
      for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want)):
        assert isinstance(a, tf.Tensor) and a.dtype == b.dtype and a.shape == b.shape
    for query in queries:
      if not (isinstance(query.scale, tuple) and not query.scale):
        scale = geometry.unpacked(query.scale, specs)
        tf.nest.assert_same_structure(scale, specs)
        for leaf in tf.nest.flatten(scale):
          if isinstance(leaf, contract.Kronecker):
            for side in (leaf.left, leaf.right):
              values = side if side.shape.rank == 1 else np.linalg.eigvalsh(side)
              assert np.all(values > 0)
          else:
            assert np.all(leaf > 0)
      assert float(query.relative_clip) > 0 and 0 <= float(query.share) <= 1
    assert sum(float(query.share) for query in queries) <= 1
  assert [int(after.step) for _, _, after, _ in eager] == [1, 2, 3]


@pytest.mark.thorough(but=[
    'dp_sgd*', 'dp_adam_ime*', 'dp2_*', 'scale_then_privatize', 'noisy_adagrad', 'pdp_sgd',
    'pagan-ball', 'dp_muon', 'dp_adam_bc'])
def test_graph_equals_eager_without_retracing(rule, eager):
  step = tf.function(step_of(rule))
  outputs = trajectory(rule, step, tf.float32)
  assert step.experimental_get_tracing_count() == 1
  assert_close(outputs, eager, 2e-4)


@pytest.mark.thorough(but=[
    'dp_sgd*', 'dp_adam_ime*', 'dp2_*', 'scale_then_privatize', 'dp_soap', 'noisy_adagrad',
    'pdp_sgd', 'pagan-ball', 'dp_muon', 'dp_adam_bc'])
def test_xla_equals_eager_without_retracing(rule, eager):
  step = tf.function(step_of(rule), jit_compile=True, autograph=False)
  outputs = trajectory(rule, step, tf.float32)
  assert step.experimental_get_tracing_count() == 1
  # eigh's signs are its own: eigenvectors are compared through the parameters.
  dropped = {'noisy_adagrad': dict(basis=()), 'dp_soap': dict(first=(), right=()),
             'dp_shampoo': dict(first=(), right=())}.get(rule.name, {})
  for (q, d, s, p), (q_, d_, s_, p_) in zip(outputs, eager):
    assert_close((q, d, p), (q_, d_, p_), 1e-3)
    assert_close(s._replace(**dropped), s_._replace(**dropped), 1e-3)


def test_elementwise_rules_treat_every_coordinate_by_itself(rule):
  if not rule.elementwise:
    pytest.skip('another rule')
  def final(answers):
    state = rule.init(specs_of(tf.float32))
    for release in answers:
      direction, state = rule.update(state, (release,), ())
    return loop.join(direction)

  rng = np.random.default_rng(5)
  answers = [releases(rule, rng, tf.float32)[0] for _ in range(STEPS)]
  for i in range(loop.SIZE):
    others = loop.split(1 + (np.arange(loop.SIZE) != i))
    changed = [a._replace(mean=trees.map(lambda x, f: x * tf.cast(f, x.dtype), a.mean, others))
               for a in answers]
    assert final(changed)[i] == final(answers)[i]


def test_rules_of_the_common_optimizers_are_elementwise():
  assert {'dp_adam', 'dp_adagrad', 'dp_rmsprop', 'dp_yogi', 'dp_adam_bc',
          'scale_then_privatize'} <= {
              case.rule().name for case in table.RULES if case.rule().elementwise}


def test_no_variables_and_no_randomness(rule):
  graph = tf.Graph()
  with graph.as_default():
    rng = np.random.default_rng(0)
    specs = specs_of(tf.float32)
    step_of(rule)(rule.init(specs), tree(rng, tf.float32), releases(rule, rng, tf.float32),
                  public_gradients(rule, rng, tf.float32))
  types = {op.type for op in graph.get_operations()}
  assert not {t for t in types if 'Random' in t or 'Variable' in t or 'VarHandle' in t
              or t in ('PyFunc', 'EagerPyFunc')}


def test_pure(rule, eager):
  """The same arguments give the same results; they are not changed."""
  rng = np.random.default_rng(3)
  specs = specs_of(tf.float32)
  state, params = rule.init(specs), tree(rng, tf.float32)
  answers = releases(rule, rng, tf.float32)
  public = public_gradients(rule, rng, tf.float32)
  before = [np.array(leaf) for leaf in tf.nest.flatten((state, answers, public))]
  step_of(rule)(state, params, answers, public)
  outputs = step_of(rule)(state, params, answers, public)
  assert_close(outputs, eager[0], 0)
  for a, b in zip(tf.nest.flatten((state, answers, public)), before):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('scale', [0.0, 1e-12, 1e6])
def test_finite(rule, scale):
  """Zero state and a release of zeros, tiny or huge numbers (an empty batch is such a step)."""
  for output in trajectory(rule, step_of(rule), tf.float32, scale):
    for leaf in tf.nest.flatten(output):
      assert np.all(np.isfinite(leaf))


def test_float64(rule, eager):
  outputs = trajectory(rule, step_of(rule), tf.float64)
  _, direction, state, params = outputs[-1]
  for leaf in tf.nest.flatten((direction, params)):
    assert leaf.dtype == tf.float64
  assert all(leaf.dtype in (tf.float64, tf.int64) for leaf in tf.nest.flatten(state))
  # The randomized rank-deficient problems aside, single precision gives the same.
  if rule.name != 'noisy_adagrad':
    assert_close(trees.map(lambda t: tf.cast(t, tf.float32), outputs[-1][3]),
                 eager[-1][3], 1e-3)


def test_public_gradients_are_required(rule):
  if rule.public is None:
    return
  rng = np.random.default_rng(0)
  with pytest.raises(ValueError, match='`public` must hold public gradients'):
    rule.update(rule.init(loop.SPECS), releases(rule, rng, tf.float64), ())


def test_statistics_say_what_they_are(rule):
  for ask in rule.asks:
    assert ask.projection in ('rescale', 'euclidean')
    if ask.second is None:
      continue
    std_mean, std_value = ask.second.stddevs(1.0, 4.0, 'zero_out')
    assert std_mean >= 0.25  # Never less noise than the mean alone needs.
    assert std_value > 0 or not ask.second.private
    doubled, _ = ask.second.stddevs(tf.constant(2.0, tf.float64), 4.0, 'zero_out')
    np.testing.assert_allclose(doubled, 2 * std_mean)
    with pytest.raises(ValueError, match='`adjacency` must be one of'):
      ask.second.stddevs(1.0, 4.0, 'neighbours')
