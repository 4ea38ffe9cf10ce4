# SPDX-License-Identifier: Apache-2.0
"""What TFF's engine alone has: models of its own, queries in its own processes."""

import pathlib
import subprocess
import sys

import numpy as np
from processes_test import run
import pytest
import regression
import tensorflow as tf
import tensorflow_federated as tff

import tfdp_adaptive as tfdp
from tfdp_adaptive import queries
from tfdp_adaptive import rules
from tfdp_adaptive.federated import engines


@pytest.mark.thorough
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


@pytest.mark.thorough
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
  regression.build(rules.dp_sgd(), regression.make_plan(), 'tff')
  assert [model(np.ones([2, 3])).shape for model in models] == [(2, 1), (2, 1)]
  for model in models:
    model.compile('sgd', 'mse')
    model.fit(np.ones([2, 3]), np.ones([2, 1]), verbose=0)


@pytest.mark.thorough
def test_whoever_reads_the_output_sees_its_end():
  """TFF's worker has the output of Python, which must not wait for it."""
  script = ('import numpy as np\nimport tensorflow_federated as tff\n'
            'from tfdp_adaptive.federated import tff_process\n'
            'assert tff.tensorflow.computation(lambda x: x + 1, np.int32)(1) == 2\n'
            'print("done")\n')
  done = subprocess.run([sys.executable, '-c', script], stdin=subprocess.DEVNULL, check=True,
                        cwd=pathlib.Path(__file__).parents[2], capture_output=True, text=True,
                        timeout=300)
  assert done.stdout == 'done\n'


def test_workers_of_tff_elsewhere_are_refused():
  process = regression.build(rules.dp_sgd(), regression.make_plan(), 'tff')
  for workers, what in ((['host:80'], '`workers` must be a number'),
                        (engines.Remote(), "`workers='ray'` is for Keras models")):
    with pytest.raises(ValueError, match=what):
      with process.reach(workers, None):
        pass
