# SPDX-License-Identifier: Apache-2.0
"""KerasHub's models, small and random: sums of single records, and no layer one by one."""

import importlib.util

import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import explain
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.rules import kronecker

if not compat.KERAS_3 or importlib.util.find_spec('keras_hub') is None:
  pytest.skip('KerasHub is not installed.', allow_module_level=True)

import keras_hub  # pylint: disable=g-import-not-at-top

keras = compat.keras
models = keras_hub.models
N, LENGTH, WORDS = 4, 6, 19


def tokens(segments=False, prefix=''):
  rng = np.random.default_rng(0)
  mask = np.arange(LENGTH) < np.array([[LENGTH], [4], [3], [5]])
  x = {f'{prefix}token_ids': tf.constant(rng.integers(1, WORDS, (N, LENGTH)), tf.int32),
       f'{prefix}padding_mask': tf.constant(mask)}
  if segments:
    x['segment_ids'] = tf.constant(rng.integers(0, 2, (N, LENGTH)), tf.int32)
  return x


def bert():
  backbone = models.BertBackbone(
      vocabulary_size=WORDS, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=12,
      max_sequence_length=9, dropout=0.0)
  return backbone, models.BertTextClassifier(backbone, 3, dropout=0.0), tokens(segments=True)


def masked():
  backbone = models.BertBackbone(
      vocabulary_size=WORDS, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=12,
      max_sequence_length=9, dropout=0.0)
  x = dict(tokens(segments=True), mask_positions=tf.constant([[0, 2], [1, 3], [0, 1], [2, 4]]))
  return backbone, models.BertMaskedLM(backbone, preprocessor=None), x


def gpt2():
  backbone = models.GPT2Backbone(
      vocabulary_size=WORDS, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=12,
      max_sequence_length=9, dropout=0.0)
  return backbone, models.GPT2CausalLM(backbone, preprocessor=None), tokens()


def gemma():
  backbone = models.GemmaBackbone(
      vocabulary_size=WORDS, num_layers=1, num_query_heads=2, num_key_value_heads=1, hidden_dim=8,
      intermediate_dim=12, head_dim=4)
  return backbone, models.GemmaCausalLM(backbone, preprocessor=None), tokens()


def llama():
  backbone = models.LlamaBackbone(
      vocabulary_size=WORDS, num_layers=1, num_query_heads=2, num_key_value_heads=1, hidden_dim=8,
      intermediate_dim=12)
  return backbone, models.LlamaCausalLM(backbone, preprocessor=None), tokens()


def mistral():
  backbone = models.MistralBackbone(
      vocabulary_size=WORDS, num_layers=1, num_query_heads=2, num_key_value_heads=1, hidden_dim=8,
      intermediate_dim=12, sliding_window=5)
  return backbone, models.MistralCausalLM(backbone, preprocessor=None), tokens()


def t5():
  backbone = models.T5Backbone(
      vocabulary_size=WORDS, num_layers=2, num_heads=2, hidden_dim=8, intermediate_dim=12,
      key_value_dim=4, dropout=0.0)
  outputs = backbone.output['decoder_sequence_output']
  return backbone, keras.Model(backbone.input, keras.layers.Dense(3)(outputs)), dict(
      tokens(prefix='encoder_'), **tokens(prefix='decoder_'))


def vit():
  backbone = models.ViTBackbone(
      image_shape=(8, 8, 3), patch_size=(4, 4), num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=12)
  x = tf.constant(np.random.default_rng(0).normal(size=(N, 8, 8, 3)), tf.float32)
  return backbone, models.ViTImageClassifier(backbone, 3, preprocessor=None), x


MODELS = (bert, masked, gpt2, gemma, llama, mistral, t5, vit)


def made(make, lora):
  keras.utils.set_random_seed(0)
  backbone, model, x = make()
  if lora:
    if not hasattr(backbone, 'enable_lora'):
      pytest.skip('This backbone has no LoRA.')
    backbone.enable_lora(2)
  return oracle.randomized(model), x


@pytest.mark.parametrize('lora', [False, True])
@pytest.mark.parametrize('make', MODELS, ids=lambda make: make.__name__)
def test_sums_are_those_of_single_records(make, lora):
  model, x = made(make, lora)
  routes = {one.layer: one.route for one in explain.explain_clipping(model, x).layers}
  assert routes and 'one example at a time' not in routes.values(), routes
  batch = oracle.batch_of(x, model(x), mask=[True, True, False, True])
  records = oracle.gradients(model, oracle.squared_error, batch)
  scale = oracle.geometry(model)
  plain, scaled = (oracle.request(oracle.median_norm(records, s), s) for s in ((), scale))
  request = interface.Request(*[a + b for a, b in zip(plain, scaled)])
  clipped = tf.function(lambda: bookkeeping.engine(
      model, oracle.squared_error, batch, request), autograph=False)()
  oracle.assert_close(
      clipped.sums, oracle.by_definition(model, records, batch.mask, request), 2e-6)


def as_the_rules_see_them(shape):
  """The first axis of the right side."""
  count, d, _ = kronecker.matrices(shape, 512)
  return int(np.searchsorted(np.cumprod(shape), count * d)) + 1


@pytest.mark.parametrize('lora', [False, True])
@pytest.mark.parametrize('make', MODELS, ids=lambda make: make.__name__)
def test_sums_between_matrices_are_those_of_single_records(make, lora):
  model, x = made(make, lora)
  batch = oracle.batch_of(x, model(x), mask=[True, True, False, True])
  records = oracle.gradients(model, oracle.squared_error, batch)
  scale = oracle.kronecker(model, split=as_the_rules_see_them)
  assert any(isinstance(leaf, contract.Kronecker) for leaf in scale)
  ask = contract.Ask()
  norms = [projection.scaled_norm(ask, contract.Query(scale), g) for g in records]
  request = oracle.request(tf.constant(np.median(norms), tf.float32), scale)
  clipped = tf.function(lambda: bookkeeping.engine(
      model, oracle.squared_error, batch, request), autograph=False)()
  oracle.assert_close(
      clipped.sums, oracle.by_definition(model, records, batch.mask, request), 1e-5)
