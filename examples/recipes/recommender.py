# SPDX-License-Identifier: Apache-2.0
"""A recommender.

Each user is one record: the set of items that the user liked. A denoising
autoencoder sees a random half of the set and predicts the other half. One
record has everything that a user gave, so an example-level guarantee protects
users. There is no table of users in the model, since a row of such a table
would belong to one person.

The number is the fraction of hidden items among the ten best proposals.
"""

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

ITEMS = 200


def make_users(count, seed):
  """Stands for your data: [users, items], 1 where a user liked an item."""
  tastes = np.random.default_rng(0).gamma(0.05, size=(8, ITEMS))
  tastes /= tastes.sum(1, keepdims=True)
  rng = np.random.default_rng(seed)
  mixed = rng.dirichlet(np.full(8, 0.2), count) @ tastes
  return rng.random((count, ITEMS)) < 1 - np.exp(-30 * mixed)


def halves(liked, seed):
  """Returns what the model sees, and what it predicts."""
  seen = liked & (np.random.default_rng(seed).random(liked.shape) < 0.5)
  return seen.astype(np.float32), (liked & ~seen).astype(np.float32)


def shares(hidden):
  """Returns targets that sum to one, as `categorical_crossentropy` needs."""
  smooth = hidden + 1e-3  # Uniform for a user without hidden items.
  return smooth / smooth.sum(1, keepdims=True)


def build():
  tf.keras.utils.set_random_seed(0)
  return tf.keras.Sequential([
      tf.keras.layers.Input([ITEMS]),
      tf.keras.layers.Dense(32, activation='tanh'),
      tf.keras.layers.Dense(ITEMS, activation='softmax')])


def found(name, scores, seen, hidden):
  best = np.argsort(-(scores - 1e9 * seen), axis=1)[:, :10]
  hits = np.take_along_axis(hidden, best, 1).sum()
  most = np.minimum(hidden.sum(1), 10).sum()
  print(f'{name:24} hidden items found {hits / most:.3f}')


def main(quick=False):
  x, y = halves(make_users(1_000 if quick else 30_000, seed=1), seed=4)
  public = halves(make_users(300, seed=2), seed=5)
  test = halves(make_users(2_000, seed=3), seed=6)
  loss = 'categorical_crossentropy'
  found('most popular, public', public[1].mean(0), *test)

  model = build()
  model.compile(tf.keras.optimizers.Adam(0.01), loss)
  model.fit(
      public[0], shares(public[1]), epochs=2 if quick else 10, verbose=0)
  found('public users alone', model.predict(test[0], verbose=0), *test)

  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=4.0, target_delta=1e-6, population_size=len(x),
      batch_size=len(x) // 20, steps=4 if quick else 150)
  model = tfdp.make_private(build())
  model.compile(tfdp.DPAdam(0.01, plan=plan), loss)
  model.fit(plan.batches((x, shares(y))), verbose=0)
  found('private, epsilon 4', model.predict(test[0], verbose=0), *test)
  statement = model.ledger.statement()

  model = build()
  model.compile(tf.keras.optimizers.Adam(0.01), loss)
  model.fit(x, shares(y), batch_size=256, epochs=1 if quick else 3, verbose=0)
  found('not private', model.predict(test[0], verbose=0), *test)
  print(statement.split('. ')[0] + '.')


if __name__ == '__main__':
  main()
