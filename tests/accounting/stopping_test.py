# SPDX-License-Identifier: Apache-2.0
"""Stopping by what was released: shares of delta hold, one delta for all looks does not."""

import math

import numpy as np
import pytest
from scipy import special

import tfdp_adaptive as tfdp
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.accounting import stopping
from tfdp_adaptive.privacy import plan as plan_lib

# One record in each of 200 batches: unsampled Gaussians, noise 20 in each step.
PLAN = plan_lib.PrivacyPlan(
    population_size=100, batch_size=100, steps=200, l2_norm_clip=1.0, noise_multiplier=20.0,
    target_delta=1e-5, sampling=sampling.FixedOrder())
LOOKS = tuple(range(20, 201, 20))


def test_golden_shares():
  looks = stopping.Looks(LOOKS)
  assert looks.epsilon(PLAN, 100) == pytest.approx(2.2541, abs=1e-4)
  assert looks.epsilon(PLAN, 200) == pytest.approx(3.3076, abs=1e-4)
  assert PLAN.epsilon() == pytest.approx(2.9432, abs=1e-4)
  assert stopping.Looks(LOOKS, LOOKS).epsilon(PLAN, 20) == pytest.approx(2.9432, abs=1e-4)
  half = stopping.Looks(LOOKS, LOOKS[5:])
  assert half.epsilon(PLAN, 100) == looks.epsilon(PLAN, 100)
  assert half.epsilon(PLAN, 120) == half.epsilon(PLAN, 200) == pytest.approx(
      gaussian.epsilon(20 / math.sqrt(200), 5e-6), rel=1e-9)


def worst_delta(epsilons):
  """Of the best rule for stopping at a look, by dynamic programming over the privacy loss.

  Between looks the loss moves by a normal with variance v and mean v / 2, v = 20 / 400. Who
  stops at look t gains (1 - exp(epsilon_t - loss))_+.
  """
  v = 20 / 20**2
  grid = np.linspace(-6, 12, 3601)
  step = grid[1] - grid[0]
  reach = np.arange(-360, 361) * step
  kernel = np.diff(special.ndtr((np.append(reach, reach[-1] + step) - step / 2 - v / 2)
                                / math.sqrt(v)))
  value = np.zeros(len(grid))
  for epsilon in reversed(epsilons):
    stop = np.maximum(-np.expm1(epsilon - grid), 0)
    best = np.maximum(stop, value)
    padded = np.concatenate([np.zeros(360), best, np.ones(360)])
    value = np.convolve(padded, kernel[::-1], 'valid')
  return float(np.interp(0.0, grid, value))


def test_the_worst_rule_stays_below_delta_with_shares_and_not_without():
  shared = [stopping.Looks(LOOKS).epsilon(PLAN, t) for t in LOOKS]
  each = [PLAN.epsilon(t) for t in LOOKS]
  total = [PLAN.epsilon()] * len(LOOKS)
  mixed = [stopping.Looks(LOOKS, LOOKS[5:]).epsilon(PLAN, t) for t in LOOKS]
  assert worst_delta(shared) == pytest.approx(5.8e-6, rel=0.05)
  assert worst_delta(each) == pytest.approx(5.2e-5, rel=0.05)
  assert worst_delta(total) <= 1e-5 * 1.02 and worst_delta(mixed) <= 1e-5
  # The smaller of two claims, taken afterwards, is none.
  assert worst_delta(np.minimum(each, total)) > 1e-5


def test_looks_are_fixed_and_within_the_plan():
  looks = stopping.Looks.every(60, PLAN)
  assert looks.steps == (60, 120, 180, 200) and looks.total == (120, 180, 200)
  assert 'stopped after 120 of 200' in looks.describe(PLAN, 120)
  assert 'all planned' in looks.describe(PLAN, 120) and 'steps done' in looks.describe(PLAN, 60)
  for wrong in ((), (3, 2), (2, 2), (0, 1)):
    with pytest.raises(ValueError, match='Received'):
      stopping.Looks(wrong)
  with pytest.raises(ValueError, match='among the looks'):
    stopping.Looks((1, 2), (3,))
  with pytest.raises(ValueError, match='fixed beforehand'):
    looks.epsilon(PLAN, 61)
  with pytest.raises(ValueError, match='at most those of the plan'):
    stopping.Looks((100, 300)).epsilon(PLAN, 100)


def test_a_ledger_states_what_its_looks_allow():
  looks = stopping.Looks(LOOKS, LOOKS[5:])
  stopped = tfdp.Ledger().begin(PLAN).done(100)
  assert stopped.epsilon(looks=looks) == looks.epsilon(PLAN, 100) > stopped.epsilon()
  assert stopped.done(120).epsilon(looks=looks) == looks.epsilon(PLAN, 200)
  text = stopped.statement(looks=looks)
  assert text.startswith('Guarantee: (2.255, 1e-05)') and '10 looks were fixed before' in text
  # With a run before, all looks at the last one are of both together.
  both = (tfdp.Ledger().begin(PLAN).done(50).begin(PLAN).done(100)).epsilon(looks=looks)
  assert both == pytest.approx(gaussian.epsilon(20 / math.sqrt(150), 1e-6), rel=1e-9)
  with pytest.raises(ValueError, match='fixed beforehand'):
    stopped.done(101).statement(looks=looks)
