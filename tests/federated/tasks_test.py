# SPDX-License-Identifier: Apache-2.0
"""Every task trains privately for a round and has metrics that are right by hand."""

import collections
import importlib

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.data import corpus
from tfdp_adaptive.data import tag_prediction
from tfdp_adaptive.federated import tasks


def train(task, rounds=2, **kwargs):
  population = len(task.users.client_ids)
  plan = tfdp.PrivacyPlan(
      batch_size=min(4, population), steps=rounds, l2_norm_clip=1.0, noise_multiplier=0.0,
      target_delta=1e-3, population_size=population, unit='user', seed=1)
  process = tfdp.federated.build_private_fed_avg(
      task.model_fn, server_rule=rules.dp_adam(), plan=plan, server_learning_rate=0.1,
      seed=1, **{**dict(client_optimizer_fn=tf.keras.optimizers.SGD(0.5), loss=task.loss,
                        metrics=task.metrics), **kwargs})
  evaluate = tfdp.federated.evaluator(
      task.model_fn, task.held_out, loss=task.loss, metrics=task.metrics)
  start = evaluate(process.get_model_weights(process.initialize()))
  result = tfdp.federated.simulate(process, task.users, evaluate=evaluate, progress=False)
  return start, result.history[-1]


def build_model(num_ids):
  return tf.keras.Sequential([
      tf.keras.layers.Input((20, 3), dtype=tf.int32), tf.keras.layers.Embedding(num_ids, 4),
      tf.keras.layers.Reshape((20, 12)),
      tf.keras.layers.Dense(num_ids, kernel_initializer='zeros')])


def test_next_word():
  sentences = [corpus.Sentence(f'client{i % 40}', tuple('abcdefgh'[j % 8] for j in range(i, i + 6)))
               for i in range(200)]
  task = tasks.next_word(sentences, tuple('abcdefgh'), build_model)
  assert task.items == (10,) and 25 < len(task.users.client_ids) < 40
  metrics = tfdp.federated.PrivateMetrics({'word_loss': (0.0, 5.0), 'accuracy': (0.0, 1.0)})
  start, end = train(task, rounds=6, private_metrics=metrics)
  assert start['word_loss'] == pytest.approx(np.log(10), rel=1e-5)  # Padding does not count.
  assert start['loss'] == pytest.approx(np.log(10), rel=1e-5)
  assert end['word_loss'] < start['word_loss'] - 0.1
  assert 0 <= end['accuracy'] <= 1 and 0 <= end['private/accuracy'] <= 1
  assert end['private/clients'] > 0


def test_tag_prediction():
  questions = [tag_prediction.Question(f'client{i % 50}', ('red', 'apple') if i % 2 else ('sea',),
                                       ('fruit',) if i % 2 else ('water',)) for i in range(200)]
  tags = ('fruit', 'water', 'air', 'x', 'y', 'z')
  task = tasks.tag_prediction(questions, ('red', 'apple', 'sea'), tags)
  start, end = train(task, rounds=8)
  assert start['loss'] == pytest.approx(6 * np.log(2), rel=1e-5)
  assert end['loss'] < start['loss'] - 1 and end['precision_at_1'] > 0.9


@pytest.mark.federated
@pytest.mark.parametrize('kind', ['word', 'tag'])
def test_stackoverflow_of_tff(kind, worker):
  """Its synthetic users: for shapes only."""
  del worker
  tff = importlib.import_module('tensorflow_federated')
  stackoverflow = tff.simulation.baselines.stackoverflow
  spec = tff.simulation.baselines.ClientSpec(num_epochs=1, batch_size=4, max_elements=8)
  baseline = (
      stackoverflow.create_word_prediction_task(
          spec, sequence_length=5, vocab_size=20, use_synthetic_data=True) if kind == 'word'
      else stackoverflow.create_tag_prediction_task(
          spec, word_vocab_size=20, tag_vocab_size=5, use_synthetic_data=True))
  task = tasks.from_baseline(baseline)
  start, end = train(
      task, rounds=1, client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.5))
  assert np.isfinite(end['loss']) and end['loss'] != start['loss']


def test_users_cap_shuffle_and_repeat():
  examples = {'a': collections.OrderedDict(x=np.arange(10), y=-np.arange(10)),
              'b': collections.OrderedDict(x=np.arange(3), y=-np.arange(3))}
  users = tfdp.federated.Users(examples, batch_size=2, epochs=2, max_examples=4)
  assert users.client_ids == ['a', 'b']
  seen = []
  for _ in range(5):
    batches = list(users.create_tf_dataset_for_client('a'))
    x = np.concatenate([b['x'] for b in batches])
    np.testing.assert_array_equal(x, -np.concatenate([b['y'] for b in batches]))
    assert len(x) == 8 and len(set(x)) == 4  # Twice the same four.
    seen.append(tuple(sorted(set(x))))
  assert len(set(seen)) > 1  # Drawn again in every round.
  assert sum(len(b['x']) for b in users.create_tf_dataset_for_client('b')) == 6
  assert sum(len(b['x']) for b in users.all_examples()) == 13
  with pytest.raises(ValueError, match='one user at least'):
    tfdp.federated.Users({}, batch_size=2)
