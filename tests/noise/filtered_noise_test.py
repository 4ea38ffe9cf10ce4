# SPDX-License-Identifier: Apache-2.0
"""The variance of filtered noise, against published values, dense matrices and drawn noise."""

import numpy as np
import pytest
from scipy import signal
import tensorflow as tf

from tfdp_adaptive import mechanisms
from tfdp_adaptive import noise
from tfdp_adaptive.noise import filtered
from tfdp_adaptive.noise import keys

STEPS = 14
MECHANISMS = [
    mechanisms.IndependentGaussian(), mechanisms.BandedToeplitz(5, STEPS),
    mechanisms.Banded(5, STEPS), mechanisms.BLT(2, STEPS), mechanisms.BandedInverse(3, STEPS),
    mechanisms.SquareRoot(STEPS), mechanisms.Dense(STEPS), mechanisms.Tree(STEPS),
    mechanisms.Tree(STEPS, 'full', restart_every=7)]
COMPILED = (mechanisms.IndependentGaussian, mechanisms.Dense, mechanisms.BLT)
FILTERS = [  # b, a.
    ((1.,), ()), ((.3,), (-.7,)), ((.1, .1), (-.8,)), ((.5, .3, .2), ()),
    ((.2, .1, .3, .1), (-.5, .2, -.1))]


def online(mechanism, b, a, variances, wrap=lambda f: f):
  made = filtered.filtered_variance(mechanism, b, a)
  advance, state, result = wrap(made.next), made.init(), []
  for variance in variances:
    value, state = advance(state, tf.constant(variance, tf.float32))
    result.append(float(value))
  return np.array(result)


@pytest.mark.parametrize('mechanism, b, a, expected', [
    (mechanisms.IndependentGaussian(), (.1, .1), (-.8,), (1, .54082, .12727, .10000)),
    (mechanisms.SquareRoot(200), (.1, .1), (-.8,), (1, .34311, .03796, .03032)),
    (mechanisms.IndependentGaussian(), (.3,), (-.7,), (1, .51557, .18673, .17647)),
    (mechanisms.SquareRoot(200), (.3,), (-.7,), (1, .35986, .10222, .09748))],
                         ids=['iid', 'square root', 'iid, one pole', 'square root, one pole'])
def test_reference_values(mechanism, b, a, expected):
  """Of unit noise: the first row has variance one, and tau is constant."""
  steps = 200
  gain = signal.lfilter(b, np.concatenate([[1.], a]), np.ones(steps))
  unit = mechanism.rounded('float32').row_norms(steps)**2
  values = online(mechanism, b, a, unit / unit[0]) / gain**2
  np.testing.assert_allclose(values[[0, 1, 9, 199]], expected, atol=6e-6)


@pytest.mark.parametrize('mechanism', MECHANISMS, ids=repr)
@pytest.mark.parametrize('b, a', FILTERS, ids=str)
def test_any_mechanism_filter_and_varying_noise(mechanism, b, a):
  run = mechanism.rounded('float32')
  tau = np.random.default_rng(0).uniform(.2, 3, STEPS)
  tau[5] = 0.  # A step at which nothing was asked.
  rows = tau[:, None] * run.materialize_inverse(STEPS)
  expected = np.sum(signal.lfilter(b, np.concatenate([[1.], a]), rows, axis=0)**2, axis=1)
  variances = tau**2 * run.row_norms(STEPS)**2
  # Compiled for one filter only: that takes longer than all the rest.
  compiled = b == FILTERS[-1][0] and isinstance(mechanism, COMPILED)
  wrap = lambda f: tf.function(f, jit_compile=compiled, autograph=False)
  np.testing.assert_allclose(online(mechanism, b, a, variances, wrap), expected, rtol=2e-5)


def test_filtering_the_variances_instead_is_wrong():
  b, a = (.1, .1), (-.8,)
  unit = mechanisms.SquareRoot(200).row_norms(200)**2
  assert online(mechanisms.IndependentGaussian(), b, a, unit)[-1] > 3 * online(
      mechanisms.SquareRoot(200), b, a, unit)[-1]


def test_it_is_the_variance_of_the_noise_that_is_drawn():
  steps, size = 12, 40_000
  mechanism = mechanisms.BLT(2, steps)
  stream = noise.stream(mechanism, lambda: keys.from_seed(5))
  specs = tf.TensorSpec([size])
  state, drawn, variances = stream.init(specs), [], []
  for t in range(steps):
    row, variance, state = stream.next(state, specs)
    drawn.append((1 + t % 3) * row.numpy())
    variances.append((1 + t % 3)**2 * float(variance))
  b, a = (.2, .1), (-.7,)
  measured = signal.lfilter(b, (1., *a), np.array(drawn, np.float64), axis=0).var(axis=1)
  expected = online(mechanism, b, a, variances)
  spread = 5 * np.sqrt(2 / size)
  assert np.abs(measured / expected - 1).max() < spread
  independent = online(mechanisms.IndependentGaussian(), b, a, variances)
  assert np.abs(measured / independent - 1).max() > 10 * spread


@pytest.mark.parametrize('b, a', [((), ()), ((np.nan,), ()), ((1.,), (np.inf,)), (((1.,),), ())])
def test_what_is_no_filter_is_refused(b, a):
  with pytest.raises(ValueError, match='`b` must be'):
    filtered.filtered_variance(mechanisms.IndependentGaussian(), b, a)
