# SPDX-License-Identifier: Apache-2.0
"""Several hospitals, records as unit.

Three hospitals train one model. Each clips the records of its own patients and
adds its own noise, so neither the server nor another hospital needs to be
trusted with records. `Silo` keeps the ledger of a hospital over all rounds,
although its client starts with a new model in every round.

The program runs all clients in one process. [Several silos](../guides/silos.md)
shows the same client under Flower and NVFlare.
"""

import tempfile

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

HOSPITALS = ('north', 'east', 'south')


def make_patients(count, seed, shift=0.0):
  """Stands for the records of one hospital; `shift` moves its population."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(count, 12))
  x[:, :3] += shift
  score = x @ np.cos(2 * np.arange(12)) + x[:, 0] * x[:, 1]
  y = rng.random(count) < 1 / (1 + np.exp(-1.5 * score))
  return x.astype(np.float32), y.astype(np.float32)[:, np.newaxis]


def build():
  tf.keras.utils.set_random_seed(0)
  return tf.keras.Sequential([
      tf.keras.layers.Input([12]),
      tf.keras.layers.Dense(16, activation='relu'),
      tf.keras.layers.Dense(1, activation='sigmoid')])


def build_private(plan):
  model = tfdp.make_private(build())
  model.compile(tfdp.DPAdam(0.02, plan=plan), 'binary_crossentropy')
  return model


def report(name, weights, x, y):
  model = build()
  model.set_weights(weights)
  accuracy = np.mean((model.predict(x, verbose=0) > 0.5) == y)
  print(f'{name:36} accuracy {accuracy:.3f}')


def main(quick=False):
  count, rounds, steps = (400, 2, 2) if quick else (6_000, 10, 15)
  records = {name: make_patients(count, seed, shift=(seed - 1) / 2)
             for seed, name in enumerate(HOSPITALS)}
  test = [np.concatenate(parts) for parts in zip(*(
      make_patients(2_000, seed + 10, shift=(seed - 1) / 2)
      for seed in range(len(HOSPITALS))))]
  public = make_patients(200, seed=20)

  model = build()
  model.compile('adam', 'binary_crossentropy')
  model.fit(*public, epochs=2 if quick else 30, verbose=0)
  report('200 public patients alone', model.get_weights(), *test)

  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=2.0, target_delta=1e-5, population_size=count,
      batch_size=count // 20, steps=rounds * steps)
  model = build_private(plan)
  model.fit(plan.batches(records['north']), verbose=0)
  report('one hospital alone, epsilon 2', model.get_weights(), *test)

  weights = build().get_weights()
  with tempfile.TemporaryDirectory() as folder:  # In use: one that stays.
    for number in range(1, rounds + 1):
      answers = []
      for name, data in records.items():  # Each in a process of its own.
        silo = tfdp.federated.Silo(f'{folder}/{name}', plan=plan)
        answers.append(silo.train(
            build_private(plan), weights, data, steps=steps,
            server_round=number))
      weights = [np.mean(parts, axis=0) for parts in zip(*answers)]
    statement = silo.statement()
  report('three hospitals, epsilon 2 each', weights, *test)

  model = build()
  model.compile('adam', 'binary_crossentropy')
  model.fit(*map(np.concatenate, zip(*records.values())),
            epochs=1 if quick else 8, verbose=0)
  report('all records in one place, not private', model.get_weights(), *test)
  print(statement.split('. ')[0] + '.')


if __name__ == '__main__':
  main()
