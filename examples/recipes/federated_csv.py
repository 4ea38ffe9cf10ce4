# SPDX-License-Identifier: Apache-2.0
"""Federated training from a CSV file.

The file has one example per line and a column with the user. Each round trains
a random cohort of users on their own rows. The server clips what each user
changed, adds noise and takes a step of an adaptive rule, so the guarantee is
for whole users. `simulate` runs all rounds on this machine;
[Ray](../guides/ray.md) and [Flower](../guides/flower.md) run the same plan on
many.
"""

import collections
import csv
import pathlib
import tempfile

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

FEATURES = [f'x{i}' for i in range(8)]


def write_example(path, users, seed):
  """Writes a file like yours: columns `user`, `x0` to `x7`, and `label`."""
  rng = np.random.default_rng(seed)
  with open(path, 'w', newline='', encoding='utf-8') as file:
    writer = csv.writer(file)
    writer.writerow(['user', *FEATURES, 'label'])
    for user in range(users):
      center = 0.5 * rng.normal(size=8)
      for _ in range(rng.integers(2, 30)):
        x = center + rng.normal(size=8)
        score = x @ np.cos(np.arange(8)) + x[0] * x[1]
        label = rng.random() < 1 / (1 + np.exp(-2 * score))
        writer.writerow([f'u{user}', *x.round(3), int(label)])


def read(path):
  """Returns {user: (x, y)} of a CSV file."""
  rows = collections.defaultdict(list)
  with open(path, newline='', encoding='utf-8') as file:
    for row in csv.DictReader(file):
      rows[row['user']].append(
          [float(row[name]) for name in (*FEATURES, 'label')])
  tables = {user: np.array(found, np.float32) for user, found in rows.items()}
  return {user: collections.OrderedDict(x=table[:, :-1], y=table[:, -1:])
          for user, table in tables.items()}


def rows_of(users):
  return (np.concatenate([user['x'] for user in users.values()]),
          np.concatenate([user['y'] for user in users.values()]))


def build():
  tf.keras.utils.set_random_seed(0)
  return tf.keras.Sequential([
      tf.keras.layers.Input([8]),
      tf.keras.layers.Dense(16, activation='relu'),
      tf.keras.layers.Dense(1, activation='sigmoid')])


def report(name, model, x, y):
  accuracy = np.mean((model.predict(x, verbose=0) > 0.5) == y)
  print(f'{name:28} accuracy {accuracy:.3f}')


def main(quick=False):
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'examples.csv'
    write_example(path, users=60 if quick else 5_000, seed=1)
    examples = read(path)
    write_example(path, users=20, seed=2)
    public = rows_of(read(path))
    write_example(path, users=300, seed=3)
    test = rows_of(read(path))

  model = build()
  model.compile('adam', 'binary_crossentropy')
  model.fit(*public, epochs=2 if quick else 30, verbose=0)
  report('20 public users alone', model, *test)

  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=4.0, target_delta=1e-5, population_size=len(examples),
      batch_size=len(examples) // 20, steps=2 if quick else 80,
      l2_norm_clip=0.3, unit='user')
  process = tfdp.federated.build_private_fed_avg(
      build, loss=tf.keras.losses.BinaryCrossentropy(),
      server_rule=tfdp.rules.dp_adam(), plan=plan, server_learning_rate=0.05,
      client_optimizer_fn=lambda: tf.keras.optimizers.SGD(0.1))
  users = tfdp.federated.Users(examples, batch_size=8, max_examples=24)
  result = tfdp.federated.simulate(process, users)
  model = build()
  result.weights.assign_weights_to(model)
  report('federated, epsilon 4', model, *test)

  model = build()
  model.compile('adam', 'binary_crossentropy')
  model.fit(*rows_of(examples), epochs=1 if quick else 3, verbose=0)
  report('central, not private', model, *test)
  print(result.statement.split('. ')[0] + '.')


if __name__ == '__main__':
  main()
