# SPDX-License-Identifier: Apache-2.0
"""Images, with views and group normalization.

A small convolutional network for MNIST. Group normalization replaces batch
normalization, which mixes examples. Each example counts as the mean of its
randomly shifted views, which is clipped once, so views cost no privacy.
Exponential averages of the weights (`use_ema`) reduce the noise of the last
steps for free.

Set `MNIST_NPZ` to a local copy of Keras' file `mnist.npz` to work without
network.
"""

import os

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

layers = tf.keras.layers


def load():
  if 'MNIST_NPZ' in os.environ:
    with np.load(os.environ['MNIST_NPZ'], allow_pickle=False) as file:
      parts = [file[f'{name}_{part}']
               for part in ('train', 'test') for name in 'xy']
  else:
    (x, y), (x_test, y_test) = tf.keras.datasets.mnist.load_data()
    parts = [x, y, x_test, y_test]
  scale = lambda x: x[..., np.newaxis].astype(np.float32) / 255
  return (scale(parts[0]), parts[1]), (scale(parts[2]), parts[3])


def shifted(image, label):
  """One view of an example: up to two pixels to each side."""
  return np.roll(image, np.random.randint(-2, 3, size=2), (0, 1)), label


def build():
  tf.keras.utils.set_random_seed(0)
  return tf.keras.Sequential([
      layers.Input([28, 28, 1]),
      layers.Conv2D(16, 5, strides=3),
      layers.GroupNormalization(4),
      layers.ReLU(),
      layers.Conv2D(32, 3, strides=2),
      layers.GroupNormalization(4),
      layers.ReLU(),
      layers.Flatten(),
      layers.Dense(10, activation='softmax')])


def report(name, model, x, y):
  accuracy = np.mean(model.predict(x, verbose=0).argmax(1) == y)
  print(f'{name:24} accuracy {accuracy:.3f}')


def main(quick=False, data=None):
  (x, y), test = data or load()
  public, (x, y) = (x[:300], y[:300]), (x[300:], y[300:])
  loss = 'sparse_categorical_crossentropy'

  model = build()
  model.compile('adam', loss)
  model.fit(*public, epochs=1 if quick else 30, verbose=0)
  report('public images alone', model, *test)

  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=3.0, target_delta=1e-6, population_size=len(x),
      batch_size=len(x) // 100, steps=2 if quick else 150)
  model = tfdp.make_private(build())
  optimizer = tfdp.DPAdam(0.02, plan=plan, use_ema=True, ema_momentum=0.9)
  model.compile(optimizer, loss)
  model.fit(plan.batches((x, y), augment=shifted, views=2), verbose=0)
  report('private, epsilon 3', model, *test)
  statement = model.ledger.statement()

  model = build()
  model.compile('adam', loss)
  model.fit(x, y, epochs=1, verbose=0)
  report('not private', model, *test)
  print(statement.split('. ')[0] + '.')


if __name__ == '__main__':
  main()
