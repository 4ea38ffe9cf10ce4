# SPDX-License-Identifier: Apache-2.0
"""CPU time of a private step with a loss of one's own, over a plain one: the demo's model.

Usage: python benchmarks/own_loss.py > benchmarks/results/own_loss.txt

Both train by `fit`, the private one on the batches of a Poisson plan, whose drawing, padding
and marking are measured with it.
"""

import os
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.cli import language_model

keras = compat.keras
IDS, BATCH, STEPS, WARM, ROUNDS = 1002, 256, 40, 20, 2


class Clock(keras.callbacks.Callback):
  """CPU seconds per step after the first `WARM`."""

  def on_train_batch_begin(self, batch, logs=None):
    if batch == WARM:
      self._start = time.process_time()

  def on_train_batch_end(self, batch, logs=None):
    self.seconds = (time.process_time() - getattr(self, '_start', 0)) / max(1, batch + 1 - WARM)


def measure(model, batches):
  clock = Clock()
  model.fit(batches, callbacks=[clock], verbose=0)
  return clock.seconds


def data():
  rng = np.random.default_rng(0)
  length, context = language_model.next_word.LENGTH, language_model.next_word.CONTEXT
  x = rng.integers(0, IDS, (20 * BATCH, length, context), dtype=np.int32)
  return x, rng.integers(0, IDS, (20 * BATCH, length), dtype=np.int32)


def plain(train, loss):
  model = language_model.build(IDS)
  model.compile(keras.optimizers.Adam(1e-3), loss=loss)
  return measure(model, tf.data.Dataset.from_tensor_slices(train).repeat().batch(
      BATCH, drop_remainder=True).take(STEPS))


def private(train, loss, sampling):
  plan = tfdp.PrivacyPlan(
      population_size=len(train[0]), batch_size=BATCH, steps=STEPS, l2_norm_clip=1.0,
      noise_multiplier=1.0, target_delta=1e-6, sampling=sampling)
  model = tfdp.make_private(language_model.build(IDS))
  model.compile(tfdp.DPAdam(1e-3, plan=plan), loss=loss)
  return measure(model, plan.batches(train))


def main():
  train = data()
  own = language_model.sentence_loss
  known = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  rows = {'plain, own loss': lambda: plain(train, own),
          'Poisson plan, own loss': lambda: private(train, own, tfdp.sampling.Poisson()),
          'fixed order, own loss': lambda: private(train, own, tfdp.sampling.FixedOrder()),
          'plain, Keras loss': lambda: plain(train, known),
          'Poisson plan, Keras loss': lambda: private(train, known, tfdp.sampling.Poisson())}
  by_name = {name: min(run() for _ in range(ROUNDS)) for name, run in rows.items()}
  print(f'TensorFlow {tf.__version__}, batch {BATCH}, {IDS} words; CPU ms per step')
  for name, seconds in by_name.items():
    base = by_name['plain, Keras loss' if 'Keras' in name else 'plain, own loss']
    print(f'{name:28} {1e3 * seconds:8.1f} {seconds / base:6.2f} x plain')


if __name__ == '__main__':
  main()
