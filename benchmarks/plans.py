# SPDX-License-Identifier: Apache-2.0
"""CPU time of the private steps that README teaches, over plain ones.

Usage: python benchmarks/plans.py > benchmarks/results/plans.txt

Both train by `fit`, the private ones on the batches of a plan, whose drawing, padding and
marking are measured with them; with a loss of Keras and with one of one's own; where a record
is a user, with batches of as many examples.
"""

import os
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

from clipping import models
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.cli import language_model

keras = compat.keras
STEPS, WARM, ROUNDS, BATCHES = 40, 20, 2, 20
EXAMPLES_PER_USER = 4
KERAS_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Clock(keras.callbacks.Callback):
  """CPU seconds per step after the first `WARM`."""

  def on_train_batch_begin(self, batch, logs=None):
    if batch == WARM:
      self._start = time.process_time()

  def on_train_batch_end(self, batch, logs=None):
    self.seconds = (time.process_time() - getattr(self, '_start', 0)) / max(1, batch + 1 - WARM)


def demo():
  """The model of `tfdp demo`: sentences of 1,002 words."""
  rng = np.random.default_rng(0)
  length, context, batch = language_model.next_word.LENGTH, language_model.next_word.CONTEXT, 256
  x = rng.integers(0, 1002, (batch, length, context), dtype=np.int32)
  y = rng.integers(0, 1002, (batch, length), dtype=np.int32)
  return models.Task(lambda unused: language_model.build(1002), x, y)


def own_loss(labels, logits):
  """Cross-entropy, as one would write it: [n], over the steps of a sequence their mean."""
  loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), logits)
  return tf.reduce_mean(tf.reshape(loss, [tf.shape(loss)[0], -1]), axis=1)


def measure(model, batches):
  clock = Clock()
  model.fit(batches, callbacks=[clock], verbose=0)
  return clock.seconds


def plain(task, train, loss):
  model = task.build(keras)
  model.compile(keras.optimizers.Adam(1e-3), loss=loss)
  return measure(model, tf.data.Dataset.from_tensor_slices(train).repeat().batch(
      len(task.x), drop_remainder=True).take(STEPS))


def private(task, train, loss, sampling, examples_per_user=None):
  """With users, a user has `examples_per_user` examples, and a batch as many as without."""
  each = examples_per_user or 1
  plan = tfdp.PrivacyPlan(
      population_size=len(train[0]) // each, batch_size=len(task.x) // each, steps=STEPS,
      l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-6, sampling=sampling,
      unit='user' if examples_per_user else 'example')
  model = tfdp.make_private(task.build(keras))
  model.compile(tfdp.DPAdam(1e-3, plan=plan), loss=loss)
  users = {} if not examples_per_user else {
      'users': np.arange(len(train[0])) // each, 'examples_per_user': each}
  return measure(model, plan.batches(train, **users))


def cases(task):
  train = tuple(np.concatenate([part] * BATCHES) for part in (task.x, task.y))
  poisson, fixed = tfdp.sampling.Poisson(), tfdp.sampling.FixedOrder()
  return {
      'plain, Keras loss': lambda: plain(task, train, KERAS_LOSS),
      'Poisson plan, Keras loss': lambda: private(task, train, KERAS_LOSS, poisson),
      'fixed order, Keras loss': lambda: private(task, train, KERAS_LOSS, fixed),
      'Poisson plan of users, Keras loss': lambda: private(
          task, train, KERAS_LOSS, poisson, EXAMPLES_PER_USER),
      'plain, own loss': lambda: plain(task, train, own_loss),
      'Poisson plan, own loss': lambda: private(task, train, own_loss, poisson)}


def main():
  print(f'TensorFlow {tf.__version__}; CPU ms per step of `fit`, the better of {ROUNDS} runs')
  tasks = {'demo': demo, 'mlp': models.mlp, 'cnn': models.cnn, 'lstm': models.lstm,
           'transformer': models.transformer}
  for name, make in tasks.items():
    task = make()
    print(f'\n{name}, batch {len(task.x)}', flush=True)
    seconds = {case: min(run() for _ in range(ROUNDS)) for case, run in cases(task).items()}
    for case, value in seconds.items():
      base = seconds[f'plain, {case.split(", ")[1]}']
      print(f'  {case:34} {1e3 * value:8.1f} {value / base:6.2f} x plain', flush=True)


if __name__ == '__main__':
  main()
