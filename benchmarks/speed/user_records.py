# SPDX-License-Identifier: Apache-2.0
"""What a private `fit` step costs whose records are users, over one of as many examples.

Usage: python benchmarks/speed/user_records.py >> benchmarks/results/user_records.txt

CPU seconds per step with `tfdp.DPAdam` of the same examples: as records of their own, and
as users of several each, whose gradients are added up before they are clipped.
"""

import os
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras
layers = keras.layers
EXAMPLES, STEPS, ROUNDS = 64, 4, 4


def perceptron():
  model = keras.Sequential([keras.Input([784]), layers.Dense(512, 'relu'), layers.Dense(10)])
  return model, np.random.default_rng(0).normal(size=(EXAMPLES, 784)).astype('float32')


def convolutions():
  model = keras.Sequential([
      keras.Input([28, 28, 1]), layers.Conv2D(16, 8, 2, 'same', activation='relu'),
      layers.MaxPool2D(2, 1), layers.Conv2D(32, 4, 2, activation='relu'), layers.MaxPool2D(2, 1),
      layers.Flatten(), layers.Dense(32, 'relu'), layers.Dense(10)])
  return model, np.random.default_rng(0).normal(size=(EXAMPLES, 28, 28, 1)).astype('float32')


def transformer():
  words = keras.Input([32], dtype='int32')
  x = layers.Embedding(1000, 64)(words)
  for _ in range(2):
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(256, 'relu')(x)))
  model = keras.Model(words, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
  return model, np.random.default_rng(0).integers(0, 1000, (EXAMPLES, 32)).astype('int32')


def step_seconds(model, x, y, of_user):
  """Of batches of all examples, `of_user` a user; 0 for records of their own."""
  records = EXAMPLES // max(of_user, 1)
  plan = tfdp.PrivacyPlan(
      population_size=records, batch_size=records, steps=STEPS * (1 + ROUNDS), l2_norm_clip=1.0,
      noise_multiplier=1.0, target_delta=1e-3, unit='user' if of_user else 'example',
      sampling=tfdp.sampling.FixedOrder())
  users = dict(users=np.arange(EXAMPLES) // of_user, examples_per_user=of_user) if of_user else {}
  private = tfdp.make_private(model)
  private._validate = lambda x: None  # Once per model: no part of a step.
  private.compile(tfdp.DPAdam(1e-3, plan=plan), loss=keras.losses.SparseCategoricalCrossentropy(
      from_logits=True))
  seconds = []
  batches = list(plan.batches((x, y), **users))
  for i in range(0, len(batches), STEPS):
    start = time.process_time()
    for one in batches[i:i + STEPS]:
      private.train_on_batch(*one)
    seconds.append((time.process_time() - start) / STEPS)
  return min(seconds[1:])  # The first round traces.


def main():
  print(f'TensorFlow {tf.__version__}, Keras {keras.__version__}; {EXAMPLES} examples a step; '
        'CPU ms')
  print('model          examples  users of 1  users of 4  users of 16  ratios')
  for name, make in dict(
      perceptron=perceptron, convolutions=convolutions, transformer=transformer).items():
    times = []
    for of_user in (0, 1, 4, 16):
      model, x = make()
      times.append(step_seconds(model, x, np.arange(EXAMPLES) % 10, of_user))
    ratios = '  '.join(f'{one / times[0]:.2f}' for one in times[1:])
    print(f'{name:13} ' + ' '.join(f'{1e3 * one:10.1f}' for one in times) + f'   {ratios}',
          flush=True)


if __name__ == '__main__':
  main()
