# SPDX-License-Identifier: Apache-2.0
"""Which examples stand for a user: the user's own, at most so many, each once."""

import types

import numpy as np
import pytest

from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.batches import sources
from tfdp_adaptive.batches import users
from tfdp_adaptive.privacy import plan as plan_lib

COUNTS = (1, 7, 3, 4)
IDS = np.random.default_rng(0).permutation(np.repeat(['ann', 'bo', 'cy', 'di'], COUNTS))
N = len(IDS)


def coins(seed):
  return sampling_seed.SamplingSeed(types.SimpleNamespace(seed=seed))


def of(record='mean', most=4, ids=IDS):
  return users.Users(sources.of((np.arange(N), np.arange(N) * 2)), ids, most, record)


@pytest.mark.parametrize('ids', [IDS, np.unique(IDS, return_inverse=True)[1], IDS.astype(object)],
                         ids=['strings', 'integers', 'objects'])
def test_a_user_is_some_of_their_own_examples(ids):
  own = of(ids=ids)
  assert len(own) == 4
  seen = [set() for _ in COUNTS]
  for step in range(30):
    (x, y), weights = own.take(np.array([2, 0, 1, 3]), step, coins(0))
    np.testing.assert_array_equal(y, 2 * x)
    for row, user in enumerate([2, 0, 1, 3]):
      there = weights[row] > 0
      assert there.sum() == min(4, COUNTS[user]) == len(set(x[row, there]))
      np.testing.assert_allclose(weights[row, there], 1 / there.sum())
      assert set(IDS[x[row]]) == {'ann bo cy di'.split()[user]}  # Padding, too.
      seen[user] |= set(x[row])
  assert [len(one) for one in seen] == list(COUNTS)  # In time, all of them.


def test_a_sum_weighs_every_example_alike():
  _, weights = of('sum').take(np.arange(4), 0, coins(0))
  np.testing.assert_array_equal(weights, np.arange(4) < np.minimum(4, COUNTS)[:, np.newaxis])


def test_examples_are_drawn_anew_but_for_a_seed_in_tests():
  draw = lambda step, seed=0: of().take(np.array([1]), step, coins(seed))[0][0].tolist()
  assert draw(3) == draw(3)
  draws = [str(draw(3, None)) for _ in range(8)] + [str(draw(step)) for step in range(8)]
  assert len(set(draws)) > 8


def test_batches_are_users_and_padding_has_no_weight():
  plan = plan_lib.PrivacyPlan(
      population_size=4, batch_size=2, steps=20, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-3, unit='user', seed=1)
  x = np.arange(1, N + 1, dtype=np.float32)[:, np.newaxis]
  data = plan.batches(
      (x, np.arange(N), np.full(N, 0.5)), users=IDS, examples_per_user=3, record='sum')
  assert data.element_spec[0].shape[1:] == (3, 1)
  for (a, _, weight), drawn in zip(data.as_numpy_iterator(), plan.index_batches()):
    n = len(drawn)
    assert set(np.unique(weight.astype(np.float32))) <= {0, 0.5} and not weight[n:].any()
    assert not a[n:].any() and a[:n].all()
    np.testing.assert_array_equal((weight[:n] > 0).sum(1), np.minimum(3, np.array(COUNTS)[drawn]))


@pytest.mark.parametrize('arguments, message', [
    (dict(ids=IDS[1:]), 'the id of its user'), (dict(ids=np.linspace(0, 1, N)), 'the id of its'),
    (dict(ids=np.array([None] * N)), r"all of one kind. Received: ids of \['NoneType'\]"),
    (dict(ids=np.array(['ann'] + [3] * (N - 1), object)), r"Received: ids of \['int', 'str'\]"),
    (dict(most=0), '`examples_per_user` must be'), (dict(record='first'), '`record` must be')])
def test_refusals(arguments, message):
  with pytest.raises(ValueError, match=message):
    of(**arguments)


def test_what_is_taken_of_a_user_depends_on_no_other_user():
  ids = np.repeat(np.arange(4), 6)
  records = users.Users(sources.of(np.arange(24.0)), ids, 2)
  together, _ = records.take(np.array([0, 1, 2, 3]), 5, coins(3))
  for user in range(4):
    alone, _ = records.take(np.array([user]), 5, coins(3))
    np.testing.assert_array_equal(alone[0], together[user])
