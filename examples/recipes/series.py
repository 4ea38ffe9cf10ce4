# SPDX-License-Identifier: Apache-2.0
"""Series, cut into windows.

A model predicts the next hour of power consumption from the last 24. The
windows of a household overlap, so one value occurs in many of them, and a
guarantee for a window would protect nobody. Every window therefore carries the
id of its household, and the plan protects households (`unit='user'`).
"""

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

LENGTH = 24


def make_series(households, seed, hours=24 * 7):
  """Stands for your series: [households, hours], in kilowatts."""
  rng = np.random.default_rng(seed)
  time = np.arange(hours)
  phase = rng.normal(18, 2, size=(households, 1))
  daily = np.cos(2 * np.pi * (time - phase) / 24)
  size = np.exp(0.3 * rng.normal(size=(households, 1)))
  noise = np.zeros((households, hours))
  for hour in range(1, hours):
    noise[:, hour] = (0.7 * noise[:, hour - 1]
                      + 0.15 * rng.normal(size=households))
  return size * (1 + 0.6 * daily + 0.3 * (daily > 0.7)) + noise


def windows(series):
  """Returns the windows, the value after each, and its household."""
  cut = np.lib.stride_tricks.sliding_window_view(series, LENGTH + 1, axis=1)
  ids = np.repeat(np.arange(len(series)), cut.shape[1])
  rows = cut.reshape(-1, LENGTH + 1).astype(np.float32)
  return rows[:, :-1, np.newaxis], rows[:, -1:], ids


def build():
  tf.keras.utils.set_random_seed(0)
  return tf.keras.Sequential([
      tf.keras.layers.Input([LENGTH, 1]),
      tf.keras.layers.Conv1D(8, 6, strides=3, activation='relu'),
      tf.keras.layers.Flatten(),
      tf.keras.layers.Dense(1)])


def report(name, predicted, y):
  print(f'{name:32} mean absolute error {np.mean(np.abs(predicted - y)):.3f}')


def main(quick=False):
  x, y, ids = windows(make_series(100 if quick else 4_000, seed=1))
  public = windows(make_series(5, seed=2))[:2]
  x_test, y_test, _ = windows(make_series(200, seed=3))
  report('the last value', x_test[:, -1], y_test)

  model = build()
  model.compile(tf.keras.optimizers.Adam(0.01), 'mse')
  model.fit(*public, epochs=2 if quick else 40, verbose=0)
  report('5 public households alone', model.predict(x_test, verbose=0), y_test)

  households = len(np.unique(ids))
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=4.0, target_delta=1e-5, population_size=households,
      batch_size=households // 20, steps=3 if quick else 200, unit='user')
  model = tfdp.make_private(build())
  model.compile(tfdp.DPAdam(0.02, plan=plan), 'mse')
  batches = plan.batches((x, y), users=ids, examples_per_user=8)
  model.fit(batches, verbose=0)
  report('private per household, epsilon 4',
         model.predict(x_test, verbose=0), y_test)
  statement = model.ledger.statement()

  model = build()
  model.compile(tf.keras.optimizers.Adam(0.01), 'mse')
  model.fit(x, y, batch_size=256, epochs=1, verbose=0)
  report('not private', model.predict(x_test, verbose=0), y_test)
  print(statement.split('. ')[0] + '.')


if __name__ == '__main__':
  main()
