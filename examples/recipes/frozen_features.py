# SPDX-License-Identifier: Apache-2.0
"""Frozen features and a private head.

A convolutional network is trained on public images of the digits 0 to 4. Its
features of the private digits 5 to 9 are computed once, and only a new last
layer is trained privately. `tfdp.join` puts both together again.
`least_squares` solves the layer from one noisy release instead, which needs no
clip norm and no learning rate.

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


def pretrain(x, y, epochs):
  """Returns a frozen base, trained on public images; features have norm 1."""
  tf.keras.utils.set_random_seed(0)
  base = tf.keras.Sequential([
      layers.Input([28, 28, 1]),
      layers.Conv2D(16, 5, strides=3, activation='relu'),
      layers.Conv2D(32, 3, strides=2, activation='relu'),
      layers.Flatten(),
      layers.Dense(64, activation='relu'),
      layers.UnitNormalization()])
  network = tf.keras.Sequential([base, layers.Dense(5, activation='softmax')])
  network.compile('adam', 'sparse_categorical_crossentropy')
  network.fit(x, y, epochs=epochs, verbose=0)
  base.trainable = False
  return base


def new_head():
  return tf.keras.Sequential([
      layers.Input([64]),
      layers.Dense(5, activation='softmax', kernel_initializer='zeros')])


def report(name, model, x, y):
  accuracy = np.mean(model.predict(x, verbose=0).argmax(1) == y)
  print(f'{name:36} accuracy {accuracy:.3f}')


def main(quick=False, data=None):
  (x, y), (x_test, y_test) = data or load()
  base = pretrain(x[y < 5], y[y < 5], epochs=1 if quick else 2)
  x, y = x[y >= 5], y[y >= 5] - 5
  public, private = (x[:100], y[:100]), (x[100:], y[100:])
  test = x_test[y_test >= 5], y_test[y_test >= 5] - 5
  loss = 'sparse_categorical_crossentropy'

  features = tfdp.features(base, public)
  head = new_head()
  head.compile(tf.keras.optimizers.Adam(0.05), loss)
  head.fit(features.x, public[1], epochs=5 if quick else 100, verbose=0)
  report('public images alone', tf.keras.Sequential([base, head]), *test)

  features = tfdp.features(base, private)
  for epsilon in (0.5, 2.0):
    plan = tfdp.PrivacyPlan.calibrate(
        target_epsilon=epsilon, target_delta=1e-6, population_size=len(y) - 100,
        batch_size=(len(y) - 100) // 20, steps=4 if quick else 100,
        l2_norm_clip=0.5)
    head = tfdp.make_private(new_head())
    head.compile(tfdp.DPSGD(4.0, momentum=0.9, plan=plan), loss)
    head.fit(plan.batches(features), verbose=0)
    model = tfdp.join(base, head)
    report(f'private head, epsilon {epsilon}', model, *test)
    solved = tfdp.heads.least_squares(
        features, target_epsilon=epsilon, target_delta=1e-6)
    report(f'private least squares, epsilon {epsilon}',
           tfdp.join(base, solved), *test)
  statement = model.ledger.statement()

  head = new_head()
  head.compile(tf.keras.optimizers.Adam(0.01), loss)
  head.fit(features.x, private[1], epochs=1 if quick else 10, verbose=0)
  report('head, not private', tf.keras.Sequential([base, head]), *test)
  print(statement.split('. ')[0] + '.')


if __name__ == '__main__':
  main()
