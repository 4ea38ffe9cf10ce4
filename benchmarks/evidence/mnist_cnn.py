# SPDX-License-Identifier: Apache-2.0
"""MNIST at the three published settings of TensorFlow Privacy's tutorial, and MLS-Bench's at 3.

    PYTHONPATH=. python benchmarks/evidence/mnist_cnn.py [--data FOLDER] [--rows 0 1 2] [--epochs N]

Model, rate, noise multiplier, clip norm, batch size and epochs are the tutorial's; batches
are Poisson samples, as its epsilon assumes, where the tutorial shuffles. DP-Adam, DP-AdamBC
and DP-AdamSTP have the row's noise and epochs, and the best of three rates, each run to its end, by
the accuracy on the last 5,000 training images. A run that was interrupted goes on from its last
epoch when the command is repeated; rows that are done are not run again. --epochs stops early: a
row that is not run to its end says so.

The last row has the batches, epochs and claimed epsilon of MLS-Bench's `optimization-dp-sgd`, with
noise 0.759, which costs an epsilon of 3.004, instead of its 0.4773. Network, rate and clip norm are
the tutorial's.
"""

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

BATCH, DELTA, HELD_OUT = 256, 1e-5, 5000


class Row(NamedTuple):
  """A setting that was published, and what came out of it there."""

  learning_rate: float
  noise_multiplier: float
  l2_norm_clip: float
  epochs: int
  epsilon: float
  accuracy: float


ROWS = (Row(.25, 1.3, 1.5, 15, 1.19, .95), Row(.15, 1.1, 1.0, 60, 3.01, .966),
        Row(.25, .7, 1.5, 45, 7.10, .97),
        Row(.25, .759, 1.5, 20, 3.0, .962))  # MLS-Bench's batches and epochs, at about its epsilon.
RATES = {'DPSGD': (), **dict.fromkeys(('DPAdam', 'DPAdamBC', 'DPAdamSTP'), (1e-3, 3e-3, 1e-2))}


def build() -> Any:
  """The tutorial's network, 26,010 parameters."""
  layers = tf.keras.layers
  return tf.keras.Sequential([
      layers.Input([28, 28, 1]),
      layers.Conv2D(16, 8, strides=2, padding='same', activation='relu'),
      layers.MaxPool2D(2, 1),
      layers.Conv2D(32, 4, strides=2, padding='valid', activation='relu'),
      layers.MaxPool2D(2, 1), layers.Flatten(), layers.Dense(32, activation='relu'),
      layers.Dense(10)])


def make(row: Row, method: str, rate: float, size: int, epochs: int) -> Tuple[Any, Any]:
  """(compiled model, plan) for `size` training records."""
  tf.keras.utils.set_random_seed(0)
  model = tfdp.make_private(build())
  clip, more = row.l2_norm_clip, {}
  floor = clip * row.noise_multiplier / BATCH
  if method in ('DPAdam', 'DPAdamBC'):
    more = dict(epsilon=floor)
  elif method == 'DPAdamSTP':  # In scaled units; sqrt(m) is where all coordinates count alike.
    more = dict(scale_epsilon=floor)
    clip = float(np.sqrt(model.count_params()))
  plan = tfdp.PrivacyPlan(
      population_size=size, batch_size=BATCH, steps=epochs * (size // BATCH), l2_norm_clip=clip,
      noise_multiplier=row.noise_multiplier, target_delta=DELTA)
  model.compile(getattr(tfdp, method)(learning_rate=rate, plan=plan, **more),
                tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=['accuracy'])
  return model, plan


def fit(model: Any, plan: Any, data: Any, epochs: int, most: int,
        folder: Optional[pathlib.Path] = None) -> None:
  """Up to epoch `most` of `epochs`; goes on from `folder`."""
  callbacks = [] if folder is None else [
      tfdp.callbacks.BackupAndRestore(folder, delete_checkpoint=False)]
  model.fit(plan.batches(data), epochs=min(epochs, most), steps_per_epoch=plan.steps // epochs,
            verbose=0, callbacks=callbacks)


def tune(row: Row, method: str, data: Any) -> Tuple[float, Dict[str, float]]:
  """The best rate and the accuracy of each, on the last images of the training set."""
  if not RATES[method]:
    return row.learning_rate, {}
  train, held_out = (tuple(v[a] for v in data) for a in (
      slice(None, -HELD_OUT), slice(-HELD_OUT, None)))
  found = {}
  for rate in RATES[method]:
    model, plan = make(row, method, rate, len(train[0]), row.epochs)
    fit(model, plan, train, row.epochs, row.epochs)
    found[rate] = model.evaluate(*held_out, verbose=0)[1]
  return max(found, key=lambda rate: found[rate]), {f'{k:g}': round(v, 4) for k, v in found.items()}


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--data', default='shared/data', help='folder with load.py')
  parser.add_argument('--rows', type=int, nargs='+', default=[0], choices=range(len(ROWS)))
  parser.add_argument('--methods', nargs='+', default=list(RATES), choices=list(RATES))
  parser.add_argument('--epochs', type=int, default=10**6, help='of each run, at most')
  parser.add_argument('--runs', type=pathlib.Path, default=pathlib.Path('runs/mnist_cnn'),
                      help='folder of what is unfinished')
  parser.add_argument('--out', type=pathlib.Path,
                      default=pathlib.Path('benchmarks/results/mnist_cnn.json'))
  options = parser.parse_args()
  sys.path.insert(0, options.data)
  import load  # pylint: disable=import-outside-toplevel
  train, test = (((x[..., None] / 255.0).astype(np.float32), y.astype(np.int32))
                 for x, y in load.mnist())
  done: List[Dict[str, Any]] = (
      json.loads(options.out.read_text(encoding='utf-8')) if options.out.exists() else [])
  for index in options.rows:
    row = ROWS[index]
    for method in options.methods:
      folder = options.runs / f'{index}_{method}'
      chosen = folder.with_suffix('.json')
      epochs = min(row.epochs, options.epochs)
      if any((one['row'], one['method']) == (index, method) and one['epochs'] >= epochs
             for one in done):
        continue
      began = time.process_time()
      folder.mkdir(parents=True, exist_ok=True)
      if not chosen.exists():
        chosen.write_text(json.dumps(tune(row, method, train)), encoding='utf-8')
      rate, tried = json.loads(chosen.read_text(encoding='utf-8'))
      model, plan = make(row, method, rate, len(train[0]), row.epochs)
      fit(model, plan, train, row.epochs, epochs, folder)
      loss, accuracy = model.evaluate(*test, verbose=0)
      done = [one for one in done if (one['row'], one['method']) != (index, method)]
      done.append(dict(
          row=index, method=method, learning_rate=rate, tried=tried,
          l2_norm_clip=plan.l2_norm_clip, noise_multiplier=row.noise_multiplier, epochs=epochs,
          epochs_planned=row.epochs, epsilon=plan.epsilon(epochs * (plan.steps // row.epochs)),
          delta=DELTA, accuracy=accuracy, loss=loss, published=row.accuracy,
          published_epsilon=row.epsilon, cpu_seconds=round(time.process_time() - began)))
      print(json.dumps(done[-1]), flush=True)
      new = options.out.with_suffix('.new')
      new.write_text('[\n' + ',\n'.join(map(json.dumps, done)) + '\n]\n', encoding='utf-8')
      new.replace(options.out)


if __name__ == '__main__':
  main()
