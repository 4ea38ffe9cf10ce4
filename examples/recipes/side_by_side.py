# SPDX-License-Identifier: Apache-2.0
"""Private and not private, side by side.

The same Keras model, trained by Adam without privacy and by DP-AdamSTP at three
values of epsilon. Four lines differ: the plan, `make_private`, the optimizer,
and `plan.batches`. The inputs have units from 3 to 0.003, as in raw tables.
Choose the smallest epsilon whose result you can use.
"""

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp


def make_rows(count, seed):
  """Stands for your data: 31 inputs that are equally important."""
  rng = np.random.default_rng(seed)
  z = rng.normal(size=(count, 31))
  signs = np.where(np.arange(31) % 2, 1, -1)
  y = rng.random(count) < 1 / (1 + np.exp(-0.8 * z @ signs))
  x = z * np.geomspace(3, 0.003, 31)
  return x.astype(np.float32), y.astype(np.float32)


def build():
  return tf.keras.Sequential([
      tf.keras.layers.Input([31]),
      tf.keras.layers.Dense(
          1, activation='sigmoid', kernel_initializer='zeros')])


def report(name, model, x, y):
  accuracy = np.mean((model.predict(x, verbose=0)[:, 0] > 0.5) == y)
  print(f'{name:24} accuracy {accuracy:.3f}')


def main(quick=False):
  train = make_rows(1_000 if quick else 20_000, seed=1)
  public, test = make_rows(60, seed=2), make_rows(5_000, seed=3)
  size = len(train[0])

  model = build()
  model.compile(tf.keras.optimizers.Adam(0.6), 'binary_crossentropy')
  model.fit(*public, epochs=2 if quick else 50, verbose=0)
  report('60 public rows alone', model, *test)

  for epsilon in (0.5, 1.0, 3.0):
    plan = tfdp.PrivacyPlan.calibrate(
        target_epsilon=epsilon, target_delta=1e-5, population_size=size,
        batch_size=size // 20, steps=4 if quick else 200, l2_norm_clip=60.0)
    model = tfdp.make_private(build())
    model.compile(
        tfdp.DPAdamSTP(3.0, scale_epsilon=1e-3, plan=plan),
        'binary_crossentropy')
    model.fit(plan.batches(train), verbose=0)
    report(f'private, epsilon {epsilon}', model, *test)
  statement = model.ledger.statement()

  model = build()
  model.compile(tf.keras.optimizers.Adam(0.6), 'binary_crossentropy')
  model.fit(*train, batch_size=256, epochs=1 if quick else 10, verbose=0)
  report('not private', model, *test)
  print(statement.split('. ')[0] + '.')


if __name__ == '__main__':
  main()
