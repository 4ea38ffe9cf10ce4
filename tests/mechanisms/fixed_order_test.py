# SPDX-License-Identifier: Apache-2.0
"""Records with one place in every epoch: sensitivity, the best C, accounting."""

import functools

import numpy as np
import pytest

from tfdp_adaptive import errors
from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.mechanisms import dense_optimal
from tfdp_adaptive.mechanisms import gram_design
from tfdp_adaptive.privacy import plan as plan_lib

SCHEDULE = mechanisms.Workload(.6, tuple(np.linspace(1, .2, 14)))


def pattern(epoch, k):
  return dict(min_sep=epoch, max_participations=k, fixed_order=True)


def patterns_norm(x, epoch):
  """[epoch] of every place, `sum_{i,j} |X_ij|` over the steps that a record there takes part in."""
  return np.array([np.abs(x[place::epoch, place::epoch]).sum() for place in range(epoch)])


def lower_bound(v, place, workload):
  """Of the mean error of any C with `sum_{i,j in g} |(C^T C)_ij| <= 1` for every place g.

  Weak duality: for V >= 0 with zeros between places, `tr(V C^T C)` is at most the sum of the
  largest |V_ij| of each place, and `tr(A^T A X^-1) tr(V X)` at least the square of the nuclear
  norm of `A V^(1/2)`.
  """
  prices = np.zeros(place.max() + 1)
  np.maximum.at(prices, place, np.abs(v).max(axis=1))
  squares, vectors = np.linalg.eigh(v)
  root = vectors * np.sqrt(np.maximum(squares, 0.0))
  nuclear = np.linalg.svd(workload.materialize(len(v)) @ root, compute_uv=False).sum()
  return nuclear / np.sqrt(len(v) * prices.sum())


def multipliers(c, place, workload):
  """V of the conditions on X = C^T C: right where X is the optimum."""
  half = np.linalg.solve(c.T @ c, workload.materialize(len(c)).T)
  return np.where(place[:, None] == place, half @ half.T, 0.0)


@pytest.mark.filterwarnings('ignore:.*above the least one')
@pytest.mark.parametrize('steps,epoch,k', [(14, 7, 2), (14, 4, 4), (13, 3, 6), (14, 1, 14)])
@pytest.mark.parametrize('workload', [mechanisms.Workload(), SCHEDULE], ids=['sums', 'schedule'])
def test_nothing_is_better(steps, epoch, k, workload):
  """Random other strategies, and any prices of the places, whatever the design thinks of them."""
  best = mechanisms.Dense(steps, tolerance=1e-12, workload=workload, **pattern(epoch, k))
  error = best.rmse(**pattern(epoch, k))
  c = best.materialize()
  sizes = patterns_norm(c.T @ c, epoch)
  np.testing.assert_allclose(sizes, sizes.max(), rtol=1e-9)  # No place is spared.
  a, rng = workload.materialize(steps), np.random.default_rng(0)
  for scale in (1e-3, 1e-2, .1, 1.):
    for _ in range(20):
      other = c + scale * np.tril(rng.normal(size=c.shape)) * np.mean(np.diagonal(c))
      size = np.sqrt(patterns_norm(other.T @ other, epoch).max())
      errors = np.sum((a @ np.linalg.inv(other))**2, axis=1)
      assert size * np.sqrt(errors.mean()) > error * (1 - 1e-9)
  place = np.arange(steps) % epoch
  x, found, proven = gram_design.optimal_in_order(
      workload, steps, epoch, 1e-12, 2000, lambda _: None)
  assert found == pytest.approx(error, rel=1e-12) and found * (1 - 1e-5) < proven <= found
  np.testing.assert_allclose(x * sizes.max(), c.T @ c, atol=1e-12 * sizes.max())
  bound = lower_bound(multipliers(c, place, workload), place, workload)
  assert error * (1 - 1e-4) < bound <= error * (1 + 1e-9)
  for other in (np.eye(steps), mechanisms.Tree(steps, 'full').materialize()):
    assert lower_bound(multipliers(other, place, workload), place, workload) < error * (1 - 1e-5)


def test_every_step_or_no_order_at_all():
  """Once in one epoch is one participation; in epochs of one step, every record is in all."""
  one = mechanisms.Dense(14, min_sep=14, max_participations=1, fixed_order=True)
  assert one.rmse() == pytest.approx(mechanisms.Dense(14).rmse(), rel=1e-9)
  every = mechanisms.Dense(14, **pattern(1, 14))
  # Columns are orthogonal, each of a length of its own: sums of x / d_t, with sum_t d_t^2 = 1.
  c = every.materialize()
  np.testing.assert_allclose(c, np.diag(np.diagonal(c)), atol=1e-12)
  lengths = np.sqrt(14 - np.arange(14))  # How many sums step t is part of.
  assert every.rmse(**pattern(1, 14)) == pytest.approx(lengths.sum() / np.sqrt(14), rel=1e-7)


@pytest.mark.parametrize('arguments', [
    dict(max_participations=2), dict(min_sep=7, max_participations=2),
    dict(min_sep=6, max_participations=2, fixed_order=True),
    dict(min_sep=7, max_participations=2, fixed_order=True, objective='max')])
def test_what_has_no_known_optimum_is_refused(arguments):
  with pytest.raises(ValueError, match='must be.*Received'):
    mechanisms.Dense(14, **arguments)


@pytest.mark.parametrize('arguments', [
    dict(steps=1025), dict(steps=513, min_sep=128, max_participations=5, fixed_order=True)])
def test_a_design_of_minutes_asks_for_a_tolerance(arguments):
  with pytest.raises(ValueError, match='in seconds.*Give `tolerance`.*Received: steps='):
    mechanisms.Dense(**arguments)
  assert mechanisms.Dense(tolerance=1e-3, **arguments).tolerance == 1e-3
  mechanisms.Dense(**dict(arguments, steps=512))


def test_a_design_that_is_not_proved_best_warns():
  with pytest.warns(errors.Caution, match='above the least one'):
    dense_optimal.optimal(SCHEDULE, 14, 'mean', 1e-5, most=2, epoch=7)
  with pytest.warns(errors.Caution, match='above the least one'):
    dense_optimal.optimal(SCHEDULE, 14, 'mean', 1e-5, most=2)


def test_the_design_is_part_of_the_description():
  mechanism = mechanisms.Dense(14, **pattern(7, 2))
  restored = mechanisms.from_json(mechanism.to_json())
  assert restored == mechanism != mechanisms.Dense(14)
  assert restored.rmse(**pattern(7, 2)) == mechanism.rmse(**pattern(7, 2))


@pytest.mark.parametrize('scheme', [sampling.FixedOrder(), sampling.BallsInBins(cycle=4)], ids=repr)
def test_a_fixed_order_is_accounted_as_it_runs(scheme):
  """Places in the batches themselves, against the C of a mechanism designed for them."""
  pattern = dict(min_sep=4, max_participations=3, fixed_order=True)
  mechanism = mechanisms.Dense(12, **pattern)
  make = functools.partial(
      plan_lib.PrivacyPlan, batch_size=2, steps=12, l2_norm_clip=1., noise_multiplier=2.,
      target_delta=1e-6, population_size=8, sampling=scheme, mechanism=mechanism)
  plan = make()
  assert plan.fixed_order and plan.participation() == (4, 3)
  c = mechanism.rounded('float32').materialize()
  steps = [[t for t, batch in enumerate(plan.index_batches()) if record in batch]
           for record in range(8)]
  worst = max(np.sqrt(np.abs(c.T @ c)[np.ix_(s, s)].sum()) for s in steps)
  assert {s[0] for s in steps} == {0, 1, 2, 3}  # All places occur: the accounting is tight.
  assert plan.event().noise_multiplier == pytest.approx(2 / worst, rel=1e-6)
  # A smaller distance, or a scheme that mixes again, is accounted for by its least distance.
  for other in (make(min_sep=3), make(min_sep=3, max_participations=4)):
    assert not other.fixed_order
    assert other.event().noise_multiplier < plan.event().noise_multiplier
  assert not make(sampling=sampling.Poisson(),
                  mechanism=mechanisms.IndependentGaussian()).fixed_order


@pytest.mark.filterwarnings('ignore:.*above the least one')
@pytest.mark.parametrize('momentum', [0., .9])
@pytest.mark.parametrize('steps,epoch,k', [(40, 2, 20)])
def test_many_epochs_are_no_worse_than_bands(momentum, steps, epoch, k):
  """Where the search does not end, it has the banded design at least."""
  workload = mechanisms.Workload(momentum)
  options = dict(pattern(epoch, k))
  best = mechanisms.Dense(steps, workload=workload, **options).rmse(**options)
  root = mechanisms.BandedToeplitz(epoch, steps, method='square_root', workload=workload)
  assert best <= .99 * root.rmse(**options)
