# SPDX-License-Identifier: Apache-2.0
"""KerasHub's models, full and with LoRA: what a private `fit` step costs over a plain one.

Usage: python benchmarks/speed/keras_hub_table.py [--memory] [model ...]

Small models with random weights, both trained by `fit` with Keras' Adam and `tfdp.DPAdam`
in one process, in turns; CPU seconds per step, the smallest of a few. The error is that of a
clipped sum against gradients one by one. Memory is the most that a process of its own had
resident, TensorFlow itself and tracing included.
"""

import os
import subprocess
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
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.independence import validation

WORDS, LENGTH, BATCH, WIDTH, LAYERS = 2000, 64, 16, 128, 2
STEPS, ROUNDS, CLIP = 6, 3, 0.01
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
    self.seconds = (time.process_time() - self._start) / STEPS


def made(name, lora):
  keras.utils.set_random_seed(0)
  backbone, model, x, y = MODELS[name]()
  if lora:
    backbone.enable_lora(4)
  return backbone, model, x, y


def private_of(model):
  validation.validate_model = lambda *_: None  # Once per model: no part of a step.
  return tfdp.make_private(model)


def private_optimizer():
  return tfdp.DPAdam(1e-3, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=BATCH)


def compile_with(model, optimizer):
  model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def step_seconds(models, data):
  """CPU seconds per step of each model, in turns; the smallest of a few."""
  seconds = [1e9] * len(models)
  for number in range(1 + ROUNDS):
    for i, model in enumerate(models):
      clock = Clock()
      model.fit(data, epochs=1, steps_per_epoch=STEPS, callbacks=[clock], verbose=0)
      if number:  # The first one traces.
        seconds[i] = min(seconds[i], clock.seconds)
  return seconds


def request(model):
  del model
  return interface.Request((contract.Ask(),), (contract.Query(),), (tf.constant(CLIP),))


def peak(name, lora, private):
  """MiB resident at most in a process of its own that trains for a few steps."""
  kind = '--private' if private else '--plain'
  arguments = ['--peak', name, '--lora' if lora else '--full', kind]
  done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True,
                        check=True)
  return int(done.stdout.split()[-1])


def print_peak(name, trains, kind):
  """What `peak` runs in the other process."""
  _, model, x, y = made(name, trains == '--lora')
  optimizer = keras.optimizers.Adam(1e-3)
  if kind == '--private':
    model, optimizer = private_of(model), private_optimizer()
  compile_with(model, optimizer)
  data = tf.data.Dataset.from_tensors((x, y)).repeat()
  model.fit(data, epochs=1, steps_per_epoch=STEPS, verbose=0)
  with open('/proc/self/status', encoding='ascii') as status:  # `getrusage` inherits its peak.
    sizes = dict(line.split(':', 1) for line in status)
  print(int(sizes['VmHWM'].split()[0]) // 1024)


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
  _, model, x, y = made(name, lora)
  data = tf.data.Dataset.from_tensors((x, y)).repeat()
  routes = {}
  for one in explain.explain_clipping(model, x).layers:
    routes[one.route] = routes.get(one.route, 0) + 1
  error = oracle_error(model, x, y, sparse)
  private = private_of(model)
  compile_with(model, keras.optimizers.Adam(1e-3))
  compile_with(private, private_optimizer())
  plain_cost, cost = step_seconds([model, private], data)
  ways = ', '.join(f'{count} {route}' for route, count in sorted(routes.items()))
  print(f'{name:8} {way(lora):5} {1e3 * plain_cost:8.0f} {1e3 * cost:9.0f} '
        f'{cost / plain_cost:6.2f} {error:9.1e}  {ways}', flush=True)


def memory_row(name, lora):
  plain, private = peak(name, lora, False), peak(name, lora, True)
  print(f'{name:8} {way(lora):5} {plain:10d} {private:13d} {private / plain:6.2f}', flush=True)


def way(lora):
  return 'LoRA' if lora else 'full'


def main():
  if sys.argv[1:2] == ['--peak']:
    print_peak(*sys.argv[2:])
    return
  memory = '--memory' in sys.argv
  names = [one for one in sys.argv[1:] if one != '--memory'] or list(MODELS)
  print(f'TensorFlow {tf.__version__}, Keras {keras.__version__}, KerasHub '
        f'{keras_hub.__version__}; {LAYERS} layers of width {WIDTH}, {LENGTH} tokens, {WORDS} '
        f'words, batch {BATCH}')
  print('model    way   plain, MiB  private, MiB  ratio' if memory else
        'model    way   plain, ms  private, ms  ratio     error  layers by route')
  for name in names:
    for lora in (False, True):
      if not lora or hasattr(MODELS[name]()[0], 'enable_lora'):
        (memory_row if memory else row)(name, lora)


if __name__ == '__main__':
  main()
