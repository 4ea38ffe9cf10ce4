# SPDX-License-Identifier: Apache-2.0
"""Flower's nodes: rounds equal to a simulation's, and nodes that misbehave in every way."""

import csv
import types

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import noise
from tfdp_adaptive import rules
from tfdp_adaptive import runfolder
from tfdp_adaptive.federated import rounds
from tfdp_adaptive.federated import run as run_lib

pytest.importorskip('flwr', reason='needs Flower, which this environment does not have')

# pylint: disable=g-import-not-at-top
from flwr import app as flwr_app  # noqa: E402
import nodes  # noqa: E402
import regression  # noqa: E402

from tfdp_adaptive.federated import flower  # noqa: E402

USERS, flat, run, reply, Grid = nodes.USERS, nodes.flat, nodes.run, nodes.reply, nodes.Grid

METRICS = tfdp.federated.PrivateMetrics({'loss': (0.0, 50.0)}, share=0.1)


def test_released_numbers_and_none_that_is_exact():
  ours, result = run(Grid(), private_metrics=METRICS, evaluate=lambda weights: {
      'norm': float(np.linalg.norm(weights.trainable[0]))},
                     settings=dict(rounds_per_evaluation=1, facts=['Nodes: six.']))
  assert list(result.train_metrics_clientapp[2]) == ['private/clients', 'private/loss']
  assert list(result.evaluate_metrics_serverapp[3]) == ['norm']
  assert 'not_private' not in str(result)
  assert ours.statement.endswith('Nodes: six.\n')
  # Without noise: the mean of what the nodes of a full cohort report.
  plan = regression.make_plan(batch_size=6, noise_multiplier=0.0,
                              sampling=tfdp.sampling.Poisson(sampling_probability=1))
  ours, _ = run(Grid(), plan=plan, private_metrics=METRICS, num_rounds=1)
  assert ours.history[0]['private/loss'] == pytest.approx(
      np.mean([len(user['x']) for user in USERS]), rel=1e-4)
  assert ours.history[0]['private/clients'] == pytest.approx(6)


def everyone(**kwargs):
  return regression.make_plan(batch_size=6, sampling=tfdp.sampling.Poisson(sampling_probability=1),
                              **kwargs)


def late(grid, message, end):
  """Answers when the next round is asked."""
  before, grid.kept = getattr(grid, 'kept', []), [reply(message, end)]
  return before


def forged(grid, message, end):
  """Answers in the name of another node, many times."""
  replies = [reply(message, [1e3 * a for a in end]) for _ in range(3)]
  for one in replies:
    one.metadata.__dict__['_src_node_id'] = 99
  return replies


NONE = {
    'dies': lambda grid, message, end: [],
    'fails': lambda grid, message, end: [
        flwr_app.Message(flwr_app.Error(0, 'out of memory'), reply_to=message)],
    'late': late,
    'not a number': lambda grid, message, end: [reply(message, [end[0] * np.nan, end[1]])],
    'infinite': lambda grid, message, end: [reply(message, [end[0] - np.inf, end[1]])],
    'overflows': lambda grid, message, end: [
        reply(message, [np.full([3, 1], 1e300), end[1]])],
    'shape': lambda grid, message, end: [reply(message, [end[0].T, end[1]])],
    'broadcasts': lambda grid, message, end: [reply(message, [end[0][:1], end[1]])],
    'too few': lambda grid, message, end: [reply(message, end[:1])],
    'too many': lambda grid, message, end: [reply(message, [*end, end[1]])],
    'texts': lambda grid, message, end: [reply(message, [end[0].astype(str), end[1]])],
    'complex': lambda grid, message, end: [reply(message, [end[0].astype('c8'), end[1]])],
    'nothing': lambda grid, message, end: [flwr_app.Message(
        flwr_app.RecordDict({}), reply_to=message)],
    'two records': lambda grid, message, end: [flwr_app.Message(flwr_app.RecordDict({
        name: flwr_app.ArrayRecord(end) for name in 'ab'}), reply_to=message)],
    'bytes': lambda grid, message, end: [flwr_app.Message(flwr_app.RecordDict({
        'arrays': flwr_app.ArrayRecord({'0': flwr_app.Array('float32', (3, 1), 'x', b'junk'),
                                        '1': flwr_app.Array(end[1])})}), reply_to=message)],
    'forged': forged,
}


@pytest.fixture(scope='module')
def without_node_4():
  grid = Grid()
  grid.offline = {4}
  return flat(run(grid, plan=everyone())[1])


@pytest.fixture(scope='module')
def with_all():
  return flat(run(Grid(), plan=everyone())[1])


@pytest.mark.parametrize('how', NONE)
@pytest.mark.pitfall(
    'A node of Flower dies, fails, is late, or answers with NaN, other shapes or rubbish.',
    severity='critical',
    stops='the answer counts as zero, and the divisor stays the expected number')
def test_an_answer_that_is_none(how, without_node_4, with_all):
  result = flat(run(Grid(odd={4: NONE[how]}), plan=everyone())[1])
  np.testing.assert_allclose(result, without_node_4, rtol=1e-5)
  assert np.abs(result - with_all).max() > 1e-3


@pytest.mark.pitfall(
    'A node of Flower answers twice, or for a round that is over.',
    severity='critical', stops='only its first answer to this round counts')
def test_a_node_counts_once_a_round(with_all):
  def twice(grid, message, end):
    kept, grid.kept = getattr(grid, 'kept', []), [reply(message, [a - 7 for a in end])]
    return [*kept, reply(message, end), reply(message, [a - 5 for a in end])]

  np.testing.assert_allclose(flat(run(Grid(odd={4: twice}), plan=everyone())[1]), with_all,
                             rtol=1e-5)


@pytest.mark.pitfall(
    'A node of Flower does not clip, or multiplies its update.',
    severity='critical', stops='every answer is clipped at the server')
def test_no_node_moves_the_sum_by_more_than_a_clip_norm():
  plan = everyone(noise_multiplier=0.0)
  moved = {}
  for scale in (0.0, 1e3, 1e30):
    odd = {4: lambda grid, message, end, s=scale: [reply(message, [
        a - s * np.ones_like(a) for a in message.content['arrays'].to_numpy_ndarrays()])]}
    result = run(Grid(odd=odd), plan=plan, rule=rules.dp_sgd(), num_rounds=1)[1]
    moved[scale] = flat(result)
  for scale in (1e3, 1e30):  # learning rate * clip norm / expected number
    assert np.linalg.norm(moved[scale] - moved[0.0]) == pytest.approx(0.5 * 0.2 / 6, rel=1e-4)


def test_only_the_cohort_is_asked_and_what_it_is_sent_is_public():
  grid = Grid()
  ours, _ = run(grid, num_rounds=5)
  plan = regression.make_plan()
  cohorts = plan.index_batches(6)
  for server_round in range(1, 6):
    asked = [m for m in grid.sent if m.content['config']['server-round'] == server_round]
    assert sorted(m.metadata.dst_node_id - 1 for m in asked) == sorted(next(cohorts))
    assert len({m.metadata.group_id for m in asked}) <= 1
    for message in asked:
      assert set(message.content) == {'arrays', 'config'}
      assert list(message.content['config']) == ['server-round']
  assert len({m.metadata.group_id for m in grid.sent}) <= 5 < len(grid.sent)


@pytest.mark.pitfall(
    'A Flower node that reconnects gets another place in the order, so it takes part too soon.',
    severity='high', stops='places are stored on disk by public key before anything is sent')
def test_nodes_keep_their_places(tmp_path):
  plan = regression.make_plan(sampling=tfdp.sampling.FixedOrder(), steps=4)
  grid = Grid()
  grid.offline = {1, 3}
  run(grid, tmp_path, num_rounds=1, plan=plan)
  first = {m.metadata.dst_node_id for m in grid.sent}
  grid.offline, grid.sent = {5}, []
  run(grid, tmp_path, num_rounds=2, plan=plan)
  second = {m.metadata.dst_node_id for m in grid.sent}
  # Places are taken in order of appearance, and those who come back are asked at their own.
  at = [2, 4, 5, 6, 1, 3]
  cohorts = [{at[place] for place in cohort} for cohort in plan.index_batches(6)]
  assert first == cohorts[0] - {1, 3} and second == cohorts[1] - {5}
  grid.users[7] = USERS[0]  # One more than the plan's population: it takes no part.
  grid.offline, grid.sent = set(), []
  run(grid, tmp_path, num_rounds=4, plan=plan)
  assert {m.metadata.dst_node_id for m in grid.sent} == {1, 2, 3, 4, 5, 6}
  (tmp_path / 'nodes.json').unlink()
  with pytest.raises(tfdp.federated.SavedRunError, match='nodes.json is gone'):
    run(grid, tmp_path, plan=plan)


def test_a_node_is_known_by_its_key(tmp_path):
  plan = regression.make_plan(sampling=tfdp.sampling.FixedOrder(), steps=4, population_size=3)
  grid = Grid(USERS[:3])
  keys = {node: bytes([node]) for node in grid.users}
  grid.get_nodes = lambda: [types.SimpleNamespace(node_id=node, public_key=keys[node])
                            for node in grid.users]
  run(grid, tmp_path, num_rounds=1, plan=plan)
  grid.users = {node + 100: user for node, user in grid.users.items()}  # Registered again.
  keys.update({node + 100: key for node, key in keys.items()})
  run(grid, tmp_path, num_rounds=2, plan=plan)
  assert sorted(m.metadata.dst_node_id for m in grid.sent) == [1, 2, 3, 101, 102, 103]


@pytest.mark.pitfall(
    'A Flower server uses up its rounds while no node is online.',
    severity='high',
    stops='a round waits for `min_nodes`; without them the run ends and uses no budget')
def test_no_budget_is_used_while_too_few_nodes_are_online(tmp_path, monkeypatch):
  grid, plan = Grid(), everyone(steps=4)
  grid.offline = set(grid.users)
  ours, _ = run(grid, tmp_path, num_rounds=4, plan=plan, wait=0)
  assert ours.rounds == 0 and not ours.history and not grid.sent
  grid.offline = {1, 2}
  assert run(grid, tmp_path, num_rounds=4, plan=plan, wait=0, min_nodes=5)[0].rounds == 0
  assert run(grid, tmp_path, num_rounds=1, plan=plan, wait=0, min_nodes=4)[0].rounds == 1
  waited = []

  def sleep(seconds):
    waited.append(seconds)
    grid.offline = set()

  monkeypatch.setattr(flower.time, 'sleep', sleep)
  ours, _ = run(grid, tmp_path, num_rounds=3, plan=plan, wait=60, min_nodes=6)
  assert ours.rounds == 3 and len(waited) == 1
  sent = run(Grid(), num_rounds=3, plan=plan)[0]
  assert ours.statement == sent.statement
  for wrong in (dict(min_nodes=0), dict(min_nodes=7), dict(wait=-1)):
    with pytest.raises(ValueError, match=f'`{next(iter(wrong))}` must'):
      run(grid, plan=plan, **wrong)


def test_answers_are_pulled_and_added_a_few_at_a_time(with_all, monkeypatch):
  class Some(Grid):
    """Gives what it is asked for, once it is there."""

    most = 0

    def push_messages(self, messages):
      self.most = max(self.most, len(messages))
      return super().push_messages(messages)

    def pull_messages(self, message_ids):
      asked = [one for one in self.replies if one.metadata.reply_to_message_id in message_ids]
      self.replies = [one for one in self.replies if one not in asked]
      self.most = max(self.most, len(asked))
      return asked

  monkeypatch.setattr(flower, '_AT_ONCE', 2)
  grid = Some()
  np.testing.assert_allclose(flat(run(grid, plan=everyone())[1]), with_all, rtol=1e-5)
  assert grid.most == 2 and not grid.replies


class Killed(BaseException):
  """Nothing of ours may catch it."""


def noise_keys(tree):
  if isinstance(tree, noise.State):
    return [tuple(np.asarray(tree.key))]
  return [key for child in tree for key in noise_keys(child)] if isinstance(tree, tuple) else []


PLACES = {  # Where a server can be killed: before the call, or after it.
    'sends': (Grid, 'push_messages'), 'waits': (Grid, 'pull_messages'),
    'saves': (runfolder, 'replace'), 'saved': (runfolder, 'sync'),
    'releases': (run_lib.Releases, 'release'),
}


@pytest.mark.pitfall(
    'A ServerApp of Flower is killed and started again.',
    severity='critical', stops='the server resumes from its saved state with new keys')
def test_a_server_that_is_killed_uses_no_noise_twice(tmp_path, monkeypatch):
  """Ten times, at every place twice."""
  used, steps = [], 20
  original = rounds.run

  def spy(process, engine, state, *args, **kwargs):
    used.append((tuple(noise_keys(state)), int(state.round)))
    return original(process, engine, state, *args, **kwargs)

  def start():
    return run(Grid(), tmp_path, num_rounds=steps, plan=everyone(steps=steps), seed=None)[0]

  monkeypatch.setattr(rounds, 'run', spy)
  for place in 2 * list(PLACES):
    owner, name = PLACES[place]
    function, calls = getattr(owner, name), []

    def mortal(*args, f=function, place=place, calls=calls, **kwargs):
      calls.append(place)
      result = f(*args, **kwargs) if place == 'saved' or len(calls) < 2 else None
      if len(calls) == 2:
        raise Killed
      return result

    with monkeypatch.context() as patch:
      patch.setattr(owner, name, mortal)
      with pytest.raises(Killed):
        start()
  ours = start()
  assert ours.rounds == steps and [row['round'] for row in ours.history] == [*range(1, steps + 1)]
  with open(tmp_path / 'metrics.csv', encoding='utf-8') as file:
    assert [int(row['round']) for row in csv.DictReader(file)] == [*range(1, steps + 1)]
  assert len(set(used)) == len(used) > steps


def test_arrays_without_keras_and_a_model_with_what_is_not_trained():
  weights = [np.zeros([3, 1], 'f'), np.zeros([1], 'f')]
  plan = everyone()
  strategy = flower.PrivateStrategy(weights, plan=plan, rule=rules.dp_adam(),
                                    server_learning_rate=0.5, seed=regression.SEED)
  start = flwr_app.ArrayRecord([w + 1 for w in weights])
  result = strategy.start(Grid(), initial_arrays=start, num_rounds=1)
  assert np.abs(flat(result) - 1).max() > 0.1
  with pytest.raises(ValueError, match='2 arrays'):
    strategy.start(Grid(), initial_arrays=flwr_app.ArrayRecord(weights[:1]), num_rounds=1)
  model = tf.keras.Sequential([
      tf.keras.layers.Input((3,)), tf.keras.layers.BatchNormalization(),
      tf.keras.layers.Dense(1)])
  model.build((None, 3))
  strategy = flower.PrivateStrategy(model, plan=plan, rule=rules.dp_adam(), seed=1)
  grid = Grid()
  grid.push_messages = lambda messages: grid.replies.extend(reply(m, [
      a + 1 for a in m.content['arrays'].to_numpy_ndarrays()]) for m in messages) or 'x'
  end = strategy.start(grid, num_rounds=1, timeout=0.2).arrays.to_numpy_ndarrays()
  for weight, array in zip(model.weights, end):
    trainable = any(weight is t for t in model.trainable_weights)
    assert np.any(array != np.asarray(weight)) == trainable  # The others would be exact.


def test_what_is_refused():
  with pytest.raises(ValueError, match='has nothing to train'):
    flower.PrivateStrategy(tf.keras.Sequential([tf.keras.layers.Dense(1)]),
                           plan=regression.make_plan(), rule=rules.dp_adam())
  with pytest.raises(ValueError, match="with unit='user' and the number of nodes"):
    flower.PrivateStrategy([np.zeros(1)], plan=None, rule=rules.dp_adam())
  of_examples = tfdp.sampling.PoissonExamples(examples_per_user=2)
  for kwargs in (dict(unit='example'), dict(sampling=of_examples)):
    with pytest.raises(ValueError, match='the update of a whole user'):
      flower.PrivateStrategy([np.zeros(1)], plan=regression.make_plan(**kwargs, seed=None),
                             rule=rules.dp_adam())
  strategy = flower.PrivateStrategy([np.zeros(1, 'f')], plan=regression.make_plan(),
                                    rule=rules.dp_adam())
  with pytest.raises(ValueError, match='`evaluate_config` and `evaluate_fn` must be None'):
    strategy.start(Grid(), evaluate_fn=lambda server_round, arrays: None)
  with pytest.raises(NotImplementedError, match='Call `start`'):
    strategy.configure_train(1, None, None, None)
