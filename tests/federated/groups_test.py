# SPDX-License-Identifier: Apache-2.0
"""Clients trained in groups give what each of them gives alone in TFF's own client work."""

import collections

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
import regression
import tensorflow as tf
import tensorflow_federated as tff

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.federated import groups
from tfdp_adaptive.federated import rounds

METRICS = tfdp.federated.PrivateMetrics({'loss': (0.0, 50.0)}, share=0.1)


class _Remembering:
  """A regression that counts all the examples that it ever saw, and learns from the count."""

  def __init__(self, table=False):
    self._model = regression.tff_model_fn()
    self.seen = tf.Variable(0.0, trainable=False)
    self._table = table and tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

  def forward_pass(self, batch, training=True):
    if self._table:
      self._table.insert(tf.constant([0], tf.int64), [tf.reduce_sum(batch['x'])])
      factor = 1 + self._table.lookup(tf.constant([0], tf.int64))[0]
    else:
      self.seen.assign_add(tf.cast(tf.shape(batch['x'])[0], tf.float32))
      factor = 1 / self.seen
    output = self._model.forward_pass(batch, training)
    return tff.learning.models.BatchOutput(
        loss=factor * output.loss, predictions=output.predictions,
        num_examples=output.num_examples)

  def __getattr__(self, name):
    return getattr(self._model, name)


class Remembering(_Remembering, tff.learning.models.VariableModel):
  trainable_variables = property(lambda self: self._model.trainable_variables)
  non_trainable_variables = property(lambda self: self._model.non_trainable_variables)
  local_variables = property(lambda self: self._model.local_variables)
  input_spec = property(lambda self: self._model.input_spec)

  def predict_on_batch(self, x, training=True):
    return self._model.predict_on_batch(x, training)

  def report_local_unfinalized_metrics(self):
    return self._model.report_local_unfinalized_metrics()

  def metric_finalizers(self):
    return self._model.metric_finalizers()

  def reset_metrics(self):
    self._model.reset_metrics()


def normalized_model_fn():
  """With weights that training moves without gradients."""
  model = tf.keras.Sequential([
      tf.keras.layers.InputLayer((3,)), tf.keras.layers.BatchNormalization(momentum=0.5),
      tf.keras.layers.Dense(1, kernel_initializer='ones')])
  return tff.learning.models.from_keras_model(
      model, loss=tf.keras.losses.MeanSquaredError(), input_spec=regression.SPEC)


def functional_model():
  return tff.learning.models.functional_model_from_keras(
      lambda: tf.keras.Sequential([
          tf.keras.layers.InputLayer((3,)),
          tf.keras.layers.Dense(1, kernel_initializer='zeros')]),
      tf.keras.losses.MeanSquaredError(), regression.SPEC)


def fed_avg(model_fn=regression.tff_model_fn, optimizer=None, rule=rules.dp_adam, **kwargs):
  return tfdp.federated.build_private_fed_avg(
      model_fn, server_rule=rule(), plan=regression.make_plan(), server_learning_rate=0.5, seed=7,
      client_optimizer_fn=optimizer or tff.learning.optimizers.build_sgdm(0.1), **kwargs)


PROCESSES = {
    'plain': lambda: fed_avg(quantile_clip=tfdp.federated.QuantileClip(), private_metrics=METRICS),
    'momentum, scaled': lambda: fed_avg(
        optimizer=tff.learning.optimizers.build_adam(0.1),
        rule=lambda: rules.scale_then_privatize(scale_epsilon=0.2)),
    'functional': lambda: fed_avg(functional_model()),
    'normalization': lambda: fed_avg(normalized_model_fn, private_metrics=METRICS),
    'remembering': lambda: fed_avg(Remembering),
    'gradients': lambda: tfdp.federated.build_private_fed_sgd(
        regression.tff_model_fn, server_rule=rules.dp_sgd(), plan=regression.make_plan(),
        server_learning_rate=0.5, private_metrics=METRICS, seed=7),
}


def make_users():
  """One has no examples, one infinite ones, one so large ones that training diverges.

  And one has an update whose squares overflow, though it is finite.
  """
  users = regression.make_users(7)
  users['user3']['x'] = np.full_like(users['user3']['x'], np.inf)
  users['user4']['y'] = users['user4']['y'] * np.float32(1e22)
  users['user6']['x'] = users['user6']['x'] * np.float32(1e18)
  return tfdp.federated.Users(users, batch_size=4, epochs=2)


def leaves(process, users, cohort, one_by_one=False):
  state = tf.nest.map_structure(tf.constant, process.initialize())
  with process.one_by_one(users) if one_by_one else process.reach(1, users) as engine:
    outcome = rounds.run(process, engine, state, cohort)
  assert not outcome.failed
  return [np.asarray(x, np.float64) for x in tf.nest.flatten(outcome.answers)]


@pytest.mark.thorough(rows=[
    'functional', 'gradients', 'momentum, scaled', 'normalization', 'remembering'])
@pytest.mark.parametrize('name', PROCESSES)
def test_groups_give_what_clients_give_one_by_one(name):
  process, users = PROCESSES[name](), make_users()
  together = leaves(process, users, users.client_ids)
  if name != 'functional':  # It runs in a computation of TFF alone.
    assert process.worker(0, process.batch_spec(users))
  alone = leaves(process, users, users.client_ids, one_by_one=True)
  assert len(together) == len(alone) and any(np.any(x) for x in alone)
  for one, other in zip(together, alone):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_model_that_keeps_clients_elsewhere_is_trained_one_by_one():
  """A table is not set back between clients, so there are no groups, and no way to meet."""
  process, users = fed_avg(lambda: Remembering(table=True)), make_users()
  with pytest.raises(groups.NotInGroupsError):
    process.worker(0, process.batch_spec(users))
  cohort = ['user0', 'user2', 'user4']
  together = leaves(process, users, cohort)
  alone = [leaves(process, users, [client]) for client in cohort]
  for i, value in enumerate(together):
    np.testing.assert_allclose(value, sum(parts[i] for parts in alone), rtol=1e-5, atol=1e-6)


def test_no_client_sees_what_another_left():
  """A model that counts its examples: one group, in which clients follow each other."""
  process, users = PROCESSES['remembering'](), make_users()
  both = leaves(process, users, ['user2', 'user4'])
  parts = [leaves(process, users, [client]) for client in ('user2', 'user4')]
  for i, value in enumerate(both):
    np.testing.assert_allclose(value, parts[0][i] + parts[1][i], rtol=1e-5, atol=1e-7)


def test_data_that_break_the_model_are_left_out_alone():
  """Word ids out of the table, found in the worker only; and batches of another form."""
  spec = collections.OrderedDict(
      x=tf.TensorSpec([None, 2], tf.int32), y=tf.TensorSpec([None, 1], tf.float32))

  def model_fn():
    return tff.learning.models.from_keras_model(
        tf.keras.Sequential([
            tf.keras.layers.InputLayer((2,), dtype=tf.int32), tf.keras.layers.Embedding(5, 3),
            tf.keras.layers.Flatten(), tf.keras.layers.Dense(1, kernel_initializer='ones')]),
        loss=tf.keras.losses.MeanSquaredError(), input_spec=spec)

  def examples(largest, dtype=np.int32, width=2):
    return collections.OrderedDict(
        x=np.full([3, width], largest, dtype), y=np.ones([3, 1], np.float32))

  good = {f'good{i}': examples(i % 5) for i in range(9)}
  bad = {'id': examples(5), 'type': examples(1, np.int64), 'shape': examples(1, width=3)}
  process = fed_avg(model_fn)
  state = tf.nest.map_structure(tf.constant, process.initialize())
  users = tfdp.federated.Users({**good, **bad}, batch_size=2)
  with process.reach(1, users) as engine:
    outcome = rounds.run(process, engine, state, users.client_ids)
    expected = rounds.run(process, engine, state, list(good))
  assert sorted(outcome.failed) == sorted(bad) and not expected.failed
  for one, other in zip(tf.nest.flatten(outcome.answers), tf.nest.flatten(expected.answers)):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('kwargs', [{}, {'epochs': 3}, {'max_examples': 5}])
def test_batches_without_a_data_set_are_the_same_batches(kwargs, monkeypatch):
  users = tfdp.federated.Users(regression.make_users(), batch_size=4, **kwargs)
  make = np.random.default_rng
  monkeypatch.setattr(np.random, 'default_rng', lambda: make(3))
  for client in users.client_ids:
    direct = groups.batches_of(users, client, regression.SPEC)
    dataset = users.create_tf_dataset_for_client(client)
    assert len(direct) == len(list(dataset))
    for mine, theirs in zip(direct, dataset):
      for one, other in zip(mine, tf.nest.flatten(theirs)):
        np.testing.assert_array_equal(one, other)


@hypothesis.given(strategies.lists(strategies.lists(strategies.integers(1, 4), max_size=4),
                                   max_size=9))
def test_every_client_is_in_the_group_with_all_its_batches(sizes):
  spec = groups.specs(tf.TensorSpec([None], tf.int64))
  clients = [[(np.full([size], 10 * i + j),) for j, size in enumerate(batches)]
             for i, batches in enumerate(sizes)]
  group = groups.pack(clients, spec)
  batches = np.split(group.rows[0], group.batch_ends)
  assert len(group.rows[0]) == sum(map(len, batches)) and not len(batches[-1])
  starts = [0, *group.client_ends][:-1]
  unpacked = [[batch.tolist() for batch in batches[start:end]]
              for start, end in zip(starts, group.client_ends)]
  assert unpacked == [[batch.tolist() for (batch,) in client] for client in clients]


@hypothesis.given(strategies.lists(strategies.integers(0, 3), max_size=9),
                  strategies.integers(1, 4))
def test_calls_have_every_client_once(sizes, most):
  clients = [(i, [(np.zeros([size], np.int8),)]) for i, size in enumerate(sizes)]
  calls = list(groups.calls(clients, most, groups.size))
  assert [client for call in calls for client in call] == clients
  assert all(len(call) == most for call in calls[:-1])
  assert all(1 <= len(call) <= most for call in calls)


@pytest.mark.parametrize('spec', [
    tf.TensorSpec([], tf.float32), tf.TensorSpec([None, None], tf.float32),
    tf.TensorSpec([None], tf.string), tf.RaggedTensorSpec([None, None], tf.float32)])
def test_what_cannot_lie_one_behind_the_other(spec):
  with pytest.raises(groups.NotInGroupsError):
    groups.specs(collections.OrderedDict(x=tf.TensorSpec([None, 2], tf.float32), y=spec))
