# SPDX-License-Identifier: Apache-2.0
"""A table with categories and missing values.

Each row is one person, with numbers in different units, categories, and cells
that are missing. The preprocessing uses public knowledge only: ranges, the list
of categories, and a column that says which cells are missing. It therefore
costs no privacy. `prepare` accepts a pandas `DataFrame` or a dictionary of
arrays.

To fit scales or vocabularies to private rows instead, use
[`tfdp.estimates.adapt`](../callbacks.md), which adds its cost to the ledger.
"""

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

JOBS = ('clerk', 'driver', 'engineer', 'farmer', 'nurse', 'teacher')
REGIONS = ('north', 'east', 'south', 'west')
RANGES = {'age': (18, 90), 'income': (0, 150_000), 'hours': (0, 80)}


def make_people(count, seed):
  """Stands for your table. Replace it by `pandas.read_csv(...)`."""
  rng = np.random.default_rng(seed)
  job = rng.integers(0, len(JOBS), count)
  age = rng.uniform(18, 90, count)
  hours = np.clip(rng.normal(35, 12, count), 0, 80)
  income = np.exp(rng.normal(10.3, 0.5, count)) * (1 + 0.2 * job)
  score = (0.05 * (age - 45) + 0.9 * np.log(income / 45_000)
           + np.array([-1, 0.5, 1, -0.5, 1.5, 0])[job] - 0.03 * (hours - 35))
  bought = rng.random(count) < 1 / (1 + np.exp(-1.5 * score))
  income[rng.random(count) < 0.15] = np.nan
  jobs = np.where(rng.random(count) < 0.1, '', np.array(JOBS)[job])
  return {'age': age, 'income': income, 'hours': hours, 'job': jobs,
          'region': rng.choice(REGIONS, count), 'bought': bought}


def prepare(frame):
  """Returns the inputs of the model, from public ranges and categories."""
  columns = []
  for name, (low, high) in RANGES.items():
    values = np.asarray(frame[name], np.float32)
    missing = np.isnan(values)
    scaled = 4 * (np.clip(values, low, high) - low) / (high - low) - 2
    columns += [np.where(missing, 0, scaled), missing]
  for name, categories in (('job', JOBS), ('region', REGIONS)):
    values = np.asarray(frame[name]).astype(str)
    columns += [values == category for category in categories]
  return np.stack(columns, 1).astype(np.float32)


def build():
  tf.keras.utils.set_random_seed(0)
  return tf.keras.Sequential([
      tf.keras.layers.Input([16]),
      tf.keras.layers.Dense(16, activation='relu'),
      tf.keras.layers.Dense(1, activation='sigmoid')])


def report(name, model, x, y):
  p = np.clip(model.predict(x, verbose=0)[:, 0], 1e-6, 1 - 1e-6)
  loss = -np.mean(np.where(y, np.log(p), np.log(1 - p)))
  print(f'{name:24} accuracy {np.mean((p > 0.5) == y):.3f}  '
        f'log loss {loss:.3f}')


def main(quick=False):
  people = make_people(2_000 if quick else 20_000, seed=1)
  x, y = prepare(people), people['bought'].astype(np.float32)
  others = make_people(300, seed=2)  # Public people of the same kind.
  public = prepare(others), others['bought'].astype(np.float32)
  held_out = make_people(5_000, seed=3)
  test = prepare(held_out), held_out['bought']

  model = build()
  model.compile('adam', 'binary_crossentropy')
  model.fit(*public, epochs=2 if quick else 40, verbose=0)
  report('public rows alone', model, *test)

  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=3.0, target_delta=1e-6, population_size=len(x),
      batch_size=len(x) // 20, steps=4 if quick else 200)
  model = tfdp.make_private(build())
  model.compile(tfdp.DPAdam(0.02, plan=plan), 'binary_crossentropy')
  model.fit(plan.batches((x, y)), verbose=0)
  report('private, epsilon 3', model, *test)
  statement = model.ledger.statement()

  model = build()
  model.compile('adam', 'binary_crossentropy')
  model.fit(x, y, epochs=1 if quick else 10, verbose=0)
  report('not private', model, *test)
  print(statement.split('. ')[0] + '.')


if __name__ == '__main__':
  main()
