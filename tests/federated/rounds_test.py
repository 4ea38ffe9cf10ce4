# SPDX-License-Identifier: Apache-2.0
"""Clients of a round: in any number of calls, on any number of workers, failing alone."""


import numpy as np
import pytest
import regression
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.federated import groups
from tfdp_adaptive.federated import rounds

COHORT = [f'user{i}' for i in (0, 1, 2, 3, 5)]


class Flaky:
  """Users some of whom cannot be read, or have data that breaks the model."""

  def __init__(self, unreadable=(), broken=()):
    self._users = tfdp.federated.Users(regression.make_users(), batch_size=4)
    self._unreadable, self._broken = unreadable, broken
    self.client_ids = self._users.client_ids
    self.element_type_structure = self._users.element_type_structure

  def create_tf_dataset_for_client(self, client_id):
    if client_id in self._unreadable:
      raise OSError('The device has gone offline.')
    dataset = self._users.create_tf_dataset_for_client(client_id)
    if client_id not in self._broken:
      return dataset
    def fail(batch):
      with tf.control_dependencies([tf.debugging.assert_less(batch['x'], -1e9)]):
        return {'x': tf.identity(batch['x']), 'y': batch['y']}
    return dataset.map(fail)


@pytest.fixture(scope='module')
def process(engine):
  return regression.build(rules.dp_adam(), regression.make_plan(), engine)


def total(process, users, cohort=None, workers=1, **kwargs):
  state = tf.nest.map_structure(tf.constant, process.initialize())
  with process.reach(workers, users) as engine:
    outcome = rounds.run(process, engine, state, COHORT if cohort is None else cohort, **kwargs)
  return np.concatenate([np.ravel(x) for x in tf.nest.flatten(outcome.answers)]), outcome


@pytest.mark.thorough(rows=['tff'])
def test_calls_and_workers_do_not_change_the_sum(process, monkeypatch):
  users = Flaky()
  expected, outcome = total(process, users)
  direct = sum(
      np.minimum(1, 0.2 / max(np.linalg.norm(d), 1e-30)) * d
      for d in (regression.delta(np.zeros(4), regression.make_users()[c]) for c in COHORT))
  np.testing.assert_allclose(expected, direct, rtol=1e-4)
  assert not outcome.failed
  monkeypatch.setattr(groups, 'CLIENTS', 2)
  sizes, own = [], groups.calls

  def seen(*args, **kwargs):
    for call in own(*args, **kwargs):
      sizes.append(len(call))
      yield call

  monkeypatch.setattr(groups, 'calls', seen)
  np.testing.assert_allclose(total(process, users)[0], expected, rtol=1e-5)
  assert sizes == [2, 2, 1]
  np.testing.assert_allclose(total(process, users, workers=2)[0], expected, rtol=1e-5)
  alone, _ = total(process, users, COHORT[:1], workers=2)
  nobody, _ = total(process, users, [], workers=2)
  assert np.any(alone != 0) and not np.any(nobody)


@pytest.mark.pitfall(
    "One client's data stop a round.",
    severity='high', stops='the client counts as absent')
def test_a_failing_client_counts_as_absent_and_takes_nobody_along(process):
  """Else one user's data would move more than its own clip norm."""
  rest = [c for c in COHORT if c not in ('user2', 'user3')]
  expected, _ = total(process, Flaky(), rest)
  actual, outcome = total(process, Flaky(unreadable=['user2'], broken=['user3']))
  np.testing.assert_allclose(actual, expected, rtol=1e-5)
  assert sorted(outcome.failed) == ['user2', 'user3']


@pytest.mark.pitfall(
    'A cohort made by hand has a client twice.',
    severity='critical', stops='ValueError')
def test_a_client_is_in_a_cohort_once(process):
  with pytest.raises(ValueError, match='once at most'):
    total(process, Flaky(), COHORT + COHORT[:1])


def test_when_all_clients_fail_the_data_are_at_fault(process):
  users = Flaky(unreadable=COHORT)
  with pytest.raises(rounds.ClientsFailedError, match='All clients .* gone offline'):
    total(process, users)
  assert not np.any(total(process, users, check_all_failed=False)[0])


