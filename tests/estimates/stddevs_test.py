# SPDX-License-Identifier: Apache-2.0
"""Private standard deviations: calibration, sensitivity, and what they are for."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

from tfdp_adaptive import rules
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.estimates import stddevs as stddevs_lib


@pytest.mark.parametrize('dimension, rounds', [(1, 1), (2, 2), (4, 3), (10, 5), (100, 10)])
@pytest.mark.parametrize('epsilon', [0.5, 1.0, 10.0])
def test_private_stddevs_are_calibrated_exactly(dimension, rounds, epsilon):
  got_rounds, multiplier = stddevs_lib.calibration(dimension, epsilon, 1e-5)
  assert got_rounds == rounds
  mu = math.sqrt(rounds) / multiplier
  delta = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
      -mu / 2 - epsilon / mu)
  assert delta <= 1e-5 and delta == pytest.approx(1e-5, rel=1e-5)
  # An accountant that composes the rounds finds the same.
  accountant = dp_accounting.pld.PLDAccountant()
  accountant.compose(dp_accounting.GaussianDpEvent(multiplier), rounds)
  assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon, rel=2e-3)


def test_printed_noise_is_too_small_for_few_rounds():
  """T sqrt(ln(T / delta)) / epsilon per round, and the true epsilons."""
  for rounds, claimed, true in ((1, 1.0, 1.110), (2, 1.0, 0.735), (2, 10.0, 10.14),
                                (10, 10.0, 3.63)):
    printed = rounds * math.sqrt(math.log(rounds / 1e-5)) / claimed
    epsilon = gaussian.epsilon(printed / math.sqrt(rounds), 1e-5)
    assert epsilon == pytest.approx(true, rel=5e-3)


def test_private_stddevs_within_a_factor_of_two():
  rng = np.random.default_rng(0)
  stddevs = 2.0**-np.arange(6)
  records = rng.normal(size=(200000, 6)) * stddevs
  estimate = stddevs_lib.private_stddevs(
      records, scale=1.0, moment_ratio=1.0, target_epsilon=5.0, target_delta=1e-5, rng=rng)
  assert np.all(estimate <= 2 * stddevs) and np.all(estimate >= stddevs / 2)
  assert np.all(np.log2(estimate) == np.round(np.log2(estimate)))


def test_one_record_of_any_size_raises_no_estimate():
  """The noise is for squares of at most rho^2, in the mean of 10,000 records."""
  records = np.full((10_000, 4), 0.01)
  for size in (0.01, 1e3, 1e9):
    records[0] = size
    estimate = stddevs_lib.private_stddevs(
        records, scale=1.0, moment_ratio=1.0, target_epsilon=100.0, target_delta=1e-6,
        rng=np.random.default_rng(0))
    np.testing.assert_array_equal(estimate, 2.0**-3)  # The last of three rounds.


class Recorder:
  """Stands in for a random generator; notes how often it is asked, and adds nothing."""

  def __init__(self, value=0.0):
    self.value, self.sizes = value, []

  def standard_normal(self, size):
    self.sizes.append(size)
    return np.full(size, self.value)


def test_private_stddevs_by_hand():
  """Without noise: threshold on standard deviations, and what was found is not asked again."""
  records = np.array([[1.0, 0.3, 0.0], [-1.0, 0.3, np.sqrt(2) * 0.12]])
  recorder = Recorder()
  estimate = stddevs_lib.private_stddevs(
      records, scale=1.0, moment_ratio=1.0, target_epsilon=1.0, target_delta=1e-5, rng=recorder)
  # 3 rounds for d = 3: thresholds 1/4, 1/8, 1/16.
  np.testing.assert_array_equal(estimate, [0.5, 0.5, 0.25 / 2])
  assert recorder.sizes == [3, 1, 1]


@pytest.mark.parametrize('excess, expected', [(1.1, 0.5), (0.9, 0.125)])
def test_private_stddevs_noise_follows_the_sensitivity(excess, expected):
  """No signal, one standard deviation of noise: found just above the threshold, not below."""
  rounds, multiplier = stddevs_lib.calibration(3, 0.1, 1e-5)
  assert rounds == 3
  # sqrt(|S|) rho^2 / n times the multiplier, with rho = 4, against the square of 1/4.
  n = round(multiplier * math.sqrt(3) * 4.0**2 / 0.25**2 / excess)
  estimate = stddevs_lib.private_stddevs(np.zeros((n, 3)), scale=1.0, moment_ratio=1.0,
                                   target_epsilon=0.1, target_delta=1e-5, rng=Recorder(1.0))
  np.testing.assert_array_equal(estimate, expected)


def test_private_stddevs_truncate_and_ignore_what_is_not_finite():
  """One record moves the released squares by at most rho^2 in every coordinate."""
  huge, broken = np.zeros((100, 2)), np.zeros((100, 2))
  huge[0], broken[0] = 1e200, (np.nan, 1e200)
  arguments = dict(scale=1.0, moment_ratio=1.0, target_epsilon=1.0, target_delta=1e-5)
  stddevs = stddevs_lib.private_stddevs(huge, rng=Recorder(), **arguments)
  assert np.all(stddevs == 0.5)  # sqrt(16 / 100) >= 1/4.
  stddevs = stddevs_lib.private_stddevs(broken, rng=Recorder(), **arguments)
  assert np.all(stddevs == 2.0**-2)  # Nothing there: the last round's value.


@pytest.mark.parametrize('records, arguments, message', [
    (np.zeros(3), {}, r'`records` must be a \[n, d\] matrix'),
    (np.zeros((3, 2)), dict(scale=0.0), '`scale` must be positive'),
    (np.zeros((3, 2)), dict(moment_ratio=0.5), '`moment_ratio` must be >= 1'),
    (np.zeros((3, 2)), dict(target_epsilon=0.0), '`target_epsilon` must be positive'),
    (np.zeros((3, 2)), dict(target_delta=1.0), r'`target_delta` must be in \(0, 1\)'),
])
def test_private_stddevs_refuse(records, arguments, message):
  with pytest.raises(ValueError, match=message):
    stddevs_lib.private_stddevs(records, **{**dict(
        scale=1.0, moment_ratio=1.0, target_epsilon=1.0, target_delta=1e-5), **arguments})


def test_estimated_moments_feed_pagan():
  stddevs = stddevs_lib.private_stddevs(
      np.random.default_rng(0).normal(size=(50000, 4)) * [1, .5, .25, .1], scale=1.0,
      moment_ratio=1.0, target_epsilon=3.0, target_delta=1e-5, rng=np.random.default_rng(1))
  rule = rules.pagan([rules.pagan_ellipsoid(stddevs)])
  (query,) = rule.query(rule.init((tf.TensorSpec([4], tf.float32),)))
  np.testing.assert_allclose(query.scale[0]**2, rules.pagan_ellipsoid(stddevs), rtol=1e-5)
