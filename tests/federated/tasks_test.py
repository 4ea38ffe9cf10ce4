# SPDX-License-Identifier: Apache-2.0
"""Every task trains privately for a round and has metrics that are right by hand."""

import collections
import importlib

import numpy as np
import pytest
import tensorflow as tf
import user_sources_test

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.examples import corpus
from tfdp_adaptive.examples import federated_tasks
from tfdp_adaptive.examples import tag_prediction
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
      tf.keras.layers.Input((20,), dtype=tf.int32), tf.keras.layers.Embedding(num_ids, 12),
      tf.keras.layers.Dense(num_ids, kernel_initializer='zeros')])


@pytest.mark.thorough
def test_next_word():
  sentences = [corpus.Sentence(f'client{i % 40}', tuple('abcdefgh'[j % 8] for j in range(i, i + 6)))
               for i in range(200)]
  task = federated_tasks.next_word(sentences, tuple('abcdefgh'), build_model)
  assert task.items == (12,) and 25 < len(task.users.client_ids) < 40
  metrics = tfdp.federated.PrivateMetrics({'word_loss': (0.0, 5.0), 'accuracy': (0.0, 1.0)})
  start, end = train(task, rounds=6, private_metrics=metrics)
  assert start['word_loss'] == pytest.approx(np.log(12), rel=1e-5)  # Padding does not count.
  assert start['loss'] == pytest.approx(np.log(12), rel=1e-5)
  assert end['word_loss'] < start['word_loss'] - 0.1
  assert 0 <= end['accuracy'] <= 1 and 0 <= end['private/accuracy'] <= 1
  assert end['private/clients'] > 0
  only = federated_tasks.next_word(
      sentences, tuple('abcdefg'), build_model, predict_unknown=False)
  for client in task.users.client_ids:
    for given, kept in zip(task.users.batches(client), only.users.batches(client)):
      known = given['y'] <= 7
      np.testing.assert_array_equal(kept['y'][known], given['y'][known])
      assert set(kept['y'][given['y'] == 8]) <= {0}


@pytest.mark.thorough
def test_tag_prediction():
  questions = [tag_prediction.Question(f'client{i % 50}', ('red', 'apple') if i % 2 else ('sea',),
                                       ('fruit',) if i % 2 else ('water',)) for i in range(200)]
  tags = ('fruit', 'water', 'air', 'x', 'y', 'z')
  task = federated_tasks.tag_prediction(questions, ('red', 'apple', 'sea'), tags)
  start, end = train(task, rounds=8)
  assert start['loss'] == pytest.approx(6 * np.log(2), rel=1e-5)
  assert end['loss'] < start['loss'] - 1 and end['precision_at_1'] > 0.9


SENTENCES = {'ann': ['the cat sat', 'the dog'], 'bob': ['a cat'], 'cem': ['sat the sat zebra the']}


@pytest.fixture(name='file')
def _file(tmp_path):
  """As TFF's: with features that are not used."""
  feature = lambda text: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
  path = tmp_path / 'stackoverflow.sqlite'
  user_sources_test.write(path, [
      (split, user + split[:1], tf.train.Example(features=tf.train.Features(feature={
          'tokens': feature(text), 'title': feature('none')})).SerializeToString())
      for split in ('train', 'heldout') for user, mine in SENTENCES.items() for text in mine])
  return path


@pytest.mark.thorough
def test_stackoverflow(file):
  task = tasks.stackoverflow(file, ('the', 'cat', 'sat'), length=4, max_examples=2,
                             build_model=lambda num_ids: tf.keras.Sequential([
                                 tf.keras.layers.Input([4], dtype=tf.int32),
                                 tf.keras.layers.Embedding(num_ids, 8),
                                 tf.keras.layers.Dense(num_ids, kernel_initializer='zeros')]))
  assert task.users.client_ids == ['annt', 'bobt', 'cemt'] and task.items == (7,)
  (ann,), (cem,) = task.users.batches('annt'), task.users.batches('cemt')
  # 1 the, 2 cat, 3 sat; 4 another word, 5 the beginning, 6 the end.
  np.testing.assert_array_equal(ann['x'], [[5, 1, 2, 3], [5, 1, 4, 6]])
  np.testing.assert_array_equal(ann['y'], [[1, 2, 3, 6], [1, 4, 6, 0]])
  np.testing.assert_array_equal(cem['y'], [[3, 1, 3, 4]])
  assert sum(len(batch['x']) for batch in task.held_out) == 4
  start, end = train(task, rounds=6)
  assert start['word_loss'] == pytest.approx(np.log(7), rel=1e-5)
  assert end['word_loss'] < start['word_loss'] - 0.1
  # The first of equal logits is 0: padding. Then: all words are predicted to be 1.
  accuracy = task.metrics[0]()
  accuracy.update_state(ann['y'], tf.one_hot(np.ones_like(ann['y']), 7))
  assert float(accuracy.result()) == pytest.approx(2 / 4)  # 1 2 3 . | 1 . . .
  words = tasks.stackoverflow_words(file)
  assert {user: list(mine) for user, mine in words.items()}['annt'] == [
      'the', 'cat', 'sat', 'the', 'dog']
  chosen = tfdp.federated.vocabulary.private_vocabulary(
      words, 3, noise_multiplier=0.01, delta=1e-3, seed=0)
  assert tasks.stackoverflow(file, chosen, length=4).items[0] == len(chosen.words) + 4


def test_the_usual_model_of_stackoverflow(file):
  model = tasks.stackoverflow(file, [f'word{i}' for i in range(10_000)]).model_fn()
  assert model.count_params() == 4_050_748


def feature(values):
  if isinstance(values, int):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[values]))
  kind = 'float_list' if values.dtype.kind == 'f' else 'int64_list'
  return tf.train.Feature(**{kind: {'value': values.ravel().tolist()}})


IMAGES = {
    'emnist': ('pixels', lambda rng: rng.random((28, 28)).astype(np.float32), 62, 1_206_590),
    'cifar100': ('image', lambda rng: rng.integers(0, 256, (32, 32, 3)), 100, 11_220_132)}


@pytest.mark.thorough(but=['emnist'])
@pytest.mark.parametrize('name', IMAGES)
def test_images_in_files_of_tff(name, tmp_path):
  field, draw, classes, parameters = IMAGES[name]
  rng, path = np.random.default_rng(0), tmp_path / f'{name}.sqlite'
  drawn = {(split, user): [(draw(rng), 7 * user + i) for i in range(3)]
           for split in ('train', 'test') for user in range(2)}
  user_sources_test.write(path, [
      (split, f'u{user}', tf.train.Example(features=tf.train.Features(feature={
          field: feature(image), 'label': feature(label), 'coarse_label': feature(1),
      })).SerializeToString()) for (split, user), mine in drawn.items() for image, label in mine])
  make = getattr(federated_tasks, name)
  usual = make(path)
  assert usual.items == (classes,) and usual.model_fn().count_params() == parameters
  task = make(path, lambda classes: tf.keras.Sequential([
      tf.keras.layers.Input(usual.held_out.element_spec['x'].shape[1:]), tf.keras.layers.Flatten(),
      tf.keras.layers.Dense(classes, kernel_initializer='zeros')]), batch_size=2, held_out_users=1)
  first, second = task.users.batches('u1')
  assert first['y'].tolist() + second['y'].tolist() == [7, 8, 9]
  image = drawn['train', 1][2][0].reshape(second['x'][0].shape)
  expected = image if name == 'emnist' else (image - image.mean()) / image.std()
  np.testing.assert_allclose(second['x'][0], expected, atol=1e-5)
  assert [batch['y'].numpy().tolist() for batch in task.held_out] == [[0, 1, 2]]
  start, end = train(task, rounds=1)
  assert start['loss'] == pytest.approx(np.log(classes), rel=1e-5)
  assert np.isfinite(end['loss']) and end['loss'] != start['loss'] and 0 <= end['accuracy'] <= 1


@pytest.mark.federated
def test_ids_of_stackoverflow_are_those_of_tff(file):
  constants = importlib.import_module('tensorflow_federated.python.simulation.baselines')
  prepare = constants.stackoverflow.word_prediction_preprocessing.create_preprocess_fn(
      constants.ClientSpec(num_epochs=1, batch_size=9), ['the', 'cat', 'sat'], sequence_length=4)
  task = tasks.stackoverflow(file, ('the', 'cat', 'sat'), length=4)
  for user, mine in SENTENCES.items():
    ((x, y),) = prepare(tf.data.Dataset.from_tensor_slices({'tokens': mine})).as_numpy_iterator()
    (batch,) = task.users.batches(user + 't')
    ours = sorted(map(tuple, np.concatenate([batch['x'], batch['y']], axis=1).tolist()))
    assert ours == sorted(map(tuple, np.concatenate([x, y], axis=1).tolist()))


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
