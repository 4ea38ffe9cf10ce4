# SPDX-License-Identifier: Apache-2.0
"""Sensitivities against all participation patterns, written out."""

import functools
import itertools

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tfdp_adaptive import mechanisms
from tfdp_adaptive.mechanisms import blt_design
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import sensitivity

PATTERNS = [(1, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 4), (4, 3), (1, 10), (9, 2)]
DECREASING = (1.0, .6, .5, .3, .3, .1)
NOT_DECREASING = (1.0, .2, .9, -.4, .7, .1)


ALL_PATTERNS = [(b, k) for b in range(1, 11) for k in range(1, 11)]


@functools.lru_cache(maxsize=None)
def subsets(n):
  """[p, n] all sets of columns, their sizes, smallest gaps and greatest common divisors of gaps."""
  chosen = ((np.arange(1, 2**n)[:, None] >> np.arange(n)) & 1).astype(float)
  gaps = [np.diff(np.flatnonzero(row)) for row in chosen]
  return (chosen, chosen.sum(axis=1), np.array([min(g, default=n) for g in gaps]),
          np.array([np.gcd.reduce(g) if len(g) else 0 for g in gaps]))


def every_pattern(c, min_sep, k, fixed_order=False):
  """Root of the largest `sum_{i,j in pi} |(C^T C)_ij|` over all patterns pi."""
  chosen, sizes, gaps, divisors = subsets(c.shape[1])
  allowed = (sizes <= k) & ((divisors % min_sep == 0) if fixed_order else
                            (gaps >= min_sep) | (sizes == 1))
  chosen = chosen[allowed]
  return np.sqrt(np.sum((chosen @ np.abs(c.T @ c)) * chosen, axis=1).max())


def brute_force(c, min_sep, k):
  """Largest `||C u||` over u with entries -1, 0, 1 whose support is a pattern."""
  n = c.shape[1]
  worst = 0.0
  for size in range(1, k + 1):
    signs = np.array([(1, *s) for s in itertools.product((-1, 1), repeat=min(size, 5) - 1)])
    for pattern in itertools.combinations(range(n), size):
      if min(np.diff(pattern), default=np.inf) >= min_sep:
        columns = c[:, list(pattern)]
        if size <= 5:
          worst = max(worst, np.linalg.norm(columns @ signs.T, axis=0).max())
        else:
          worst = max(worst, np.linalg.norm(columns.sum(axis=1)))
  return worst


def toeplitz(c, n):
  return matrices.toeplitz_matrix(np.asarray(c), n)


@pytest.mark.parametrize('n', [1, 7, 10])
@pytest.mark.parametrize('min_sep,k', PATTERNS)
@pytest.mark.parametrize('bands', [1, 2, 4, 6])
def test_decreasing_toeplitz_is_exact(n, min_sep, k, bands):
  c = np.array(DECREASING[:bands])
  expected = brute_force(toeplitz(c, n), min_sep, k)
  assert sensitivity.toeplitz(c, n, min_sep, k) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize('min_sep,k', PATTERNS)
def test_other_coefficients_are_not_underestimated(min_sep, k):
  for c in (np.array(NOT_DECREASING), np.array([1., .5, -.1]), np.array([.5, .6])):
    assert (sensitivity.toeplitz(c, 10, min_sep, k) * (1 + 1e-12)
            >= brute_force(toeplitz(c, 10), min_sep, k))


def test_the_equally_spaced_pattern_need_not_be_the_worst():
  c = np.array([1., 0., 0., 1.])
  equally_spaced = np.linalg.norm(sensitivity.equal_spacing_column(c, 10, 2, 2))
  worst = brute_force(toeplitz(c, 10), 2, 2)
  assert equally_spaced < .82 * worst
  assert sensitivity.toeplitz(c, 10, 2, 2) >= worst


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.lists(st.floats(-1, 1), min_size=36, max_size=36), st.integers(1, 8), st.integers(1, 8),
    st.integers(1, 8))
def test_any_matrix_is_never_underestimated(values, bands, min_sep, k):
  n = 8
  c = np.zeros((n, n))
  c[np.tril_indices(n)] = values
  c = np.where(np.tri(n, k=-bands), 0.0, c)
  worst = brute_force(c, min_sep, k)
  bound = sensitivity.overlapping(c, min_sep, k)
  assert bound >= worst * (1 - 1e-12)
  assert bound == pytest.approx(every_pattern(c, min_sep, k), rel=1e-12)
  if k <= 2 or bands <= min_sep:  # Two contributions can always agree on a sign.
    assert bound == pytest.approx(worst, rel=1e-12)
  order = sensitivity.fixed_order(c, min_sep, k)
  assert order == pytest.approx(every_pattern(c, min_sep, k, True), rel=1e-12)


@pytest.mark.parametrize('n', [1, 3, 9])
def test_all_patterns_of_a_band(n):
  rng = np.random.default_rng(2)
  for reach in range(n):
    gram = rng.uniform(size=(n, n))
    gram = np.where(np.abs(np.subtract.outer(np.arange(n), np.arange(n))) <= reach, gram, 0)
    gram = gram + gram.T + n * np.eye(n)
    root = np.linalg.cholesky(gram).T  # root^T root = gram.
    for min_sep, k in ALL_PATTERNS:
      expected = every_pattern(root, min_sep, k)
      assert np.sqrt(sensitivity.largest_sum(gram, min_sep, k)) == pytest.approx(expected, 1e-12)


def test_too_many_patterns_leave_a_bound(monkeypatch):
  c = np.tril(np.random.default_rng(4).uniform(size=(9, 9)))
  exact = [sensitivity.overlapping(c, *pattern) for pattern in PATTERNS]
  assert exact == pytest.approx([every_pattern(c, *pattern) for pattern in PATTERNS], rel=1e-12)
  monkeypatch.setattr(sensitivity, 'PATTERN_LIMIT', 5)
  assert sensitivity.largest_sum(c.T @ c, 2, 3) is None
  bounds = [sensitivity.overlapping(c, *pattern) for pattern in PATTERNS]
  assert np.all(np.array(bounds) >= np.array(exact) * (1 - 1e-12)) and bounds != exact


def test_many_steps_with_few_patterns_are_exact():
  """A pair of participations, or columns that overlap with the last ones only, in long runs."""
  rng = np.random.default_rng(3)
  c = np.tril(rng.uniform(size=(300, 300)))
  gram = c.T @ c
  pairs = np.diagonal(gram)[:, None] + np.diagonal(gram) + 2 * gram
  expected = np.sqrt(max(pairs[i, j] for i in range(300) for j in range(i + 40, 300)))
  assert sensitivity.overlapping(c, 40, 2) == pytest.approx(expected, rel=1e-12)
  band = np.where(np.tri(300, k=-60), 0, c)
  exact = sensitivity.overlapping(band, 40, 5)
  bound = np.sqrt(sensitivity.best_pattern(sensitivity.through_each(band, 40, 5), 40, 5))
  gram, best = band.T @ band, {}

  def value(i, left):
    if left == 0:
      return gram[i, i]
    if (i, left) not in best:
      later = [value(j, left - 1) + 2 * gram[i, j] for j in range(i + 40, 300)]
      best[i, left] = gram[i, i] + max(later, default=0.)
    return best[i, left]

  assert exact == pytest.approx(np.sqrt(max(value(i, 4) for i in range(300))), rel=1e-12)
  assert exact < bound * (1 - 1e-6)


def test_best_pattern_is_the_best():
  rng = np.random.default_rng(0)
  for _ in range(50):
    n, b, k = rng.integers(1, 9), rng.integers(1, 5), rng.integers(1, 6)
    values = rng.uniform(size=n)
    expected = max(values[list(p)].sum() for size in range(k + 1)
                   for p in itertools.combinations(range(n), size)
                   if min(np.diff(p), default=np.inf) >= b)
    assert sensitivity.best_pattern(values, b, k) == pytest.approx(expected)


MECHANISMS = [
    mechanisms.IndependentGaussian(),
    mechanisms.BandedToeplitz(3, 10),
    mechanisms.BandedToeplitz(6, 10, coefficients=NOT_DECREASING),
    mechanisms.Banded(3, 10),
    mechanisms.Banded(6, 10, coefficients=NOT_DECREASING),
    mechanisms.Banded(3, 10, method='optimal'),
    mechanisms.BLT(2, 10),
    mechanisms.BLT(2, 10, weights=[.9, .8], decays=[.9, .2]),
    mechanisms.BandedInverse(2, 10),
    mechanisms.BandedInverse(4, 10, min_sep=3, max_participations=3),
    mechanisms.BandedInverse(3, 10, coefficients=[1., -.2, -.7]),
    mechanisms.SquareRoot(10),
    mechanisms.Dense(10),
    mechanisms.Tree(10),
    mechanisms.Tree(10, 'naive', restart_every=4),
    mechanisms.Tree(10, 'full'),
    mechanisms.Tree(10, 'full', restart_every=4),
]


@pytest.mark.parametrize('dtype', ['float64', 'float32', 'float16'])
@pytest.mark.parametrize('mechanism', MECHANISMS, ids=repr)
def test_every_mechanism_knows_the_worst_of_all_patterns(mechanism, dtype):
  mechanism = mechanism.rounded(dtype)
  c = mechanism.materialize(10)
  # Columns of `Banded` have norm one up to rounding, and count as the longest.
  close = 1e-3 if isinstance(mechanism, mechanisms.Banded) and dtype == 'float16' else 1e-6
  for min_sep, k in ALL_PATTERNS:
    k = min(k, -(-10 // min_sep))  # `IndependentGaussian` may have more steps.
    worst = every_pattern(c, min_sep, k)
    stated = mechanism.sensitivity(min_sep=min_sep, max_participations=k)
    assert worst * (1 - 1e-12) <= stated <= worst * (1 + close)
    if (min_sep, k) in PATTERNS:
      signed = brute_force(c, min_sep, k)
      assert signed <= stated * (1 + 1e-12)
      if np.all(c.T @ c >= 0):
        assert signed == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize('mechanism', MECHANISMS, ids=repr)
def test_every_mechanism_knows_the_worst_fixed_order(mechanism):
  c = mechanism.materialize(10)
  for min_sep, k in ALL_PATTERNS:
    k = min(k, -(-10 // min_sep))
    worst = every_pattern(c, min_sep, k, fixed_order=True)
    stated = mechanism.sensitivity(min_sep=min_sep, max_participations=k, fixed_order=True)
    free = mechanism.sensitivity(min_sep=min_sep, max_participations=k)
    assert worst * (1 - 1e-12) <= stated <= free
    if k * min_sep >= 10 and np.all(c >= 0):
      assert stated == pytest.approx(worst, rel=1e-9)


def test_a_fixed_order_can_be_far_better_than_the_least_distance():
  c = np.array([1., 0., 0., 1.])
  mechanism = mechanisms.BandedToeplitz(4, 10, coefficients=c)
  pattern = dict(min_sep=2, max_participations=5)
  fixed = mechanism.sensitivity(fixed_order=True, **pattern)
  assert fixed == pytest.approx(np.sqrt(9 / 2))  # Ten ones, but the last falls off the end.
  assert mechanism.sensitivity(**pattern) > 1.2 * fixed


@pytest.mark.parametrize('mechanism', [
    mechanisms.Banded(2, 10), mechanisms.Banded(2, 10, coefficients=[1., -.8]),
    mechanisms.Banded(2, 10, method='optimal'),
    mechanisms.Tree(10), mechanisms.Tree(10, restart_every=4), mechanisms.Tree(10, 'full')],
    ids=repr)
def test_the_bounds_of_long_runs_hold_too(mechanism, monkeypatch):
  monkeypatch.setattr(sensitivity, 'GRAM_LIMIT', 0)
  for dtype in ('float64', 'float16'):
    mechanism = mechanism.rounded(dtype)
    for min_sep, k in PATTERNS:
      worst = brute_force(mechanism.materialize(10), min_sep, k)
      stated = mechanism.sensitivity(min_sep=min_sep, max_participations=k)
      assert worst * (1 - 1e-12) <= stated <= worst * 1.6


@pytest.mark.parametrize('steps,min_sep,k', [
    (1, 1, 1), (2, 1, 2), (50, 1, 50), (500, 1, 500), (500, 7, 3), (500, 7, 71), (500, 7, 72),
    (500, 100, 5), (499, 100, 5), (500, 499, 2), (500, 40, 12)])
def test_blt_in_closed_form(steps, min_sep, k):
  weights, decays = np.array([.3, .2, .1]), np.array([.999, .9, .1])
  c = blt_design.coefficients(.8, weights, decays, steps)
  k = sensitivity.most_participations(steps, min_sep, k)
  expected = np.linalg.norm(sensitivity.equal_spacing_column(c, steps, min_sep, k))
  closed_form = blt_design.sensitivity(.8, weights, decays, steps, min_sep, k)
  assert closed_form == pytest.approx(expected, rel=1e-11)


def test_rounding_is_part_of_the_sensitivity():
  designed = mechanisms.BLT(3, 5_000)
  run = designed.rounded('float16')
  assert designed.sensitivity() == pytest.approx(1, abs=1e-12)
  rounded = [np.asarray(x).astype(np.float16).astype(float)
             for x in (designed.output_scale, designed.weights, designed.decays)]
  c = blt_design.coefficients(*rounded, 5_000)
  assert run.sensitivity() == pytest.approx(np.linalg.norm(c), rel=1e-12)
  assert abs(run.sensitivity() - 1) > .01


@pytest.mark.parametrize('make', [
    lambda: mechanisms.Dense(12), lambda: mechanisms.Tree(7, 'full'), lambda: mechanisms.Tree(7),
    lambda: mechanisms.Banded(3, 12), lambda: mechanisms.BLT(2, 12)])
def test_rounding_forgets_what_was_computed_before(make):
  used, fresh = make(), make()
  used.sensitivity(min_sep=2, max_participations=3)
  used.rmse()
  assert used.sensitivity() != used.rounded('float16').sensitivity()
  assert used.rounded('float16').sensitivity() == fresh.rounded('float16').sensitivity()
  assert used.rounded('float16').rmse() == fresh.rounded('float16').rmse()


@pytest.mark.parametrize('arguments', [
    dict(max_participations=2), dict(max_participations=0, min_sep=1),
    dict(max_participations=2, min_sep=0), dict(max_participations=1.5, min_sep=1),
    dict(max_participations=2, min_sep=2.5), dict(max_participations='2', min_sep=1)])
def test_participation_is_not_guessed(arguments):
  for fixed_order in (False, True):
    with pytest.raises(ValueError, match='must be'):
      mechanisms.BandedToeplitz(2, 10).sensitivity(fixed_order=fixed_order, **arguments)


def test_participations_beyond_the_run_do_not_count():
  mechanism = mechanisms.BandedToeplitz(2, 10)
  assert (mechanism.sensitivity(min_sep=5, max_participations=10**9)
          == mechanism.sensitivity(min_sep=5, max_participations=2))
