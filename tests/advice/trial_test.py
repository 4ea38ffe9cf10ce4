# SPDX-License-Identifier: Apache-2.0
"""The simulation is exact where it says so, and its noise is the plan's."""

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive.advice import trial

RNG = np.random.default_rng(0)


def linear(squared, count=30, size=4):
  """Records of a linear model at weights 0, and its losses at other weights."""
  x = RNG.normal(size=[count, size])
  if squared:
    y = RNG.normal(size=count)
    return trial.Records(-y[:, None] * x, y**2 / 2, True), lambda w: np.square(x @ w - y) / 2
  y, offset = RNG.integers(2, size=count), RNG.normal(size=count)
  loss = lambda w: np.logaddexp(0, (1 - 2 * y) * (x @ w + offset))
  gradient = (1 - 2 * y)[:, None] * x / (1 + np.exp(-(1 - 2 * y) * offset))[:, None]
  return trial.Records(gradient, loss(np.zeros(size)), False), loss


@pytest.mark.parametrize('squared', [True, False])
def test_losses_of_linear_models_are_exact(squared):
  records, loss = linear(squared)
  for scale in (0, .1, 1, 30):
    w = scale * RNG.normal(size=4)
    np.testing.assert_allclose(records.values(w[None])[0], loss(w), rtol=1e-9, atol=1e-9)


def test_losses_of_hundreds_are_not_too_large():
  records = trial.Records(np.ones([2, 1]), np.array([.5, 800.0]), False)
  np.testing.assert_allclose(records.values(np.array([[0.0], [-50.0]]))[:, 1], [800, 750])
  np.testing.assert_allclose(records.slopes(np.zeros([1, 2])), 1)


@pytest.mark.parametrize('squared', [True, False])
def test_slopes_are_derivatives_of_the_losses(squared):
  records, _ = linear(squared)
  w, step = RNG.normal(size=4), 1e-6 * np.eye(4)
  rise = (records.values(w + step) - records.values(w - step)) / 2e-6
  found = records.slopes((w @ records.gradients.T)[None])[0][:, None] * records.gradients
  np.testing.assert_allclose(rise.T, found, atol=1e-6)
  np.testing.assert_allclose(records.slopes(np.zeros([1, 30])), 1)


def run(gradients, course, settings, rule=tfdp.rules.dp_sgd(), scaled=False):
  records = trial.Records(np.asarray(gradients, float), np.full(len(gradients), .5), True)
  return trial.train(trial.Candidate(rule, scaled, settings), records, course, 0)


def test_steps_by_hand():
  """Equal records with the loss (1 + g w)^2 / 2, no noise; the rate falls from r to r / T."""
  course = trial.Course(7, 0.0, np.eye(5))
  found = run(np.tile([.3, -.4], [6, 1]), course, [trial.Setting(.2, 1.0), trial.Setting(.2, .05)])
  for clip, weights in zip((1.0, .05), found):
    w = np.zeros(2)
    for step in range(5):
      g = (1 + np.dot([.3, -.4], w)) * np.array([.3, -.4])
      w -= .2 * (1 - step / 5) * g / clip * min(1, clip / np.linalg.norm(g))
    np.testing.assert_allclose(weights, w, rtol=1e-5)


@pytest.mark.parametrize('rule, scaled', [
    (tfdp.rules.dp_sgd(.9), False), (tfdp.rules.scale_then_privatize(scale_epsilon=.1), True)])
def test_looking_again_changes_nothing_of_a_linear_model(rule, scaled):
  """Neither of all records nor of some; and gradients of another model do change it."""
  x, y = RNG.normal(size=[30, 4]), RNG.normal(size=30)

  def look(distance, rows, curved=0.0):
    off = x[rows] @ distance - y[rows]
    return off[:, None] * x[rows] + curved * distance, np.square(off) / 2

  plain = trial.Records(-y[:, None] * x, y**2 / 2, True)
  course = trial.Course(7, .1, np.eye(9))
  candidate = trial.Candidate(rule, scaled, [trial.Setting(.1, 1.0)])
  for rows in (np.arange(30), np.array([3, 8, 9])):
    found, again, other = (
        trial.train(candidate, plain._replace(look=how).part(rows), course, 0)
        for how in (None, look, lambda *args: look(*args, curved=1.0)))
    np.testing.assert_allclose(again, found, rtol=1e-4, atol=1e-5)
    assert np.abs(other - found).max() > .01


@pytest.mark.parametrize('scaled', [False, True])
def test_noise_has_the_plans_size_and_correlation(scaled):
  """Records of size 1e-9: what moves the weights is noise."""
  inverse = np.linalg.inv(np.eye(3) + .5 * np.eye(3, k=-1))
  course = trial.Course(2, .25, inverse)
  found = run(np.full([4, 40_000], 1e-9), course, [trial.Setting(.1, 3.0)], scaled=scaled)
  rates = .1 * np.array([1, 2 / 3, 1 / 3])
  expected = .25 * np.linalg.norm(rates @ inverse) * (3 if scaled else 1)
  assert found.std() == pytest.approx(expected, rel=.02)
  np.testing.assert_allclose(course.stddevs, .25 * np.sqrt([1, 1.25, 1.3125]))


def plan(steps, **fields):
  return tfdp.PrivacyPlan(**dict(dict(
      noise_multiplier=2.0, batch_size=10, population_size=1000, steps=steps, target_delta=1e-5,
      l2_norm_clip=1.0), **fields))


@pytest.mark.parametrize('mechanism', [
    tfdp.mechanisms.IndependentGaussian(), tfdp.mechanisms.BLT(2, 1000)])
def test_fewer_steps_see_as_many_records_and_as_much_noise_in_sums(mechanism):
  given = plan(1000, mechanism=mechanism, sampling=tfdp.sampling.FixedOrder(), min_sep=100,
               max_participations=10)
  course = trial.course(given)
  steps = len(course.inverse)
  assert steps < 1000 and steps * course.batch_size == 1000 * 10
  sums = np.linalg.norm(np.cumsum(course.inverse, 0), axis=1)
  error = course.stddev * course.batch_size * np.sqrt(np.mean(sums**2))
  assert error == pytest.approx(2 * mechanism.rmse(1000), rel=1e-6)


def test_short_runs_are_simulated_whole_and_replaced_records_double_the_noise():
  course = trial.course(plan(30))
  assert course[:2] == (10, .2) and course.inverse.shape == (30, 30)
  assert trial.course(plan(30, adjacency='replace')).stddev == pytest.approx(.4)
