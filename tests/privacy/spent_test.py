# SPDX-License-Identifier: Apache-2.0
"""A plan beside what was spent: both together keep to the target, tightly."""

import math

import pytest

import tfdp_adaptive as tfdp

FIELDS = dict(population_size=10_000, batch_size=100, steps=200, l2_norm_clip=1.0,
              target_delta=1e-5)


def plan(**fields):
  return tfdp.PrivacyPlan.calibrate(**{**FIELDS, **fields})


@pytest.mark.parametrize('accountant', ['pld', 'rdp'])
def test_both_together_keep_to_the_target_and_no_less(accountant):
  first = plan(target_epsilon=1.0)
  second = plan(target_epsilon=2.0, spent=first, accountant=accountant, steps=300)
  total = (first + second).epsilon(accountant=accountant)
  assert 1.97 < total <= 2.0
  assert second.noise_multiplier > plan(target_epsilon=2.0, steps=300).noise_multiplier


def test_two_gaussians_add_up_as_squares():
  """Full batches: sigma^-2 of both is that of one release."""
  full = dict(batch_size=10_000, steps=1)
  whole, first = (plan(target_epsilon=one, **full) for one in (2.0, 1.0))
  second = plan(target_epsilon=2.0, spent=first, **full)
  assert second.noise_multiplier**-2 == pytest.approx(
      whole.noise_multiplier**-2 - first.noise_multiplier**-2, rel=.01)


def test_an_empty_ledger_changes_nothing_and_a_full_one_is_refused():
  assert plan(target_epsilon=1.0, spent=tfdp.Ledger()).noise_multiplier == pytest.approx(
      plan(target_epsilon=1.0).noise_multiplier, rel=1e-3)
  first = plan(target_epsilon=1.0)
  for spent in (first, first + first, tfdp.Ledger().begin(None).done(1)):
    with pytest.raises(ValueError, match='must cost less'):
      plan(target_epsilon=.9, spent=spent)
  with pytest.raises(ValueError, match='`spent`'):
    plan(target_epsilon=1.0, spent=3.0)
  assert math.isfinite(first.epsilon())
