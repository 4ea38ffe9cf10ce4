# SPDX-License-Identifier: Apache-2.0
"""The filter in front of a rule: its identities, the exact variance, both adapters."""

import loop
import numpy as np
import pytest
from scipy import signal
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import noise
from tfdp_adaptive import privatizer
from tfdp_adaptive import rules
from tfdp_adaptive.noise import keys
from tfdp_adaptive.rules import statistics

keras = compat.keras
POLE = (0.3,), (-0.7,)
OURS = (0.1, 0.1), (-0.8,)


def directions(rule, releases, mechanism=None):
  rule = privatizer.bound(rule, mechanism)
  state, result = rule.init(loop.SPECS), []
  for release in releases:
    direction, state = rule.update(state, (release,))
    result.append(loop.join(direction))
  return np.array(result)


def releases(means, variance=0.04):
  return [contract.Release(loop.split(mean), tf.constant(variance, tf.float64)) for mean in means]


MEANS = np.random.default_rng(0).normal(size=(6, loop.SIZE))


def given_variance(specs):
  """A rule that follows the variance that it is given."""
  return contract.Rule(
      lambda specs: (), contract.isotropic,
      lambda state, releases, public=(): (releases[0].variance, state), name='given_variance')


@pytest.mark.parametrize('mechanism, filters, expected', [
    (mechanisms.IndependentGaussian(), OURS, (1, .54082, .12727, .10000)),
    (mechanisms.SquareRoot(200), OURS, (1, .34311, .03796, .03032)),
    (mechanisms.IndependentGaussian(), POLE, (1, .51557, .18673, .17647)),
    (mechanisms.SquareRoot(200), POLE, (1, .35986, .10222, .09748))], ids=repr)
def test_the_variance_that_the_rule_is_given(mechanism, filters, expected):
  """Per unit noise. Filter and correlated noise together beat either alone: 1 and .176 or .1."""
  rule = privatizer.bound(rules.low_pass(given_variance(()), *filters), mechanism)
  spec = tf.TensorSpec([1])
  unit = mechanism.rounded('float32').row_norms(200)**2

  @tf.function(autograph=False)
  def update(state, variance):
    return rule.update(state, (contract.Release(tf.zeros([1]), variance),))

  state, variances = rule.init(spec), []
  for variance in unit / unit[0]:
    value, state = update(state, tf.constant(variance, tf.float32))
    variances.append(float(value))
  np.testing.assert_allclose(np.array(variances)[[0, 1, 9, 199]], expected, atol=6e-6)


def test_the_gain_is_that_of_the_first_steps():
  """.1, .28, .424, ...: a constant goes through as it is, from the first step on."""
  gain = signal.lfilter(OURS[0], (1, *OURS[1]), np.ones(6))
  np.testing.assert_allclose(gain[:3], (.1, .28, .424))
  filtered = directions(rules.low_pass(rules.dp_sgd()), releases(np.ones((6, loop.SIZE))))
  np.testing.assert_allclose(filtered, 1, rtol=1e-12)
  filtered = directions(rules.low_pass(rules.dp_sgd()), releases(MEANS))
  expected = signal.lfilter(OURS[0], (1, *OURS[1]), MEANS, axis=0) / gain[:, np.newaxis]
  np.testing.assert_allclose(filtered, expected, rtol=1e-12)


def test_one_pole_is_the_first_moment_of_adam():
  adam = lambda b1: rules.dp_adam(b1, 0.0, 1e6)  # Divides by sqrt(g^2) + 1e6.
  moment = directions(adam(0.7), releases(MEANS)) * (np.abs(MEANS) + 1e6)
  np.testing.assert_allclose(
      directions(rules.low_pass(rules.dp_sgd(), *POLE), releases(MEANS)), moment, rtol=1e-9)


def test_the_filter_that_does_nothing_is_the_rule():
  for rule in (rules.dp_adam_bc(epsilon=0.05), rules.pagan(3.0)):
    np.testing.assert_allclose(
        directions(rules.low_pass(rule, (1.0,), ()), releases(MEANS)),
        directions(rule, releases(MEANS)), rtol=1e-6)


def test_the_second_statistic_goes_the_same_way():
  """Of two equal series, both are filtered alike, with a variance of their own."""
  def update(state, releases, public=()):
    (release,) = releases
    return (release.mean, release.second, release.variance, release.second_variance), state

  probe = contract.Rule(lambda specs: (), contract.isotropic, update,
                        asks=(contract.Ask(second=statistics.square_of_mean()),))
  rule = privatizer.bound(rules.low_pass(probe))
  state = rule.init(loop.SPECS)
  for release in releases(MEANS):
    release = release._replace(second=release.mean, second_variance=4 * release.variance)
    (mean, second, variance, of_second), state = rule.update(state, (release,))
    np.testing.assert_array_equal(loop.join(mean), loop.join(second))
    assert float(of_second) == pytest.approx(4 * float(variance))


@pytest.mark.parametrize('b, a, match', [
    ((), (), 'one or more'), ((np.nan,), (), 'finite'), ((0.5,), (-0.7,), r'sum\(b\) - sum\(a\)'),
    ((2.1,), (1.1,), 'stable'), ((-0.5, 0.5), (-1.0,), 'stable'), ((-0.1, 1.1), (), 'gain'),
    ((0.0, 1.0), (), 'gain')])
def test_what_is_no_such_filter_is_refused(b, a, match):
  with pytest.raises(ValueError, match=match):
    rules.low_pass(rules.dp_sgd(), b, a)


@pytest.mark.parametrize('rule', [
    rules.dp2_rmsprop(2, 1), rules.dp2_rmsprop(2, 2, ablation='extra_query'),
    rules.noisy_adagrad(2, diagonal=True)], ids=['phases', 'two queries', 'past'])
def test_rules_whose_releases_are_no_series_are_refused(rule):
  with pytest.raises(ValueError, match='`rule` must'):
    rules.low_pass(rule)


def test_a_filter_of_unknown_noise_does_not_run():
  with pytest.raises(ValueError, match='not known yet'):
    rules.low_pass(rules.dp_adam()).init(loop.SPECS)


@pytest.mark.parametrize('mechanism', [
    pytest.param(None, marks=pytest.mark.slow), mechanisms.BLT(2, 6)], ids=['independent', 'blt'])
def test_keras_and_query_are_the_formula_with_explicit_noise(mechanism):
  """Bias correction behind a filter, in float64 NumPy with the very rows that are drawn."""
  steps, size, clip, sigma, batch, rate = 5, 3, 1.0, 0.5, 4, 0.1
  rng = np.random.default_rng(3)
  x = rng.normal(size=(batch, size)).astype('float32')
  y = rng.normal(size=(batch, 1)).astype('float32')
  drawn = mechanisms.IndependentGaussian() if mechanism is None else mechanism
  stream = noise.stream(drawn, lambda: keys.from_seed(9))
  specs = [tf.TensorSpec([size, 1])]
  state, z = stream.init((((specs), ()),)), []
  for _ in range(steps):
    row, _, state = stream.next(state, ((specs, ()),))
    z.append(row[0][0][0].numpy()[:, 0].astype(np.float64))
  inverse = drawn.rounded('float32').materialize_inverse(steps)

  b1, b2, floor, std = 0.8, 0.9, 0.02, clip * sigma / batch
  taps = np.concatenate([[1.0], OURS[1]])
  gain = signal.lfilter(OURS[0], taps, np.ones(steps))
  variance = np.sum(signal.lfilter(OURS[0], taps, std * inverse, axis=0)**2, 1) / gain**2
  w, gs, mu, nu, bias = np.full(size, 0.3), [], 0, 0, 0
  path = []
  for t in range(steps):
    records = 2 * (x @ w - y[:, 0])[:, np.newaxis] * x
    norms = np.linalg.norm(records, axis=1, keepdims=True)
    gs.append(np.sum(records * np.minimum(1, clip / norms), 0) / batch + std * z[t])
    m = signal.lfilter(OURS[0], taps, np.array(gs), axis=0)[-1] / gain[t]
    mu, nu = b1 * mu + (1 - b1) * m, b2 * nu + (1 - b2) * m**2
    bias = b2 * bias + (1 - b2) * variance[t]
    clean = (nu - bias) / (1 - b2**(t + 1))
    w = w - rate * mu / (1 - b1**(t + 1)) / np.sqrt(np.maximum(clean, floor**2))
    path.append(w)

  rule = rules.low_pass(rules.dp_adam_bc(b1, b2, floor))
  private = dict(l2_norm_clip=clip, noise_multiplier=sigma, batch_size=batch, seed=9,
                 mechanism=mechanism)
  model = tfdp.DPSequential([keras.layers.Input((size,)), keras.layers.Dense(1, use_bias=False)])
  model.set_weights([np.full((size, 1), 0.3, 'float32')])
  model.compile(optimizer=tfdp.DPOptimizer(rule, rate, **private), loss='mse')
  trained = []
  for _ in range(steps):
    model.train_on_batch(x, y)
    trained.append(model.get_weights()[0][:, 0])
  np.testing.assert_allclose(trained, path, rtol=1e-4, atol=1e-5)

  queries = pytest.importorskip('tfdp_adaptive.queries')
  query = queries.RuleQuery(rule, specs, **private)
  state, w = query.initial_global_state(), np.full((size, 1), 0.3, 'float32')
  for expected in path:
    params, total = query.derive_sample_params(state), query.initial_sample_state()
    for one, target in zip(x, y):
      record = [tf.constant(2 * (one @ w - target) * one)[:, tf.newaxis]]
      total = query.accumulate_record(params, total, record)
    direction, state, _ = query.get_noised_result(total, state)
    w = w - rate * direction[0].numpy()
    np.testing.assert_allclose(w[:, 0], expected, rtol=1e-4, atol=1e-5)
