# SPDX-License-Identifier: Apache-2.0
"""Whole users or their examples: by noise over signal, at one epsilon."""

import math

import numpy as np
import pytest

from tfdp_adaptive import compat
from tfdp_adaptive.advice import recommend
from tfdp_adaptive.advice import user_level

FACTS = dict(population_size=500, batch_size=25, steps=40, target_epsilon=2.0, target_delta=1e-4)


def noise_over_signal(plan, gradients, per_user):
  """Of the mean of a step whose users have these gradients, [users, m, d], clipped to a norm."""
  records = gradients.mean(axis=1) if per_user else gradients.reshape(-1, gradients.shape[-1])
  clip = np.linalg.norm(records, axis=1).mean()
  return plan.noise_multiplier * clip / plan.batch_size / np.linalg.norm(records.mean(axis=0))


@pytest.mark.parametrize('likeness', [0.02, 0.95])
def test_the_comparison_is_that_of_gradients_with_this_cosine(likeness):
  found = user_level.compare(examples_per_user=4, likeness=likeness, **FACTS)
  assert found.users.epsilon() <= 2.0 and found.examples.epsilon() <= 2.0
  rng, d = np.random.default_rng(1), 4000
  own = rng.normal(size=(200, 1, d)) * math.sqrt(likeness)
  gradients = own + rng.normal(size=(200, 4, d)) * math.sqrt(1 - likeness) + 0.02
  by_users = noise_over_signal(found.users, gradients, True)
  by_examples = noise_over_signal(found.examples, gradients, False)
  assert (by_examples < by_users) == (likeness > found.even)
  assert ('PoissonExamples, has less' in found.reason) == (by_examples < by_users)
  even = found.even + (1 - found.even) / 4
  assert found.users.noise_multiplier * math.sqrt(even) == pytest.approx(
      found.examples.noise_multiplier / 4)


def test_users_of_one_example_need_the_same_noise():
  found = user_level.compare(examples_per_user=1, **FACTS)
  assert found.users.noise_multiplier == pytest.approx(found.examples.noise_multiplier, rel=2e-3)
  with pytest.raises(ValueError, match='Received: likeness=2'):
    user_level.compare(examples_per_user=2, likeness=2, **FACTS)


def test_a_recommendation_says_which_of_the_two_suits():
  model = compat.keras.Sequential([
      compat.keras.layers.Input([9]), compat.keras.layers.Dense(10)])
  found = recommend.recommend(
      model, loss='mse', gradient_norm=1.0, unit='user', examples_per_user=4, verbose=0, **FACTS)
  assert any('mean cosine between the gradients of one user is above' in reason
             for reason in found.reasons)
