# SPDX-License-Identifier: Apache-2.0
"""What TFF's engine alone has: models of its own, queries in its own processes."""

import os
import signal

import numpy as np
from processes_test import run
import pytest
import regression
import tensorflow as tf
import tensorflow_federated as tff

import tfdp_adaptive as tfdp
from tfdp_adaptive import queries
from tfdp_adaptive import rules
from tfdp_adaptive.federated import tff_process
from tfdp_adaptive.federated import workers as workers_lib

pytestmark = pytest.mark.usefixtures('worker')


def test_the_query_works_in_tffs_own_factory():
  """Whoever composes processes from TFF's parts gets the same weights from `RuleQuery`."""
  examples, plan, rule = regression.make_users(), regression.make_plan(), rules.dp_adam()
  query = queries.RuleQuery(rule, [tf.TensorSpec([3, 1]), tf.TensorSpec([1])], plan=plan,
                            seed=regression.SEED)
  process = tff.learning.algorithms.build_unweighted_fed_avg(
      regression.tff_model_fn, tff.learning.optimizers.build_sgdm(regression.CLIENT_RATE),
      tff.learning.optimizers.build_sgdm(0.5), model_aggregator=(
          tff.aggregators.DifferentiallyPrivateFactory(query)))
  np.testing.assert_allclose(
      run(process, examples), run(regression.build(rule, plan, 'tff'), examples), rtol=1e-5,
      atol=1e-6)


def test_a_functional_model_gives_the_same_weights():
  examples = regression.make_users()
  plan = regression.make_plan()
  keras = lambda: tf.keras.Sequential([
      tf.keras.layers.InputLayer((3,)), tf.keras.layers.Dense(1, kernel_initializer='zeros')])
  functional = tff.learning.models.functional_model_from_keras(
      keras, tf.keras.losses.MeanSquaredError(), regression.SPEC)
  process = tfdp.federated.build_private_fed_avg(
      functional, server_rule=rules.dp_adam(), plan=plan, server_learning_rate=0.5,
      seed=regression.SEED, client_optimizer_fn=lambda: tff.learning.optimizers.build_sgdm(
          regression.CLIENT_RATE))
  np.testing.assert_allclose(
      run(process, examples), run(regression.build(rules.dp_adam(), plan, 'tff'), examples),
      rtol=1e-5, atol=1e-6)


def test_models_made_before_go_on_working():
  """TFF makes models in graphs, for which Keras changes the classes of all others."""
  class Mine(tf.keras.Model):

    def __init__(self):
      super().__init__()
      self.dense = tf.keras.layers.Dense(1)

    def call(self, x):
      return self.dense(x)

  models = [tf.keras.Sequential([tf.keras.layers.Dense(1)]), Mine()]
  process = regression.build(rules.dp_sgd(), regression.make_plan(), 'tff')
  assert [model(np.ones([2, 3])).shape for model in models] == [(2, 1), (2, 1)]
  assert process.in_groups() is not None
  for model in models:
    model.compile('sgd', 'mse')
    model.fit(np.ones([2, 3]), np.ones([2, 1]), verbose=0)


def test_calls_of_few_sizes_have_every_client_once():
  sizes = set()
  for count in range(300):
    calls = tff_process._split(list(range(count)))
    assert sum(calls, []) == list(range(count)) and all(calls)
    assert len(calls) <= 1 + -(-count // tff_process.CLIENTS_PER_CALL)
    sizes.update(map(len, calls))
  assert max(sizes) == tff_process.CLIENTS_PER_CALL and len(sizes) <= workers_lib._EXECUTORS


def test_two_remote_workers_and_one_of_them_killed(tmp_path, monkeypatch):
  """Over addresses, as on other machines: a clear error, and a run to go on with."""
  monkeypatch.setattr(workers_lib, '_ANSWER_SECONDS', 3)
  process = regression.build(rules.dp_adam(), regression.make_plan(), 'tff', exact_metrics=True)
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  with workers_lib.Workers(count=2) as first, workers_lib.Workers() as third:
    addresses = first.addresses
    result = tfdp.federated.simulate(
        process, users, rounds=2, out=tmp_path, workers=addresses, progress=False)
    assert result.rounds == 2
    assert {name for row in result.history for name in row} == {
        'round', 'not_private/loss', 'not_private/num_examples', 'not_private/num_batches'}
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
