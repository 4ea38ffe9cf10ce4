# SPDX-License-Identifier: Apache-2.0
"""KerasHub's tasks from a preset folder: strings in, private training, generated text."""

import dataclasses
import importlib.util

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import trees

keras = compat.keras
PLAN = tfdp.PrivacyPlan(
    population_size=32, batch_size=16, steps=12, l2_norm_clip=1.0, noise_multiplier=0.1,
    target_delta=1e-3, seed=1)


def test_a_weight_of_an_example_multiplies_those_of_its_tokens():
  factor = tf.constant([[1.0, 0.25], [0.0, 3.0], [1.0, 1.0]])
  plain = trees.scaled(tf.constant([2.0, 1.0, 1.0]), factor)
  np.testing.assert_array_equal(plain, [[2, 0.5], [0, 3], [1, 1]])


TEXTS = np.array(['ab ab ab', 'ba ba', 'ab ab', 'ba ba ba'] * 8)


@pytest.fixture(scope='module')
def preset(tmp_path_factory):
  """A folder with a language model of two letters, random weights."""
  if not compat.KERAS_3 or importlib.util.find_spec('keras_hub') is None:
    pytest.skip('KerasHub is not installed.')
  import keras_hub  # pylint: disable=g-import-not-at-top
  keras.utils.set_random_seed(0)
  letters = ['<|endoftext|>', 'a', 'b', '\u0120', '\u0120a', '\u0120b', 'ab', 'ba']
  tokenizer = keras_hub.tokenizers.GPT2Tokenizer(
      vocabulary={letter: i for i, letter in enumerate(letters)}, merges=['\u0120 a', '\u0120 b',
                                                                         'a b', 'b a'])
  backbone = keras_hub.models.GPT2Backbone(
      vocabulary_size=len(letters), num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=12,
      max_sequence_length=8, dropout=0.0)
  preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
  folder = str(tmp_path_factory.mktemp('preset') / 'letters')
  keras_hub.models.GPT2CausalLM(backbone, preprocessor).save_to_preset(folder)
  return folder


def test_fine_tuning_on_strings_lowers_the_loss_then_generates_and_is_saved(preset, tmp_path):
  import keras_hub  # pylint: disable=g-import-not-at-top
  task = keras_hub.models.GPT2CausalLM.from_preset(preset)
  model = tfdp.make_private(task)
  assert model.preprocessor is task.preprocessor and model.backbone is task.backbone
  model.compile(tfdp.DPAdam(0.05, plan=PLAN, seed=2),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  losses = model.fit(PLAN.batches(TEXTS), steps_per_epoch=4, epochs=3, verbose=0).history['loss']
  assert losses[-1] < 0.8 * losses[0]
  assert model.optimizer.steps_done == 12
  text = model.generate('ab', max_length=6)
  assert isinstance(text, str) and text.startswith('ab')
  assert text == task.generate('ab', max_length=6)  # One set of weights.
  with pytest.raises(NotImplementedError, match=r'`model.save_to_preset\(folder\)`'):
    model.save(tmp_path / 'task.keras')
  folder = tmp_path / 'trained'
  model.save_to_preset(str(folder))
  read = keras_hub.models.GPT2CausalLM.from_preset(str(folder))
  assert read.generate('ab', max_length=6) == text
  assert tfdp.Ledger.from_json((folder / 'tfdp_ledger.json').read_text()) == model.ledger
  model.save_weights(tmp_path / 'trained.weights.h5')
  again = tfdp.make_private(read)
  again.load_weights(tmp_path / 'trained.weights.h5')
  assert again.ledger == model.ledger and again.generate('ab', max_length=6) == text


@pytest.mark.slow
def test_strings_of_users_are_the_same_as_what_the_preprocessor_makes_of_them(preset):
  import keras_hub  # pylint: disable=g-import-not-at-top
  plan = dataclasses.replace(PLAN, population_size=8, batch_size=4, steps=1, unit='user')
  users, trained = np.arange(len(TEXTS)) // 4, []
  for prepared in (False, True):
    task = keras_hub.models.GPT2CausalLM.from_preset(preset)
    data = TEXTS
    if prepared:
      data = tf.nest.map_structure(np.array, task.preprocessor(list(TEXTS)))
      task = keras_hub.models.GPT2CausalLM(task.backbone, preprocessor=None)
    model = tfdp.make_private(task)
    model.compile(tfdp.DPAdam(0.05, plan=plan, seed=2),
                  loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(plan.batches(data, users=users, examples_per_user=3), verbose=0)
    trained.append(model.get_weights())
  for one, other in zip(*trained):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_classifier_takes_strings_and_labels(preset):
  import keras_hub  # pylint: disable=g-import-not-at-top
  words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'ab', 'ba']
  preprocessor = keras_hub.models.BertTextClassifierPreprocessor(
      keras_hub.tokenizers.BertTokenizer(vocabulary=words), sequence_length=6)
  backbone = keras_hub.models.BertBackbone(
      vocabulary_size=len(words), num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=12,
      max_sequence_length=8, dropout=0.0)
  model = tfdp.make_private(keras_hub.models.BertTextClassifier(
      backbone, 2, preprocessor=preprocessor, dropout=0.0))
  model.compile(tfdp.DPAdam(0.05, plan=PLAN, seed=2), metrics=['accuracy'],
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  labels = np.arange(32) % 2
  validation = tf.data.Dataset.from_tensor_slices((TEXTS, labels)).batch(5)
  history = model.fit(PLAN.batches((TEXTS, labels)), steps_per_epoch=6, epochs=2, verbose=0,
                      validation_data=validation).history
  np.testing.assert_allclose(
      history['val_accuracy'][-1], model.evaluate(TEXTS, labels, verbose=0)[1], rtol=1e-6)
  assert model.optimizer.steps_done == 12
  guesses = model.predict(TEXTS, verbose=0).argmax(1)
  held_out = (np.append(TEXTS, TEXTS[guesses != labels]), np.append(
      labels, labels[guesses != labels]))  # Other shares than a half.
  expected = np.mean(model.predict(held_out[0], verbose=0).argmax(1) == held_out[1])
  np.testing.assert_allclose(model.evaluate(*held_out, 8, 0)[1], expected, rtol=1e-6)
  np.testing.assert_allclose(model.test_on_batch(*held_out)[1], expected, rtol=1e-6)
  np.testing.assert_array_equal(model.predict_on_batch(list(TEXTS)).argmax(1), guesses)
  with pytest.raises(NotImplementedError, match='save_to_preset'):
    model.get_config()


def test_a_task_without_preprocessor_is_validated_on_what_it_was_given():
  kind = type('Task', (keras.Model,), {'__module__': 'keras_hub.mine', 'preprocessor': None})
  entry = keras.Input([3])
  model = tfdp.make_private(kind(entry, keras.layers.Dense(1)(entry)))
  plan = dataclasses.replace(PLAN, steps=1)
  model.compile(tfdp.DPSGD(0.0, plan=plan), loss='mse')
  x, y = np.ones([32, 3], np.float32), np.full([32, 1], 5.0, np.float32)
  history = model.fit(plan.batches((x, y)), validation_data=(x, y), verbose=0).history
  np.testing.assert_allclose(
      history['val_loss'], np.mean((model.predict(x, verbose=0) - y)**2), rtol=1e-5)
