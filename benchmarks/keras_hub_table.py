# SPDX-License-Identifier: Apache-2.0
"""KerasHub's models, full and with LoRA: what a private `fit` step costs over a plain one.

Usage: python benchmarks/keras_hub_table.py [model ...] >> benchmarks/results/keras_hub.txt

Small models with random weights, both trained by `fit` with Keras' Adam and `tfdp.DPAdam`
in one process; CPU seconds per step, the smallest of a few. Memory is estimated from the
traced computations. The error is that of a clipped sum against gradients one by one.
"""

import os
import sys
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import keras
import keras_hub
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import contract
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import explain
from tfdp_adaptive.clipping import footprint
from tfdp_adaptive.clipping import interface

WORDS, LENGTH, BATCH, WIDTH, LAYERS = 2000, 64, 16, 128, 2
STEPS, ROUNDS, CLIP = 6, 2, 0.01
SIZES = dict(vocabulary_size=WORDS, num_layers=LAYERS, hidden_dim=WIDTH, intermediate_dim=4 * WIDTH)
GROUPED = dict(SIZES, num_query_heads=4, num_key_value_heads=2)
hub = keras_hub.models


def tokens(prefix='', segments=False):
  rng = np.random.default_rng(0)
  x = {f'{prefix}token_ids': rng.integers(1, WORDS, (BATCH, LENGTH)).astype('int32'),
       f'{prefix}padding_mask': np.ones((BATCH, LENGTH), bool)}
  if segments:
    x['segment_ids'] = np.zeros((BATCH, LENGTH), 'int32')
  return x


def language(backbone, task):
  y = np.random.default_rng(1).integers(0, WORDS, (BATCH, LENGTH))
  return backbone, task(backbone, preprocessor=None), tokens(), y


def bert():
  backbone = hub.BertBackbone(num_heads=4, max_sequence_length=LENGTH, dropout=0.0, **SIZES)
  y = np.arange(BATCH) % 3
  return backbone, hub.BertTextClassifier(backbone, 3, dropout=0.0), tokens(segments=True), y


def gpt2():
  return language(hub.GPT2Backbone(num_heads=4, max_sequence_length=LENGTH, dropout=0.0, **SIZES),
                  hub.GPT2CausalLM)


def gemma():
  return language(hub.GemmaBackbone(head_dim=32, **GROUPED), hub.GemmaCausalLM)


def llama():
  return language(hub.LlamaBackbone(**GROUPED), hub.LlamaCausalLM)


def mistral():
  return language(hub.MistralBackbone(sliding_window=32, **GROUPED), hub.MistralCausalLM)


def t5():
  backbone = hub.T5Backbone(num_heads=4, key_value_dim=32, dropout=0.0, **SIZES)
  outputs = keras.layers.Dense(3)(backbone.output['decoder_sequence_output'])
  y = np.random.default_rng(1).integers(0, 3, (BATCH, LENGTH))
  return backbone, keras.Model(backbone.input, outputs), dict(
      tokens('encoder_'), **tokens('decoder_')), y


def vit():
  backbone = hub.ViTBackbone(image_shape=(32, 32, 3), patch_size=(4, 4), num_layers=LAYERS,
                             num_heads=4, hidden_dim=WIDTH, mlp_dim=4 * WIDTH)
  x = np.random.default_rng(0).normal(size=(BATCH, 32, 32, 3)).astype('float32')
  return (backbone, hub.ViTImageClassifier(backbone, 3, preprocessor=None), x, np.arange(BATCH) % 3)


MODELS = dict(bert=bert, gpt2=gpt2, gemma=gemma, llama=llama, mistral=mistral, t5=t5, vit=vit)


class Clock(keras.callbacks.Callback):

  def on_epoch_begin(self, epoch, logs=None):
    self._start = time.process_time()

  def on_epoch_end(self, epoch, logs=None):
    if epoch:  # The first one traces.
      self.seconds = min(getattr(self, 'seconds', 1e9), (time.process_time() - self._start) / STEPS)


def step_seconds(model, data, optimizer):
  model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  clock = Clock()
  model.fit(data, epochs=1 + ROUNDS, steps_per_epoch=STEPS, callbacks=[clock], verbose=0)
  return clock.seconds


def request(model):
  del model
  return interface.Request((contract.Ask(),), (contract.Query(),), (tf.constant(CLIP),))


def memory(model, x, y, loss):
  """Estimated bytes of the engine's work over those of a plain gradient."""
  specs = tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape, tf.as_dtype(t.dtype)), (x, y))

  def plain(batch):
    with tf.GradientTape() as tape:
      value = tf.reduce_mean(loss(batch[1], model(batch[0], training=True)))
    return [tf.convert_to_tensor(g) for g in tape.gradient(
        value, [v.value for v in model.trainable_variables])]

  def private(batch):
    mask = tf.ones([BATCH], tf.bool)
    return bookkeeping.engine(
        model, lambda y, o, w: loss(y, o), interface.Batch(*batch, (), mask), request(model)).sums

  return footprint.peak(private, specs) / footprint.peak(plain, specs)


def oracle_error(model, x, y, loss, count=3):
  part = lambda tree, rows: tf.nest.map_structure(lambda t: tf.constant(t[rows]), tree)
  mask = tf.ones([count], tf.bool)
  batch = interface.Batch(part(x, slice(0, count)), part(y, slice(0, count)), (), mask)
  total = tf.function(lambda: bookkeeping.engine(
      model, lambda y, o, w: loss(y, o), batch, request(model)).sums[0].total, autograph=False)()

  @tf.function(autograph=False)
  def one(x, y):
    with tf.GradientTape() as tape:
      value = loss(y, model(x, training=True))
    return [tf.convert_to_tensor(g) for g in tape.gradient(
        value, [v.value for v in model.trainable_variables])]

  expected = None
  for i in range(count):
    gradient = one(part(x, slice(i, i + 1)), part(y, slice(i, i + 1)))
    clipped, _ = tf.clip_by_global_norm(gradient, CLIP)
    expected = clipped if expected is None else [a + b for a, b in zip(expected, clipped)]
  error = tf.linalg.global_norm([a - b for a, b in zip(total, expected)])
  return float(error / tf.linalg.global_norm(expected))


def sparse(y, outputs):
  """[n] means of cross-entropies over whatever axes there are."""
  values = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), outputs)
  return tf.reduce_mean(tf.reshape(values, [tf.shape(values)[0], -1]), 1)


def row(name, lora):
  keras.utils.set_random_seed(0)
  backbone, model, x, y = MODELS[name]()
  if lora:
    backbone.enable_lora(4)
  data = tf.data.Dataset.from_tensors((x, y)).repeat()
  routes = {}
  for one in explain.explain_clipping(model, x).layers:
    routes[one.route] = routes.get(one.route, 0) + 1
  error, bytes_ratio = oracle_error(model, x, y, sparse), memory(model, x, y, sparse)
  plain = step_seconds(model, data, keras.optimizers.Adam(1e-3))
  private = tfdp.make_private(model)
  private._validate = lambda x: None  # Once per model: no part of a step.
  cost = step_seconds(private, data, tfdp.DPAdam(
      1e-3, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=BATCH))
  ways = ', '.join(f'{count} {route}' for route, count in sorted(routes.items()))
  print(f'{name:8} {"LoRA" if lora else "full":5} {1e3 * plain:8.0f} {1e3 * cost:9.0f} '
        f'{cost / plain:6.2f} {bytes_ratio:7.2f} {error:9.1e}  {ways}', flush=True)


def main():
  names = sys.argv[1:] or list(MODELS)
  print(f'TensorFlow {tf.__version__}, Keras {keras.__version__}, KerasHub '
        f'{keras_hub.__version__}; {LAYERS} layers of width {WIDTH}, {LENGTH} tokens, {WORDS} '
        f'words, batch {BATCH}')
  print('model    way   plain, ms  private, ms  ratio  memory     error  layers by route')
  for name in names:
    for lora in (False, True):
      if not lora or hasattr(MODELS[name]()[0], 'enable_lora'):
        row(name, lora)


if __name__ == '__main__':
  main()
