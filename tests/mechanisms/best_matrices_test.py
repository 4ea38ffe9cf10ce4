# SPDX-License-Identifier: Apache-2.0
"""The searches for the best matrices: errors, gradients, and what takes too long."""

# pylint: disable=protected-access

import numpy as np
import pytest
from scipy import signal

from tfdp_adaptive import mechanisms
from tfdp_adaptive.mechanisms import gram_design
from tfdp_adaptive.mechanisms import toeplitz

Workload = mechanisms.Workload


def diagonals(matrix, count):
  """[count, n] the entry [t+j, t] at [j, t], zeros beyond the matrix."""
  n = len(matrix)
  return np.array([np.append(np.diagonal(matrix, -j), np.zeros(j)) for j in range(count)])[:, :n]


@pytest.mark.parametrize('n, bands', [(1, 1), (5, 5), (50, 4), (70, 40), (100, 33)])
@pytest.mark.parametrize('momentum, schedule', [(0., False), (.9, False), (0., True), (.7, True)])
def test_errors_and_gradients_of_banded_matrices(n, bands, momentum, schedule):
  rates = tuple(1.1 + np.cos(np.arange(n) / n)) if schedule else ()
  workload = Workload(momentum, rates)
  c = np.eye(n) + .3 / bands * np.random.default_rng(n).normal(size=(n, n))
  c = np.tril(np.triu(c, 1 - bands))
  c /= np.linalg.norm(c, axis=0)
  t, lag = np.indices((n, bands))
  rows = np.where(t >= lag, c[t, np.maximum(t - lag, 0)], 0.)
  x, a = c.T @ c, workload.materialize(n)
  of_bands = gram_design.of_rows(rows)
  np.testing.assert_allclose(of_bands, diagonals(x, bands), atol=1e-14)
  np.testing.assert_allclose(gram_design.factor(of_bands), rows, atol=1e-12)
  value, gradient = gram_design.error_of(of_bands, a)
  solved = np.linalg.solve(x, a.T)
  assert value == pytest.approx(np.trace(a @ solved), rel=1e-9)
  expected = -diagonals(solved @ solved.T, bands)
  np.testing.assert_allclose(gradient, expected, atol=1e-9 * np.abs(expected).max())


def test_what_is_not_positive_definite_has_no_error():
  x = np.stack([np.ones(100), np.append(np.full(99, .6), 0.)])
  assert gram_design.error_of(x, np.eye(100)) is None


def test_the_best_banded_matrix_under_a_schedule_that_ends_at_zero():
  workload = Workload(.5, tuple(np.maximum(0, np.cos(np.arange(40) / 20))))
  best, plain = (mechanisms.Banded(4, 40, method=method, workload=workload)
                 for method in ('optimal', 'normalized'))
  assert best.sensitivity() == pytest.approx(1, abs=1e-12)
  assert best.rmse() < .997 * plain.rmse()


@pytest.mark.parametrize('make', [
    lambda: mechanisms.Dense(1025), lambda: mechanisms.Dense(8192, objective='max'),
    lambda: mechanisms.Dense(2000, min_sep=500, max_participations=4, fixed_order=True),
    lambda: mechanisms.Banded(300, 1024, method='optimal'),
    lambda: mechanisms.Banded(64, 8192, method='optimal')])
def test_what_takes_more_than_seconds_is_refused_at_once(make):
  with pytest.raises(ValueError, match='must be .*Give `tolerance`.*Received.*tolerance=None'):
    make().arrays  # pylint: disable=expression-not-assigned


def test_who_gives_a_tolerance_waits():
  patient = mechanisms.Dense(2000, tolerance=1e-5)
  assert mechanisms.registry.KINDS['Dense'](**patient.get_config()).tolerance == 1e-5
  numbers = mechanisms.Banded(128, 1024)  # As in a file: numbers that are there need no design.
  rows = numbers.rows[np.maximum(0, np.arange(1024) - 1024 + 128)]
  rows[np.subtract.outer(np.arange(1024), np.arange(128)) < 0] = 0
  loaded = mechanisms.Banded(128, 1024, method='optimal').with_numbers({'rows': rows})
  assert loaded.rmse() == pytest.approx(numbers.rmse(), rel=1e-9)
  assert mechanisms.Dense(1100, strategy=np.eye(1100)).rmse() == pytest.approx(np.sqrt(1101 / 2))
  with pytest.raises(ValueError, match='`tolerance` must be in'):
    mechanisms.Banded(2, 8, method='optimal', tolerance=1.5)


@pytest.mark.parametrize('d', [[1., -.5], [1., -.6, -.2, .1], [1., .3, .3]], ids=str)
def test_a_reciprocal_ends_before_numbers_that_are_slow(d, monkeypatch):
  lengths, lfilter = [], signal.lfilter
  expected = lfilter([1.], d, np.append(1., np.zeros(99_999)))

  def counted(b, a, x, *args, **kwargs):
    lengths.append(len(x))
    return lfilter(b, a, x, *args, **kwargs)

  monkeypatch.setattr(signal, 'lfilter', counted)
  found = toeplitz.reciprocal(np.array(d), 100_000)
  assert sum(lengths) < 10_000 and len(found) == 100_000
  np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-280)


def test_long_filters_are_transforms_with_the_same_error_and_gradient(monkeypatch):
  c = toeplitz.square_root(Workload(), 200)
  for workload in (Workload(), Workload(.9)):
    monkeypatch.setattr(toeplitz, '_FEW_PRODUCTS', 1 << 60)
    expected = toeplitz.squared_error(c, 10**5, workload, 'mean')
    monkeypatch.setattr(toeplitz, '_FEW_PRODUCTS', 0)
    value, gradient = toeplitz.squared_error(c, 10**5, workload, 'mean')
    assert value == pytest.approx(expected[0], rel=1e-9)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-8 * np.abs(expected[1]).max())
