# SPDX-License-Identifier: Apache-2.0
"""The queries inside TensorFlow Federated: same numbers, fresh keys, states that travel."""

import collections

import noise_oracle as oracle
import numpy as np
import pytest

from tfdp_adaptive import queries
from tfdp_adaptive.noise import keys

tff = pytest.importorskip('tensorflow_federated')
tf = pytest.importorskip('tensorflow')
tfp = pytest.importorskip('tensorflow_privacy')
pytestmark = pytest.mark.federated

CLIP, SIGMA, SEED, ROUNDS, CLIENTS = 1.0, 0.5, 31, 4, 2.0
SPECS = collections.OrderedDict(kernel=tf.TensorSpec([2, 3]), bias=tf.TensorSpec([2]))


def process(query):
  factory = tff.aggregators.DifferentiallyPrivateFactory(
      tfp.NormalizedQuery(query, denominator=CLIENTS))
  return factory.create(tff.to_type(collections.OrderedDict(
      (name, tff.TensorType(spec.dtype.as_numpy_dtype, tuple(spec.shape)))
      for name, spec in SPECS.items())))


def values():
  rng = np.random.default_rng(1)
  return [[tf.nest.map_structure(
      lambda spec: rng.normal(size=spec.shape).astype(np.float32), SPECS)
           for _ in range(1 + t % 2)] for t in range(ROUNDS)]


def run(aggregation):
  state, results = aggregation.initialize(), []
  for clients in values():
    output = aggregation.next(state, clients)
    state = output.state
    results.append(oracle.flat(output.result))
  return np.stack(results), output


def clipped_means():
  result = np.zeros((ROUNDS, 8))
  for t, clients in enumerate(values()):
    for value in clients:
      v = oracle.flat(value)
      result[t] += v * min(1, CLIP / np.linalg.norm(v)) / CLIENTS
  return result


@pytest.mark.thorough(but=['tree', 'independent', 'toeplitz', 'blt'])
@pytest.mark.parametrize('name', oracle.MECHANISMS)
def test_rounds_are_means_plus_rows(name):
  mechanism = oracle.MECHANISMS[name]
  results, output = run(process(
      queries.MechanismSumQuery(SPECS, mechanism, CLIP, SIGMA, seed=SEED)))
  noise = oracle.rows(mechanism, oracle.row_keys(SEED, ROUNDS), SPECS)
  np.testing.assert_allclose(
      results, clipped_means() + SIGMA * CLIP / CLIENTS * noise, atol=1e-5)
  np.testing.assert_array_equal(output.state.query_state.numerator_state.noise.row, ROUNDS)
  assert output.measurements['dp_query_metrics'] == {'l2_norm_clip': CLIP}


def test_every_initialize_draws_its_own_key():
  aggregation = process(queries.MechanismSumQuery(SPECS, oracle.MECHANISMS['blt'], CLIP, SIGMA))
  drawn = [aggregation.initialize().query_state.numerator_state.noise.key for _ in range(4)]
  draw = tff.tensorflow.computation(lambda: (keys.from_system(), keys.from_system()))
  drawn += [key for _ in range(3) for key in draw()]
  assert len({tuple(np.asarray(key)) for key in drawn}) == len(drawn)
  # And so two runs of one process have nothing in common.
  first, second = run(aggregation)[0], run(aggregation)[0]
  assert len(np.unique(np.abs([first, second]))) == first.size + second.size


def test_after_the_last_step_a_round_fails():
  aggregation = process(queries.MechanismSumQuery(
      SPECS, type(oracle.MECHANISMS['blt'])(1, 2), CLIP, SIGMA))
  state = aggregation.initialize()
  for _ in range(2):
    state = aggregation.next(state, values()[0]).state
  with pytest.raises(Exception, match='cover 2 steps'):
    aggregation.next(state, values()[0])


def test_restarts_run_in_tff():
  query = tfp.RestartQuery(
      queries.MechanismSumQuery(SPECS, oracle.MECHANISMS['tree'], CLIP, SIGMA, seed=SEED),
      tfp.restart_query.PeriodicRoundRestartIndicator(2))
  results, output = run(process(query))
  state = output.state.query_state.numerator_state
  assert state.inner_query_state.noise.row == 0  # Just restarted, for the second time.
  assert np.all(np.isfinite(results))
