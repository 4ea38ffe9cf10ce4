# SPDX-License-Identifier: Apache-2.0
"""The engines do the same: a round of one is a round of all, and states pass between them."""

import collections

import numpy as np
import pytest
import regression
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.federated import groups
from tfdp_adaptive.federated import rounds

SIDES = dict(private_metrics=tfdp.federated.PrivateMetrics({'loss': (0.0, 50.0)}, share=0.1),
             quantile_clip=tfdp.federated.QuantileClip())
TABLE = {
    'sides': (rules.dp_adam, SIDES),
    'scaled': (lambda: rules.scale_then_privatize(scale_epsilon=0.2), {}),
    'joint moments': (rules.dp_adam_jme, {}),
}


def flat(tree):
  return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in tf.nest.flatten(tree)])


def answers(process, users, cohort):
  state = tf.nest.map_structure(tf.constant, process.initialize())
  with process.reach(1, users) as engine:
    outcome = rounds.run(process, engine, state, cohort)
  assert not outcome.failed
  return flat(outcome.answers)


@pytest.mark.thorough
@pytest.mark.federated
@pytest.mark.parametrize('name', TABLE)
def test_a_round_is_the_same_in_process_and_in_tff(name):
  """Sums of clipped answers, of clients without data, with infinite ones and with huge ones."""
  rule, kwargs = TABLE[name]
  examples = regression.make_users(7)
  examples['user3']['x'] = np.full_like(examples['user3']['x'], np.inf)
  examples['user4']['y'] = examples['user4']['y'] * np.float32(1e22)
  users = tfdp.federated.Users(examples, batch_size=4, epochs=2)
  plan = regression.make_plan(noise_multiplier=0.0, adjacency=(
      'replace' if name == 'joint moments' else 'zero_out'), **(
          dict(sampling=tfdp.sampling.FixedOrder()) if name == 'joint moments' else {}))
  mine, theirs = (
      answers(regression.build(rule(), plan, engine, **kwargs), users, users.client_ids)
      for engine in ('in_process', 'tff'))
  np.testing.assert_allclose(mine, theirs, rtol=2e-7, atol=2e-7 * np.abs(theirs).max())


@pytest.mark.thorough
@pytest.mark.federated
def test_a_run_goes_on_in_the_other_engine(tmp_path):
  plan, users = regression.make_plan(steps=3), tfdp.federated.Users(
      regression.make_users(), batch_size=4)
  here = regression.build(rules.dp_adam(), plan, **SIDES,
                          client_optimizer_fn=regression.tff_client_optimizer)
  there = regression.build(rules.dp_adam(), plan, 'tff', **SIDES)
  straight = tfdp.federated.simulate(here, users, progress=False)
  for process, done in ((there, 1), (here, 2), (there, 3)):
    result = tfdp.federated.simulate(
        process, users, rounds=done, out=tmp_path, progress=False)
  np.testing.assert_allclose(
      regression.flat(result.weights), regression.flat(straight.weights), rtol=1e-5)
  assert [row['round'] for row in result.history] == [1, 2, 3]


RUNS = {
    'adam': {},
    'correlated': dict(plan=dict(
        mechanism=tfdp.mechanisms.BandedToeplitz(bands=3, steps=10),
        sampling=tfdp.sampling.FixedOrder())),
    'cyclic': dict(plan=dict(
        sampling=tfdp.sampling.CyclicPoisson(cycle=2), adjacency='zero_out', batch_size=2)),
    'allocation': dict(plan=dict(sampling=tfdp.sampling.RandomAllocation(cycle=2))),
    'scaled': dict(rule=rules.scale_then_privatize(scale_epsilon=1e-2)),
    'quantile': dict(sides=dict(quantile_clip=tfdp.federated.QuantileClip())),
}


@pytest.mark.thorough(but=['flower-*'])
@pytest.mark.parametrize('name', RUNS)
@pytest.mark.parametrize('other', [pytest.param('tff', marks=pytest.mark.federated), 'flower'])
def test_a_run_is_the_same_in_every_engine(name, other):
  """Same cohorts, clips, noise, steps and statement as in process, whatever the rule and noise."""
  if other == 'flower':
    pytest.importorskip('flwr', reason='needs Flower, which this environment does not have')
  plan, rule = regression.make_plan(**RUNS[name].get('plan', {})), RUNS[name].get(
      'rule', rules.dp_adam())
  sides = RUNS[name].get('sides', {})
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  here = tfdp.federated.simulate(
      regression.build(rule, plan, **sides), users, rounds=3, progress=False)
  if other == 'flower':
    import nodes  # pylint: disable=import-outside-toplevel
    there, sent = nodes.run(nodes.Grid(), plan=plan, rule=rule, **sides)
    np.testing.assert_array_equal(nodes.flat(sent), regression.flat(there.weights))
  else:
    there = tfdp.federated.simulate(
        regression.build(rule, plan, other, **sides), users, rounds=3, progress=False)
  np.testing.assert_allclose(
      regression.flat(there.weights), regression.flat(here.weights), rtol=2e-5, atol=2e-6)
  assert np.abs(regression.flat(here.weights)).max() > 0.1
  assert [row['round'] for row in there.history] == [1, 2, 3]
  for mine, theirs in zip(here.history, there.history):
    for private in mine:
      if private.startswith('private/'):
        assert theirs[private] == pytest.approx(mine[private], rel=1e-4)
  assert there.statement == here.statement


def noisy(dropout=0.5):
  """A model with dropout, and with weights that move without gradients."""
  return tf.keras.Sequential([
      tf.keras.layers.Input((3,)), tf.keras.layers.BatchNormalization(momentum=0.5),
      tf.keras.layers.Dropout(dropout), tf.keras.layers.Dense(1, kernel_initializer='ones')])


def build(model_fn, optimizer=lambda: tf.keras.optimizers.Adam(0.1), **kwargs):
  return regression.build(rules.dp_sgd(), regression.make_plan(), model_fn=model_fn,
                          client_optimizer_fn=optimizer, **kwargs)


def test_no_client_sees_what_another_left():
  """Moments of Adam, moving means and metrics begin anew: alone or in a row, answers are equal."""
  process = build(lambda: noisy(dropout=0.0), private_metrics=SIDES['private_metrics'])
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  alone = [answers(process, users, [client]) for client in ('user2', 'user4', 'user5')]
  together = answers(process, users, ['user2', 'user4', 'user5'])
  again = answers(process, users, ['user2', 'user4', 'user5'])
  np.testing.assert_allclose(together, sum(alone), rtol=1e-6, atol=1e-7)
  np.testing.assert_array_equal(together, again)


def test_dropout_is_drawn_anew_for_every_client():
  """Twins drop different units, in one round and in the next."""
  twin = regression.make_users()['user5']
  users = tfdp.federated.Users({'a': twin, 'b': twin}, batch_size=4)
  process = build(noisy)
  seen = [answers(process, users, [name]) for name in ('a', 'b', 'a')]
  both = answers(process, users, ['a', 'b'])
  assert not any(np.allclose(one, other) for one, other in (
      (seen[0], seen[1]), (seen[0], seen[2]), (seen[0], both - seen[0])))


def test_a_model_that_keeps_clients_elsewhere_is_refused():
  class Remembering(tf.keras.layers.Layer):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def call(self, x):
      self.table.insert(tf.constant([0], tf.int64), [tf.reduce_sum(x)])
      return x + tf.reshape(self.table.lookup(tf.constant([0], tf.int64)), [])

  process = build(lambda: tf.keras.Sequential([
      tf.keras.layers.Input((3,)), Remembering(), tf.keras.layers.Dense(1)]))
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  with pytest.raises(rounds.ClientsFailedError, match='may keep one client\'s data'):
    answers(process, users, ['user2'])


def test_data_that_break_the_model_are_left_out_alone():
  """Word ids out of the table; and batches of another form."""
  model_fn = lambda: tf.keras.Sequential([
      tf.keras.layers.Input((2,), dtype='int32'), tf.keras.layers.Embedding(5, 3),
      tf.keras.layers.Flatten(), tf.keras.layers.Dense(1, kernel_initializer='ones')])

  def examples(largest, dtype=np.int32, width=2):
    return collections.OrderedDict(
        x=np.full([3, width], largest, dtype), y=np.ones([3, 1], np.float32))

  good = {f'good{i}': examples(i % 5) for i in range(5)}
  bad = {'id': examples(5), 'type': examples(1, np.int64), 'shape': examples(1, width=3)}
  process = build(model_fn, lambda: tf.keras.optimizers.SGD(0.1))
  users = tfdp.federated.Users({**good, **bad}, batch_size=2)
  state = tf.nest.map_structure(tf.constant, process.initialize())
  with process.reach(1, users) as engine:
    outcome = rounds.run(process, engine, state, users.client_ids)
    expected = rounds.run(process, engine, state, list(good))
  assert sorted(outcome.failed) == sorted(bad) and not expected.failed
  np.testing.assert_allclose(flat(outcome.answers), flat(expected.answers), rtol=1e-5, atol=1e-6)


def test_refusals():
  with pytest.raises(ValueError, match='`model_fn` must make a Keras model that has its weights'):
    build(lambda: tf.keras.Sequential([tf.keras.layers.Dense(1)]))
  with pytest.raises(ValueError, match='`metrics` must be Keras metrics'):
    build(noisy, metrics=['accuracy'])
  with pytest.raises(ValueError, match='`client_optimizer_fn` must be a Keras optimizer'):
    build(noisy, lambda: 'sgd')
  process = build(noisy)
  with pytest.raises(ValueError, match='`workers` must be a number of clients'):
    with process.reach(['host:80'], None):
      pass
  with pytest.raises(groups.NotInGroupsError):
    groups.specs(tf.TensorSpec([None, None]))
