# SPDX-License-Identifier: Apache-2.0
"""Errors under a learning-rate schedule, against matrices written out; designs of long runs."""

import warnings

import numpy as np
import pytest

from tfdp_adaptive import errors
from tfdp_adaptive import mechanisms
from tfdp_adaptive.mechanisms import blt_design
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.mechanisms import workload as workload_lib

Workload = workload_lib.Workload


def schedule(steps, momentum=0.0):
  """A cosine after a warm-up."""
  t = np.arange(steps) / steps
  return Workload(momentum, np.minimum(1, 10 * (t + 1 / steps)) * (1 + np.cos(np.pi * t)))


def squares_of(workload, inverse):
  n = len(inverse)
  answers = workload.materialize(n) @ matrices.toeplitz_matrix(inverse, n)
  return np.sum(answers**2, axis=1)


@pytest.mark.parametrize('momentum', [0., .9])
@pytest.mark.parametrize('steps, bands', [(1, 1), (2, 2), (30, 1), (30, 4), (30, 29), (30, 30)])
def test_errors_of_every_step_and_of_a_design(steps, bands, momentum):
  rng = np.random.default_rng(0)
  workload = Workload(momentum, rng.random(steps) + .01)
  d = rng.normal(size=bands)
  squares = squares_of(workload, matrices.resized(d, steps))
  np.testing.assert_allclose(
      workload_lib.squared_errors(workload, matrices.resized(d, steps)), squares, rtol=1e-9)
  for objective in workload_lib.OBJECTIVES:
    form = workload_lib.Form(workload, steps, bands, objective)
    value, gradient = form(d)
    assert value == pytest.approx(workload_lib.reduce(squares, objective)[0], rel=1e-9)
    for i in range(bands):
      moved = lambda by: form(d + by * (np.arange(bands) == i))[0]
      assert gradient[i] == pytest.approx(
          (moved(1e-5) - moved(-1e-5)) / 2e-5, rel=1e-4, abs=1e-6 * value)


@pytest.mark.parametrize('momentum', [0., .9])
@pytest.mark.parametrize('buffers, steps', [(0, 3), (1, 1), (2, 40)])
def test_errors_of_decays(buffers, steps, momentum):
  workload = schedule(steps, momentum)
  mechanism = mechanisms.BLT(buffers, steps, workload=workload)
  np.testing.assert_allclose(
      mechanism.squared_errors(), squares_of(workload, mechanism.noising()), rtol=1e-9)


@pytest.mark.parametrize('weights, decays', [
    ((.9,), (.9,)), ((.95,), (.85,)), ((.90035255,), (.9003525,)),  # Inverse decays 0 and below.
    ((8e-8, .90035245), (.9998, .90035245)), ((.2, .3), (.5, .5 - 1e-12)),
    ((.1, .2, .3), (.5, .5 - 1e-16, .5 - 2e-16))])
def test_errors_of_decays_that_are_given(weights, decays):
  mechanism = mechanisms.BLT(
      len(weights), 20, weights=weights, decays=decays, workload=schedule(20, .8))
  alike = np.any(np.abs(np.diff(decays)) < 1e-7)  # Float32 cannot tell them apart, and refuses.
  for dtype in ('float64',) if alike else ('float64', 'float32'):
    rounded = mechanism.rounded(dtype)
    np.testing.assert_allclose(
        rounded.squared_errors(), squares_of(rounded.workload, rounded.noising()),
        rtol=1e-9 if dtype == 'float64' else 1e-5)


@pytest.mark.parametrize('objective', workload_lib.OBJECTIVES)
@pytest.mark.parametrize('make, limit', [
    (lambda steps, **more: mechanisms.BandedInverse(8, steps, **more), 1.01),
    (lambda steps, **more: mechanisms.BandedToeplitz(8, steps, **more), 1.001),
    (lambda steps, **more: mechanisms.BLT(2, steps, **more), 1.001)],
    ids=['BandedInverse', 'BandedToeplitz', 'BLT'])
def test_a_design_for_the_schedule_is_the_better_one(make, limit, objective):
  steps, kind = 300, dict(objective=objective)
  made = make(steps, workload=schedule(steps), **kind)
  other = made.with_numbers(make(steps, **kind).arrays)
  error = lambda m: m._error(objective, None, {})
  assert error(made) <= error(other) * limit  # The maximum is minimized as a power mean.


@pytest.mark.filterwarnings('ignore:.*best numbers for a constant')
@pytest.mark.parametrize('objective', ['mean', 'max'])
@pytest.mark.parametrize('make', [
    lambda **more: mechanisms.BandedInverse(16, 6_000, **more),
    lambda **more: mechanisms.BandedToeplitz(4, 6_000, **more),
    lambda **more: mechanisms.BLT(1, 6_000, **more)], ids=['BandedInverse', 'Toeplitz', 'BLT'])
def test_long_runs_under_a_schedule(make, objective):
  """What takes the square of the steps would take minutes, and is not there."""
  made = make(workload=schedule(6_000, .9), objective=objective)
  squares = made.squared_errors()
  for step in (0, 1, 999, 5_999):  # One row, by the definition.
    rates, weights = made.workload.rates(step + 1), np.zeros(step + 1)
    carried = 0.0
    for u in range(step, -1, -1):
      carried = rates[u] + made.workload.momentum * carried
      weights[u] = carried
    row = np.convolve(weights[::-1], made.noising(step + 1))[:step + 1]
    assert squares[step] == pytest.approx(row @ row, rel=1e-6)


def test_a_design_that_cannot_be_looked_at_is_that_of_a_constant_rate(monkeypatch):
  monkeypatch.setattr(toeplitz, '_MOST_FORMED', 64)
  monkeypatch.setattr(blt_design, '_WORK', 100)
  for make in (lambda **more: mechanisms.BandedToeplitz(8, 300, **more),
               lambda **more: mechanisms.BLT(2, 300, **more)):
    made = make(workload=schedule(300))
    with pytest.warns(errors.Caution, match='best numbers for a constant learning rate'):
      np.testing.assert_array_equal(made.strategy(300), make().strategy(300))


def test_a_design_from_the_cache_says_so_as_well(monkeypatch, tmp_path):
  monkeypatch.setenv('TFDP_MECHANISM_CACHE', str(tmp_path))
  monkeypatch.setattr(blt_design, '_WORK', 100)
  for _ in range(2):
    with pytest.warns(errors.Caution, match='BLT.* has the best numbers for a constant'):
      mechanisms.BLT(1, 300, workload=schedule(300)).arrays  # pylint: disable=expression-not-assigned
  assert len(list(tmp_path.iterdir())) == 1
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    mechanisms.BLT(1, 300).arrays  # pylint: disable=expression-not-assigned
    numbers = {'decays': [.9], 'weights': [.1]}
    mechanisms.BLT(1, 300, workload=schedule(300), **numbers).arrays  # pylint: disable=expression-not-assigned
