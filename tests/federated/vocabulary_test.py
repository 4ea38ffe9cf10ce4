# SPDX-License-Identifier: Apache-2.0
"""Words of one user alone stay in, words of many come out, and both are paid for."""

import dp_accounting
from dp_accounting import pld
import numpy as np
import pytest
import regression
from scipy import stats

import tfdp_adaptive as tfdp
from tfdp_adaptive.federated import vocabulary


def test_votes_have_norm_one_at_most():
  for words in ([], ['a'], ['a', 'b', 'a'], [str(i) for i in range(500)]):
    votes = vocabulary._votes(words, 100)
    assert np.linalg.norm([w for _, w in votes]) == pytest.approx(1.0 if words else 0.0)
  assert [word for word, _ in vocabulary._votes('b c a c b c'.split(), 2)] == ['c', 'b']


def test_a_lonely_word_comes_out_with_probability_delta_at_most():
  """And in the worst case, t words of one user, with nearly that."""
  delta, sigma, words = 0.2, 1.5, 6
  least = vocabulary.threshold(sigma, delta, words)
  exact = [1 - stats.norm.cdf((least - t**-0.5) / sigma)**t for t in range(1, words + 1)]
  assert max(exact) == pytest.approx(delta, rel=1e-9)
  worst = 1 + int(np.argmax(exact))
  users = {'only': [f'w{i}' for i in range(worst)]}
  released = [bool(vocabulary.private_vocabulary(
      users, 10, noise_multiplier=sigma, delta=delta, words_per_user=words, seed=seed).words)
              for seed in range(2000)]
  assert 0.17 < np.mean(released) < 0.23


def test_frequent_words_come_out_in_order():
  users = {i: ['the'] + (['cat'] if i % 2 else []) + [f'secret{i}'] for i in range(400)}
  released = vocabulary.private_vocabulary(
      users, 5, noise_multiplier=1.0, delta=1e-6, words_per_user=3, seed=0)
  assert released.words == ('the', 'cat')
  assert vocabulary.private_vocabulary(
      users, 1, noise_multiplier=1.0, delta=1e-6, words_per_user=3, seed=0).words == ('the',)


def test_without_a_seed_the_noise_is_new():
  users = {i: [f'w{j}' for j in range(40)] for i in range(8)}
  draws = {vocabulary.private_vocabulary(users, 40, noise_multiplier=1.0, delta=0.5).words
           for _ in range(5)}
  assert len(draws) == 5


def test_epsilon_is_that_of_both_together():
  plan = regression.make_plan(noise_multiplier=2.0, target_delta=1e-3)
  released = vocabulary.PrivateVocabulary(('a',), 3.0, 4e-4)
  accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
  accountant.compose(dp_accounting.GaussianDpEvent(3.0))
  accountant.compose(dp_accounting.PoissonSampledDpEvent(
      0.5, dp_accounting.GaussianDpEvent(2.0)), 7)
  assert released.epsilon(plan, 7) == pytest.approx(accountant.get_epsilon(6e-4), rel=0.01)
  assert released.epsilon(plan, 7) > plan.epsilon(7)


def test_refusals():
  plan = regression.make_plan()
  with pytest.raises(ValueError, match='below the target delta'):
    vocabulary.PrivateVocabulary((), 1.0, 1e-3).epsilon(plan)
  with pytest.raises(ValueError, match='add_remove or zero_out'):
    vocabulary.PrivateVocabulary((), 1.0, 1e-4).epsilon(regression.make_plan(
        adjacency='replace', sampling=tfdp.sampling.FixedOrder()))
  with pytest.raises(ValueError, match='`noise_multiplier` must be positive'):
    vocabulary.private_vocabulary({}, 1, noise_multiplier=0.0, delta=0.1)
