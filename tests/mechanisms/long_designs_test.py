# SPDX-License-Identifier: Apache-2.0
"""Designs for very many steps: the work done, by counting, and the values, by brute force."""

import numpy as np
import pytest
from scipy import signal

from tfdp_adaptive import mechanisms
from tfdp_adaptive.mechanisms import banded_inverse
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import sensitivity as sensitivity_lib
from tfdp_adaptive.mechanisms import toeplitz

# pylint: disable=protected-access


@pytest.fixture(name='work')
def _work(monkeypatch):
  """Lengths times taps of all filters that were run."""
  done = []
  lfilter = signal.lfilter

  def counted(b, a, x, *args, **kwargs):
    done.append((len(a), len(x)))
    return lfilter(b, a, x, *args, **kwargs)

  monkeypatch.setattr(signal, 'lfilter', counted)
  return done


def test_an_inverse_multiplies_by_no_coefficient_it_does_not_need(work):
  steps = 1 << 18
  mechanism = mechanisms.SquareRoot(steps)
  assert mechanism.sensitivity() == pytest.approx(1, abs=1e-12)
  assert work and sum(taps * length for taps, length in work) < 1 << 29
  assert all(taps <= length or taps <= 2 for taps, length in work)


def test_a_banded_inverse_is_designed_on_the_part_of_c_that_is_not_zero(work):
  steps = 10**6
  mechanism = mechanisms.BandedInverse(3, steps)
  sums = np.array([.4, .2])
  value, _ = mechanism._loss(sums)
  assert work and max(length for _, length in work) < steps / 50
  d = np.array([1., -.6, -.2])
  c = toeplitz.reciprocal(d, steps)
  b = np.cumsum(matrices.resized(d, steps))
  expected = np.log(np.mean((steps - np.arange(steps)) / steps * b**2) * steps) + np.log(c @ c)
  assert value == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize('d', [[1.], [1., -.9], [1., -1.5, .9], [1., -.5, -.3, -.15]], ids=str)
@pytest.mark.parametrize('n', [1, 2, 5, 1500, 20_000])
def test_decaying_reciprocal(d, n):
  d = np.array(d)
  expected = toeplitz.reciprocal(d, n)
  reciprocal = toeplitz.decaying_reciprocal(d, n)
  np.testing.assert_allclose(reciprocal, expected[:len(reciprocal)], rtol=1e-12, atol=1e-300)
  assert np.abs(expected[len(reciprocal):]).max(initial=0) < 1e-14


def test_a_reciprocal_that_does_not_decay_is_not_cut():
  assert len(toeplitz.decaying_reciprocal(np.array([1., -1.]), 10_000)) == 10_000


@pytest.mark.parametrize('min_sep, k', [(7, 2), (7, 5), (7, 30), (7, 143), (40, 20), (300, 4),
                                        (1, 1000), (1000, 1)])
def test_repeated_participations_add_up(min_sep, k):
  steps, c = 1000, toeplitz.reciprocal(np.array([1., -.5, -.2, .1]), 60)
  value, gradient = banded_inverse._squared_sensitivity(c, steps, min_sep, k)
  column = np.zeros(steps)
  for start in range(0, min(k * min_sep, steps), min_sep):
    column[start:start + len(c)] += sensitivity_lib.majorant(c)[:steps - start]
  expected = column @ column
  assert value == pytest.approx(expected, rel=1e-12)
  for j in (0, 1, 5, 13):
    shift = 1e-6 * np.eye(len(c))[j]
    ends = [banded_inverse._squared_sensitivity(c + s, steps, min_sep, k)[0]
            for s in (shift, -shift)]
    assert gradient[j] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-6)


def test_a_design_for_a_million_steps_takes_few_evaluations(monkeypatch):
  values, loss = [], banded_inverse.BandedInverse._loss
  monkeypatch.setattr(banded_inverse.BandedInverse, '_loss', lambda self, sums: (
      values.append(loss(self, sums)) or values[-1]))
  mechanism = mechanisms.BandedInverse(2, 10**5, min_sep=10**4, max_participations=10)
  assert mechanism.arrays and len(values) < 150
  assert min(value for value, _ in values) < values[0][0]


@pytest.mark.parametrize('momentum', [0., .5, .9])
@pytest.mark.parametrize('objective', ['mean', 'max', 'last'])
@pytest.mark.parametrize('steps', [3, 40, 5000])
def test_errors_of_a_banded_inverse_settle(momentum, objective, steps):
  workload = mechanisms.Workload(momentum)
  d = np.array([1., -.5, -.2])
  squares = np.cumsum(workload.apply(matrices.resized(d, steps))**2)
  expected = {'mean': squares.mean(), 'max': squares[-1], 'last': squares[-1]}[objective]
  value, gradient = banded_inverse._squared_error(d, steps, workload, objective)
  assert value == pytest.approx(expected, rel=1e-12)
  for j in range(3):
    shift = 1e-6 * np.eye(3)[j]
    ends = [banded_inverse._squared_error(d + s, steps, workload, objective)[0]
            for s in (shift, -shift)]
    assert gradient[j] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)


@pytest.mark.parametrize('taps', [2, 64, 65, 200])
def test_few_lags_and_many_are_the_same_gradient(taps):
  rng = np.random.default_rng(taps)
  c = np.concatenate([[1.], .5 * rng.normal(size=taps - 1) / taps])
  pulled, x = rng.normal(size=(2, 500))
  adjoint = np.linalg.solve(matrices.toeplitz_matrix(c, 500).T, pulled)
  expected = [-sum(adjoint[t] * x[t - k] for t in range(k, 500)) for k in range(taps)]
  inverse = toeplitz.reciprocal(c, 500)
  np.testing.assert_allclose(
      toeplitz.pull(c, pulled, x, inverse), expected, rtol=1e-8, atol=1e-9)


def test_more_buffers_than_help_are_refused_with_the_reason():
  with pytest.raises(ValueError, match='at most 10 to be designed.*Received: buffers=50'):
    mechanisms.BLT(50, 1000)
  decays = np.linspace(.9, .1, 50)
  given = mechanisms.BLT(50, 1000, weights=np.full(50, .01), decays=decays)
  assert given.sensitivity() == pytest.approx(1, abs=1e-12)
