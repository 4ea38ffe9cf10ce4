# SPDX-License-Identifier: Apache-2.0
"""Users with several rows each.

One person has many rows, and the guarantee covers all of them together. The
plan counts users, and `plan.batches` takes the column of ids. A batch draws
users, takes up to `examples_per_user` rows of each, and clips the mean gradient
of a user once.

Every user has the same weight in this training, however many rows the user has.
The program therefore reports the mean over users, next to the mean over rows.
"""

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp


def make_rows(users, seed):
  """Stands for your table: inputs, labels and the user of each row."""
  rng = np.random.default_rng(seed)
  rows = rng.geometric(0.1, users).clip(1, 60)  # A few users have many rows.
  ids = np.repeat(np.arange(users), rows)
  taste = 0.6 * rng.normal(size=(users, 10))
  x = rng.normal(size=(len(ids), 10))
  common = np.cos(np.arange(10))
  score = x @ common + (x * taste[ids]).sum(1) + 0.8 * x[:, 0] * x[:, 1]
  y = rng.random(len(ids)) < 1 / (1 + np.exp(-2 * score))
  return x.astype(np.float32), y.astype(np.float32), ids


def build():
  tf.keras.utils.set_random_seed(0)
  return tf.keras.Sequential([
      tf.keras.layers.Input([10]),
      tf.keras.layers.Dense(16, activation='relu'),
      tf.keras.layers.Dense(1, activation='sigmoid')])


def report(name, model, x, y, ids):
  right = (model.predict(x, verbose=0)[:, 0] > 0.5) == y
  of_users = np.bincount(ids, right) / np.bincount(ids)
  print(f'{name:28} accuracy over rows {right.mean():.3f}, '
        f'over users {of_users.mean():.3f}')


def main(quick=False):
  x, y, ids = make_rows(400 if quick else 10_000, seed=1)
  public, test = make_rows(30, seed=2), make_rows(1_000, seed=3)

  model = build()
  model.compile('adam', 'binary_crossentropy')
  model.fit(*public[:2], epochs=2 if quick else 20, verbose=0)
  report('30 public users alone', model, *test)

  users = len(np.unique(ids))
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=4.0, target_delta=1e-5, population_size=users,
      batch_size=users // 20, steps=3 if quick else 150, unit='user')
  model = tfdp.make_private(build())
  model.compile(tfdp.DPAdam(0.02, plan=plan), 'binary_crossentropy')
  batches = plan.batches((x, y), users=ids, examples_per_user=8)
  model.fit(batches, verbose=0)
  report('private per user, epsilon 4', model, *test)
  statement = model.ledger.statement()

  model = build()
  model.compile('adam', 'binary_crossentropy')
  model.fit(x, y, epochs=1 if quick else 4, verbose=0)
  report('not private', model, *test)
  print(statement.split('. ')[0] + '.')


if __name__ == '__main__':
  main()
