# SPDX-License-Identifier: Apache-2.0
"""Clients of a round: in any number of calls, on any number of workers, failing alone."""

import os
import signal

import numpy as np
import pytest
import regression
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.federated import rounds
from tfdp_adaptive.federated import workers as workers_lib

COHORT = [f'user{i}' for i in (0, 1, 2, 3, 5)]


class Flaky:
  """Users some of whom cannot be read, or have data that breaks the model."""

  def __init__(self, unreadable=(), broken=()):
    self._users = tfdp.federated.Users(regression.make_users(), batch_size=4)
    self._unreadable, self._broken = unreadable, broken
    self.client_ids = self._users.client_ids

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
def process():
  return regression.build(rules.dp_adam(), regression.make_plan(), exact_metrics=True)


def total(process, workers, users, cohort=None, **kwargs):
  state = tf.nest.map_structure(tf.constant, process.initialize())
  outcome = rounds.run(process, workers, state, COHORT if cohort is None else cohort, users,
                       **kwargs)
  return np.concatenate([np.ravel(x) for x in tf.nest.flatten(outcome.answers)]), outcome


def test_calls_and_workers_do_not_change_the_sum(process, worker, monkeypatch):
  users = Flaky()
  expected, outcome = total(process, worker, users)
  direct = sum(
      np.minimum(1, 0.2 / max(np.linalg.norm(d), 1e-30)) * d
      for d in (regression.delta(np.zeros(4), regression.make_users()[c]) for c in COHORT))
  np.testing.assert_allclose(expected, direct, rtol=1e-4)
  assert not outcome.failed
  monkeypatch.setattr(rounds, 'CLIENTS_IN_GROUPS', 2)
  calls, outcome = total(process, worker, users)
  np.testing.assert_allclose(calls, expected, rtol=1e-5)
  assert [count for count, _ in outcome.not_private] == [2, 2, 1]
  with tfdp.federated.Workers(count=2) as two:
    np.testing.assert_allclose(total(process, two, users)[0], expected, rtol=1e-5)
    alone, _ = total(process, two, users, COHORT[:1])
    nobody, outcome = total(process, two, users, [])
  assert np.any(alone != 0) and not np.any(nobody) and not outcome.not_private


def test_calls_of_few_sizes_have_every_client_once():
  sizes = set()
  for count in range(300):
    calls = rounds._split(list(range(count)))
    assert sum(calls, []) == list(range(count)) and all(calls)
    assert len(calls) <= 1 + -(-count // rounds.CLIENTS_PER_CALL)
    sizes.update(map(len, calls))
  assert max(sizes) == rounds.CLIENTS_PER_CALL and len(sizes) <= workers_lib._EXECUTORS


@pytest.mark.pitfall(
    'One client\'s data stop a round.',
    severity='high', stops='it counts as absent')
def test_a_failing_client_counts_as_absent_and_takes_nobody_along(process, worker):
  """Else one user's data would move more than its own clip norm."""
  rest = [c for c in COHORT if c not in ('user2', 'user3')]
  expected, _ = total(process, worker, Flaky(), rest)
  actual, outcome = total(process, worker, Flaky(unreadable=['user2'], broken=['user3']))
  np.testing.assert_allclose(actual, expected, rtol=1e-5)
  assert sorted(outcome.failed) == ['user2', 'user3']


@pytest.mark.pitfall(
    'A cohort made by hand has a client twice.',
    severity='critical', stops='ValueError')
def test_a_client_is_in_a_cohort_once(process, worker):
  with pytest.raises(ValueError, match='once at most'):
    total(process, worker, Flaky(), COHORT + COHORT[:1])


def test_when_all_clients_fail_the_data_are_at_fault(process, worker):
  users = Flaky(unreadable=COHORT)
  with pytest.raises(rounds.ClientsFailedError, match='All 5 clients .* gone offline'):
    total(process, worker, users)
  assert not np.any(total(process, worker, users, check_all_failed=False)[0])


def test_two_remote_workers_and_one_of_them_killed(process, tmp_path, monkeypatch):
  """Over addresses, as on other machines: a clear error, and a run to go on with."""
  monkeypatch.setattr(workers_lib, '_ANSWER_SECONDS', 3)
  users = Flaky()
  with workers_lib.Workers(count=2) as first, workers_lib.Workers() as third:
    addresses = first.addresses
    result = tfdp.federated.simulate(
        process, users, rounds=2, out=tmp_path, workers=addresses, progress=False)
    assert result.rounds == 2
    assert {name for row in result.history for name in row} == {
        'round', 'not_private/seconds', 'not_private/loss', 'not_private/num_examples',
        'not_private/num_batches'}
    os.kill(first.processes[1].pid, signal.SIGKILL)
    with pytest.raises(tfdp.federated.WorkerLostError, match=addresses[1]):
      tfdp.federated.simulate(
          process, users, rounds=3, out=tmp_path, workers=addresses, progress=False)
    with workers_lib.Workers([addresses[0], third.addresses[0]]) as healed:
      resumed = tfdp.federated.simulate(
          process, users, rounds=3, out=tmp_path, workers=healed, progress=False)
      assert healed.contexts  # They are the caller's.
  assert resumed.rounds == 3 and len(resumed.history) == 3
  straight = tfdp.federated.simulate(process, users, rounds=3, progress=False)
  np.testing.assert_allclose(
      regression.flat(resumed.weights), regression.flat(straight.weights), rtol=1e-4)
