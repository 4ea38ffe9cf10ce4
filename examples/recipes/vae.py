# SPDX-License-Identifier: Apache-2.0
"""Synthetic records from a variational autoencoder.

A conditional autoencoder is trained privately, and its decoder makes labelled
records. They cost no further privacy, because they come from the trained
weights alone. `add_loss` is refused in private models, since it adds a loss of
the batch. Join all that the loss needs into the output instead, and write the
loss of one example.

The number is the accuracy, on real records, of a classifier that was trained on
the synthetic ones.
"""

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

layers = tf.keras.layers
WIDTH, CODE, CLASSES = 16, 4, 4


def make_records(count, seed):
  """Stands for your records: 16 columns, driven by a few hidden causes."""
  fixed = np.random.default_rng(0)
  centers = 1.2 * fixed.normal(size=(CLASSES, CODE))
  mix = fixed.normal(size=(CODE, WIDTH)) / np.sqrt(CODE)
  rng = np.random.default_rng(seed)
  y = rng.integers(0, CLASSES, count)
  causes = centers[y] + 0.7 * rng.normal(size=(count, CODE))
  x = np.tanh(causes @ mix) + 0.1 * rng.normal(size=(count, WIDTH))
  return x.astype(np.float32), np.eye(CLASSES, dtype=np.float32)[y]


class Sample(layers.Layer):
  """Draws a code from its mean and logarithm of the variance."""

  def call(self, inputs):
    mean, log_variance = tf.split(inputs, 2, -1)
    return mean + tf.exp(0.5 * log_variance) * tf.random.normal(tf.shape(mean))


def build():
  """Returns the autoencoder, and its decoder of (code, label)."""
  tf.keras.utils.set_random_seed(0)
  joined = layers.Input([CODE + CLASSES])
  hidden = layers.Dense(32, activation='tanh')(joined)
  decoder = tf.keras.Model(joined, layers.Dense(WIDTH)(hidden))
  inputs = layers.Input([WIDTH + CLASSES])
  label = inputs[:, WIDTH:]
  code = layers.Dense(2 * CODE)(layers.Dense(32, activation='tanh')(inputs))
  decoded = decoder(layers.Concatenate()([Sample()(code), label]))
  outputs = layers.Concatenate()([decoded, code])
  return tf.keras.Model(inputs, outputs), decoder


def loss(x, outputs):
  decoded, mean, log_variance = tf.split(outputs, [WIDTH, CODE, CODE], -1)
  divergence = tf.exp(log_variance) + tf.square(mean) - 1.0 - log_variance
  error = tf.reduce_sum(tf.square(x - decoded), -1) / 0.1
  return 0.5 * (error + tf.reduce_sum(divergence, -1))


def synthesize(decoder, count=5_000):
  rng = np.random.default_rng(9)
  label = np.eye(CLASSES)[rng.integers(0, CLASSES, count)]
  code = rng.normal(size=(count, CODE))
  x = decoder.predict(np.concatenate([code, label], 1), verbose=0)
  return x + 0.1 * rng.normal(size=x.shape), label


def report(name, train, test):
  """Trains a classifier, and reports its accuracy on real records."""
  tf.keras.utils.set_random_seed(1)
  model = tf.keras.Sequential([
      layers.Input([WIDTH]), layers.Dense(32, activation='relu'),
      layers.Dense(CLASSES, activation='softmax')])
  model.compile(tf.keras.optimizers.Adam(0.01), 'categorical_crossentropy')
  model.fit(*train, epochs=5, verbose=0)
  right = model.predict(test[0], verbose=0).argmax(1) == test[1].argmax(1)
  print(f'{name:34} accuracy {right.mean():.3f}')


def main(quick=False):
  x, y = make_records(1_000 if quick else 20_000, seed=1)
  inputs = np.concatenate([x, y], 1)
  public, test = make_records(100, seed=2), make_records(4_000, seed=3)
  report('100 public records alone', public, test)

  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=4.0, target_delta=1e-6, population_size=len(x),
      batch_size=len(x) // 20, steps=4 if quick else 300)
  model, decoder = build()
  model = tfdp.make_private(model)
  model.compile(tfdp.DPAdam(0.02, plan=plan), loss)
  model.fit(plan.batches((inputs, x)), verbose=0)
  report('private synthetic, epsilon 4', synthesize(decoder), test)
  statement = model.ledger.statement()

  model, decoder = build()
  model.compile(tf.keras.optimizers.Adam(0.005), loss)
  model.fit(inputs, x, batch_size=100, epochs=1 if quick else 8, verbose=0)
  report('synthetic, not private', synthesize(decoder), test)
  report('real records, not private', (x, y), test)
  print(statement.split('. ')[0] + '.')


if __name__ == '__main__':
  main()
