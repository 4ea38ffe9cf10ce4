# SPDX-License-Identifier: Apache-2.0
"""Batch size and steps of a budget: every row is what a plan of it has."""

import functools
import math

import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive.advice import budget

FACTS = dict(population_size=4096, target_epsilon=2.0, target_delta=1e-5)


@functools.lru_cache(maxsize=None)
def choices():
  return budget.batch_and_steps(examples=40_000, parameters=100, **FACTS)


def test_rows_are_plans_of_the_budget_and_larger_batches_have_less_noise():
  table = choices()
  assert [b.batch_size / a.batch_size for a, b in zip(table.rows, table.rows[1:])] == (
      [2] * (len(table.rows) - 1))
  for row in table.rows[::3]:
    assert row.batch_size * row.steps <= 40_000 < row.batch_size * (row.steps + 1)
    plan = tfdp.PrivacyPlan(
        population_size=4096, batch_size=row.batch_size, steps=row.steps, l2_norm_clip=1.0,
        noise_multiplier=row.noise_multiplier, target_delta=1e-5)
    assert 1.97 < plan.epsilon() <= 2.0
    assert row.step_noise == pytest.approx(100 * row.noise_multiplier / row.batch_size)
    assert row.sum_noise == pytest.approx(
        row.noise_multiplier * math.sqrt(row.steps) / row.batch_size)
  noises = [row.step_noise for row in table.rows]
  assert noises == sorted(noises, reverse=True)
  clear = [row for row in table.rows if row.step_noise < 1]
  assert table.best == clear[0] and 'more signal than noise' in str(table)


def test_without_a_clear_step_the_largest_batch_of_enough_steps_is_proposed():
  table = budget.batch_and_steps(examples=40_000, parameters=10**8, **FACTS)
  assert table.best == [row for row in table.rows if row.steps >= 100][-1]
  assert 'fewer than 100 steps' in str(table)
  small = budget.batch_and_steps(examples=40_000, parameters=10**8, largest_batch=20, **FACTS)
  assert small.best.batch_size == 16 == small.rows[-1].batch_size


def test_seconds_are_a_budget_too():
  table = budget.batch_and_steps(
      seconds=100.0, step_seconds=(0.1, 0.001), largest_batch=64, **FACTS)
  row = next(row for row in table.rows if row.batch_size == 64)
  assert row.steps == int(100 / (0.1 + 0.064))
  for wrong in ({}, dict(seconds=1.0), dict(examples=10.0, seconds=1.0), dict(examples=0.5)):
    with pytest.raises(ValueError, match='Received'):
      budget.batch_and_steps(**wrong, **FACTS)


@pytest.mark.parametrize('limits', [
    dict(examples=40_000), dict(examples=40_000, largest_batch=20),
    dict(seconds=100.0, step_seconds=(0.1, 0.001), largest_batch=64)])
def test_recommend_proposes_both(limits):
  found = tfdp.recommend(parameters=100, gradient_norm=1.0, **limits, **FACTS)
  table = budget.batch_and_steps(parameters=100, **limits, **FACTS)
  assert (found.plan.batch_size, found.plan.steps) == table.best[:2]
  assert 'Proposed: batch size' in str(found)
  for sizes in (dict(steps=3), dict(batch_size=4, steps=3)):
    with pytest.raises(ValueError, match='or neither and a budget'):
      tfdp.recommend(parameters=100, gradient_norm=1.0, **sizes, **limits, **FACTS)
