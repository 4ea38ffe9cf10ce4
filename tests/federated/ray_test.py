# SPDX-License-Identifier: Apache-2.0
"""Actors of Ray: rounds equal to those in process; actors, clients and machines that are lost."""

import json
import os
import pathlib
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import nursery
import pytest
import regression
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import noise
from tfdp_adaptive import rules
from tfdp_adaptive.federated import rounds

ray = pytest.importorskip('ray', reason='needs Ray, which this environment does not have')

from tfdp_adaptive.federated import ray_engine  # noqa: E402

HERE = pathlib.Path(__file__).parent


NODE = dict(num_cpus=1, object_store_memory=100 * 2**20)
# Ray stays on this machine: it writes no token into the home, and reports nothing to its makers.
# Ray's workers have a niceness of 15 by default, and starve on a busy machine. There, a node also
# needs longer to answer whether it is alive, and a worker to start, than Ray waits by default.
ENVIRONMENT = dict(TF_CPP_MIN_LOG_LEVEL='3', RAY_AUTH_MODE='disabled',
                   RAY_USAGE_STATS_ENABLED='0', RAY_worker_niceness='0',
                   RAY_health_check_timeout_ms='60000', RAY_worker_register_timeout_seconds='300')


@pytest.fixture(name='cluster', scope='module')
def _cluster():
  """Two nodes on this machine; processes of Ray find the modules of the tests."""
  from ray import cluster_utils  # pylint: disable=import-outside-toplevel
  before = dict(os.environ)
  path = os.pathsep.join([str(HERE), str(HERE.parent), before.get('PYTHONPATH', '')])
  os.environ.update(ENVIRONMENT, PYTHONPATH=path)
  nodes = cluster_utils.Cluster(
      initialize_head=True, head_node_args=dict(NODE, include_dashboard=False))
  try:
    nodes.add_node(**NODE)
    ray.init(address=nodes.address, log_to_driver=False)
    where = lambda: ray.get_runtime_context().get_node_id()
    for node in ray.nodes():  # A node that has run nothing yet is passed over at times.
      there = ray_engine.scheduling_strategies.NodeAffinitySchedulingStrategy(
          node['NodeID'], soft=False)
      ray.get(ray.remote(num_cpus=0)(where).options(scheduling_strategy=there).remote())
    yield nodes
  finally:
    ray.shutdown()
    nodes.shutdown()
    os.environ.clear()
    os.environ.update(before)


def build(plan=None, rule=None, **kwargs):
  return regression.build(rule or rules.dp_adam(), plan or regression.make_plan(), **kwargs)


def users(count=6):
  return tfdp.federated.Users(regression.make_users(count), batch_size=4)


def simulate(process, data=None, workers='ray', **kwargs):
  return tfdp.federated.simulate(
      process, data or users(), workers=workers, progress=False, **{'rounds': 3, **kwargs})


def test_rounds_are_those_in_process(cluster, monkeypatch):
  """One actor is on each of the two nodes."""
  make = lambda: build(
      rule=rules.scale_then_privatize(scale_epsilon=1e-2),
      metrics=[tf.keras.metrics.MeanAbsoluteError()],
      quantile_clip=tfdp.federated.QuantileClip(),
      private_metrics=tfdp.federated.PrivateMetrics({'loss': (0.0, 50.0)}))
  here = simulate(make(), workers=2)
  original = rounds.run

  def spy(process, engine, *args, **kwargs):
    where = lambda self: ray.get_runtime_context().get_node_id()
    places = ray.get([worker.args[1].__ray_call__.remote(where) for worker in engine.workers])
    assert sorted(places) == sorted(node['NodeID'] for node in ray.nodes())
    return original(process, engine, *args, **kwargs)

  monkeypatch.setattr(rounds, 'run', spy)
  there = simulate(make(), workers='ray:2', address=cluster.address)
  np.testing.assert_allclose(
      regression.flat(there.weights), regression.flat(here.weights), rtol=1e-5, atol=1e-6)
  assert there.statement == here.statement
  for mine, theirs in zip(here.history, there.history):
    assert theirs == pytest.approx(mine, rel=1e-4) and 'private/loss' in theirs
  with pytest.raises(ValueError, match='`address` must be the cluster that this process is'):
    simulate(make(), workers='ray:2', address='127.0.0.1:1')


@pytest.mark.pitfall(
    'A machine of a Ray cluster is lost in a run.',
    severity='high', stops='its actors restart elsewhere with the same clients in the same round')
def test_a_machine_that_is_lost(cluster):
  lost = cluster.add_node(**NODE)
  gone = []

  def lose(weights):
    del weights
    if not gone:
      cluster.remove_node(lost, allow_graceful=False)
      gone.append(lost)
    return {}

  plan = everyone()
  result = simulate(build(plan), workers='ray:3', evaluate=lose, rounds_per_evaluation=1)
  expected = simulate(build(plan), workers=1)
  assert gone and not result.failed and result.rounds == 3
  np.testing.assert_allclose(
      regression.flat(result.weights), regression.flat(expected.weights), rtol=1e-5, atol=1e-6)


class Odd(tfdp.federated.Users):
  """Clients that cannot be read, and one that ends the process that reads it, so many times."""

  def __init__(self, *args, unreadable=(), deadly=None, ledger=None, **kwargs):
    super().__init__(*args, **kwargs)
    self.unreadable, self.deadly, self.ledger = unreadable, deadly or {}, str(ledger)

  def batches(self, client):
    if client in self.unreadable:
      raise OSError('gone offline')
    died = pathlib.Path(f'{self.ledger}.{client}')
    times = len(died.read_text()) if died.exists() else 0
    if times < self.deadly.get(client, 0):
      died.write_text('x' * (times + 1))
      os.kill(os.getpid(), signal.SIGKILL)
    return super().batches(client)


def everyone(**kwargs):
  return regression.make_plan(**{'batch_size': 6, 'sampling': tfdp.sampling.Poisson(
      sampling_probability=1), **kwargs})


@pytest.mark.pitfall(
    'An actor of Ray is lost in a round, or a client ends every process that reads it.',
    severity='critical',
    stops='another actor trains its clients in the same round; a client that ends every process '
          'counts as absent')
def test_clients_and_actors_that_are_lost(cluster, tmp_path):
  plan = everyone(population_size=4, batch_size=4)
  odd = Odd(regression.make_users(4), batch_size=4, unreadable=['user2'],
            deadly={'user3': 100, 'user0': 1}, ledger=tmp_path / 'died')
  result = simulate(build(plan), odd, workers='ray:2', rounds=1)
  assert sorted(result.failed) == ['user2', 'user3']
  assert (tmp_path / 'died.user0').exists()
  rest = Odd(regression.make_users(4), batch_size=4, unreadable=['user2', 'user3'],
             ledger=tmp_path / 'none')
  expected = simulate(build(plan), rest, workers=1, rounds=1)
  np.testing.assert_allclose(regression.flat(result.weights), regression.flat(expected.weights),
                             rtol=1e-5)
  nobody = Odd(regression.make_users(4), batch_size=4, unreadable=list(regression.make_users(4)))
  with pytest.raises(rounds.ClientsFailedError, match='All clients .* gone offline'):
    simulate(build(plan), nobody, workers='ray:1', rounds=1)


def noise_keys(tree):
  if isinstance(tree, noise.State):
    return [(*np.asarray(tree.key).tolist(), int(tree.row))]
  return [key for child in tree for key in noise_keys(child)] if isinstance(tree, tuple) else []


class Dying(tfdp.federated.Users):
  """Clients one of whom, another in every round, ends the process that reads it, once."""

  def __init__(self, *args, folder, **kwargs):
    super().__init__(*args, **kwargs)
    self.folder = folder

  def batches(self, client):
    number = max(map(int, os.listdir(self.folder)), default=0)
    died = self.folder / str(number) / 'died'
    if number and client == f'user{number % 6}' and not died.exists():
      died.touch()
      os.kill(os.getpid(), signal.SIGKILL)
    return super().batches(client)


def test_a_run_with_kills_reuses_no_noise_and_goes_on_in_process(cluster, tmp_path, monkeypatch):
  kills = int(os.environ.get('TFDP_KILLS', 2))
  steps, used, original = kills + 1, [], rounds.run
  folder = tmp_path / 'rounds'
  folder.mkdir()

  def spy(process, engine, state, cohort, *args, **kwargs):
    used.extend((key, tuple(cohort)) for key in noise_keys(state))
    (folder / str(int(state.round) + 1)).mkdir()
    return original(process, engine, state, cohort, *args, **kwargs)

  monkeypatch.setattr(rounds, 'run', spy)
  plan = everyone(steps=steps)
  half = simulate(build(plan, seed=None), Dying(
      regression.make_users(), batch_size=4, folder=folder), workers='ray:1', rounds=kills,
                  out=tmp_path / 'run')
  whole = simulate(build(plan, seed=None), users(), workers=1, rounds=steps,
                   out=tmp_path / 'run')
  assert half.rounds == kills and whole.rounds == steps and not whole.failed
  assert [row['round'] for row in whole.history] == [*range(1, steps + 1)]
  assert len({key for key, _ in used}) == len(used) == steps
  assert len(list(folder.glob('*/died'))) == kills
  nursery.tally('ray', kills=kills, rounds=steps, noise_rows=len(used))


DRIVER = """
import json, os, sys
root, address, out, rounds_wanted = sys.argv[1:]
sys.path[:0] = [root, root + '/tests', root + '/tests/federated']
import tfdp_adaptive as tfdp
import regression, ray_test
from tfdp_adaptive import rules
from tfdp_adaptive.federated import rounds
original = rounds.run

def spy(process, engine, state, cohort, *args, **kwargs):
  with open(out + '.used', 'a', encoding='utf-8') as file:
    print(json.dumps([int(state.round), ray_test.noise_keys(state)]), file=file)
  return original(process, engine, state, cohort, *args, **kwargs)

rounds.run = spy
result = tfdp.federated.simulate(
    ray_test.build(regression.make_plan(steps=int(rounds_wanted), seed=None), seed=None),
    ray_test.users(), workers='ray:1', address=address, out=out, progress=False)
assert [row['round'] for row in result.history] == [*range(1, int(rounds_wanted) + 1)]
assert result.rounds == int(rounds_wanted) and not result.failed
"""


def test_a_driver_that_is_killed_goes_on_from_its_folder(cluster, tmp_path):
  """Killed at any moment of a round or between two; its actors end with it."""
  rng, kills = random.Random(), int(os.environ.get('TFDP_KILLS', 1))
  rounds_wanted, killed, script = 2 * kills + 1, 0, tmp_path / 'driver.py'
  script.write_text(DRIVER, encoding='utf-8')
  log = tmp_path / 'run.used'
  command = [tmp_path / 'output', script, HERE.parents[1], cluster.address, tmp_path / 'run',
             rounds_wanted]
  lines = lambda: log.read_text(encoding='utf-8').splitlines() if log.exists() else []
  with nursery.Nursery('tensorflow', 'tfdp_adaptive.keras.named_optimizers', 'ray') as mother:
    for _ in range(kills):
      before = len(lines())
      mother.start(*command)
      wanted = before + rng.randint(1, 2)
      while not mother.ended() and len(lines()) < wanted:
        time.sleep(0.001)
      time.sleep(rng.expovariate(1 / 0.1))
      killed += mother.kill()
    status, said = mother.run(*command)
  assert status == 0, said
  used = [json.loads(line) for line in lines()]
  assert len({str(keys) for _, keys in used}) == len(used)
  order = [number for number, _ in used]
  # No round is skipped, and one is begun again only where a driver was killed.
  assert order == sorted(order) and set(order) == {*range(rounds_wanted)}
  assert len(order) <= rounds_wanted + killed
  assert (tmp_path / 'run' / 'metrics.csv').read_text().count('\n') == 1 + rounds_wanted
  nursery.tally('ray driver', kills=killed, rounds=rounds_wanted, begun=len(used))


def database(path, value):
  connection = sqlite3.connect(path)
  connection.execute('CREATE TABLE examples (split_name, client_id, serialized_example_proto)')
  connection.execute('CREATE TABLE client_metadata (client_id, split_name, num_examples)')
  for user in 'abc':
    row = json.dumps({'x': [value, 1.0, 2.0], 'y': [1.0]})
    connection.execute("INSERT INTO examples VALUES ('train', ?, ?)", [user, row])
    connection.execute("INSERT INTO client_metadata VALUES (?, 'train', 1)", [user])
  connection.commit()
  connection.close()


def test_files_are_opened_where_the_actor_is_and_must_be_the_same(cluster, tmp_path, monkeypatch):
  from tfdp_adaptive.federated import sources  # pylint: disable=import-outside-toplevel
  path = tmp_path / 'users.sqlite'
  database(path, 1.0)
  preprocess = lambda columns: {name: np.array(columns[name], 'f') for name in 'xy'}
  data = tfdp.federated.Users(sources.Database(path, 'train', sources.parse_json, preprocess),
                              batch_size=4)
  plan = regression.make_plan(population_size=3, batch_size=2)
  result = simulate(build(plan), data, workers='ray:1', rounds=1)
  assert result.rounds == 1 and not result.failed
  known = ray_engine._data(data)
  monkeypatch.setattr(ray_engine, '_data', lambda users: {**known, 'sample': 'of another file'})
  with pytest.raises(ValueError, match=r"other \['sample'\] on one of 1 actors"):
    simulate(build(plan), data, workers='ray:1', rounds=1)
  path.unlink()
  with pytest.raises(ValueError, match='must be able to make the model and to read'):
    simulate(build(plan), data, workers='ray:1', rounds=1)


@pytest.mark.parametrize('wrong', ['rays', 'ray:0', 'ray:x', 'host:80'])
def test_what_is_refused(wrong):
  with pytest.raises(ValueError, match='`workers` must be'):
    simulate(build(), workers=wrong)
  with pytest.raises(ValueError, match="`address` is for workers='ray'"):
    simulate(build(), workers=2, address='host:6379')


CHANGES = {  # The page's program for this machine and a test: with seeds, and in fewer steps.
    'TensorflowTrainer(\n': """import ray
ray.init(address='local', num_cpus=3, include_dashboard=False, log_to_driver=False,
         _node_ip_address='127.0.0.1', object_store_memory=100 * 2**20)
TensorflowTrainer(
""",
    '  with strategy.scope():\n': '  keras.utils.set_random_seed(0)\n  with strategy.scope():\n',
    'target_delta=1e-6)': 'target_delta=1e-6, seed=1)',
    'tfdp.DPAdam(0.05, plan=plan)': 'tfdp.DPAdam(0.05, plan=plan, seed=1)',
    "'steps': 40": "'steps': 8",
    'RunConfig(\n': "RunConfig(\n        storage_path='/shared/run',\n",
}


def test_the_program_of_the_page_takes_the_steps_of_one_process(tmp_path):
  """`TensorflowTrainer` with two workers, each with all records."""
  page = (HERE.parents[1] / 'docs' / 'guides' / 'ray.md').read_text(encoding='utf-8')
  program, = re.findall(r'^```text\n(import ray.train\n.*?)^```$', page, re.S | re.M)
  for old, new in CHANGES.items():
    assert program.count(old) == 1, old
    program = program.replace(old, new)
  (tmp_path / 'program.py').write_text(
      program.replace('/shared/run', str(tmp_path)), encoding='utf-8')
  with open(tmp_path / 'log', 'wb') as log:
    done = subprocess.run(
        [sys.executable, tmp_path / 'program.py'], stdin=subprocess.DEVNULL, stdout=log,
        stderr=log, timeout=570, check=False, env={**os.environ, **ENVIRONMENT})
  assert done.returncode == 0, (tmp_path / 'log').read_text(encoding='utf-8')[-3000:]
  x = np.random.default_rng(0).normal(size=(2000, 20)).astype('float32')
  plan = tfdp.PrivacyPlan(population_size=2000, batch_size=100, steps=8, l2_norm_clip=1.0,
                          noise_multiplier=1.5, target_delta=1e-6, seed=1)
  layers = tf.keras.layers
  models = []
  for seed in (0, 1):
    tf.keras.utils.set_random_seed(seed)
    model = tfdp.DPSequential([layers.Input([20]), layers.Dense(1, activation='sigmoid')])
    model.compile(tfdp.DPAdam(0.05, plan=plan, seed=1), 'binary_crossentropy')
    models.append(model)
  models[0].fit(plan.batches((x, (x[:, :1] > 0).astype('float32'))), verbose=0)
  models[1].load_weights(tmp_path / 'model.weights.h5')
  for one, other in zip(*(model.get_weights() for model in models)):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
  assert models[1].ledger.epsilon() == pytest.approx(plan.epsilon())
