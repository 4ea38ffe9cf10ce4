# SPDX-License-Identifier: Apache-2.0
"""What `tfdp.fix_model` does to accuracy: MNIST by a small convolutional network.

    PYTHONPATH=. python benchmarks/evidence/normalization.py --data FOLDER

Half of the training images are taken to be public. A network with batch normalization is trained on
them without privacy, and converted; both are evaluated, and trained on the other half.
"""

import argparse
import os
import sys

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

HALF, BATCH, STEPS, SEEDS = 30_000, 256, 234, (0, 1, 2)
L = tf.keras.layers


def network(normalization: str) -> tf.keras.Model:
  """Two convolutions, each with a normalization, 'batch' or 'none'."""
  between = lambda: [L.BatchNormalization()] if normalization == 'batch' else []
  return tf.keras.Sequential([
      L.Input([28, 28, 1]), L.Conv2D(16, 5, strides=2), *between(), L.ReLU(),
      L.Conv2D(32, 5, strides=2), *between(), L.ReLU(), L.Flatten(), L.Dense(10)])


def converted(model: tf.keras.Model) -> tf.keras.Model:
  return tfdp.fix_model(model, verbose=False)


def trained(model: tf.keras.Model, data: tuple, steps: int = STEPS) -> tf.keras.Model:
  """Without privacy, in place."""
  model.compile(tf.keras.optimizers.Adam(1e-3), _loss())
  batches = tf.data.Dataset.from_tensor_slices(data).shuffle(HALF).repeat().batch(BATCH)
  model.fit(batches, steps_per_epoch=steps, verbose=0)
  return model


def privately(model: tf.keras.Model, data: tuple, epsilon: float) -> tf.keras.Model:
  """Returns the model after `STEPS` private steps."""
  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=epsilon, target_delta=1e-5, population_size=HALF, batch_size=BATCH,
      steps=STEPS, l2_norm_clip=1.0)
  private = tfdp.make_private(model)
  private.compile(tfdp.DPAdam(3e-3, plan=plan), _loss())
  private.fit(plan.batches(data), verbose=0)
  return private


def _loss() -> tf.keras.losses.Loss:
  return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--data', default='shared/data', help='folder with load.py')
  sys.path.insert(0, parser.parse_args().data)
  import load  # pylint: disable=import-outside-toplevel
  (x, y), (x_test, y_test) = (
      ((x[..., None] / 255.0).astype(np.float32), y.astype(np.int32)) for x, y in load.mnist())
  public, private = (x[:HALF], y[:HALF]), (x[HALF:], y[HALF:])

  def accuracy(model: tf.keras.Model) -> float:
    return float(np.mean(model.predict(x_test, 1000, verbose=0).argmax(1) == y_test))

  rows: dict = {}
  for seed in SEEDS:
    def note(name: str, model: tf.keras.Model) -> None:
      rows.setdefault(name, []).append(accuracy(model))  # pylint: disable=cell-var-from-loop

    tf.keras.utils.set_random_seed(seed)
    start = trained(network('batch'), public)
    note('batch normalization, trained on public images', start)
    note('the same, converted', converted(start))
    note('converted, 20 more public steps', trained(converted(start), public, 20))
    note('converted, 234 more public steps', trained(converted(start), public))
    note('converted, 234 private steps at epsilon 2',
         privately(converted(start), private, 2.0))
    note('not trained before: converted, 234 private steps at epsilon 2',
         privately(converted(network('batch')), private, 2.0))
    note('not trained before: without normalization, 234 private steps at epsilon 2',
         privately(network('none'), private, 2.0))
    note('not trained before: batch normalization, 234 steps without privacy',
         trained(network('batch'), private))
    note('not trained before: converted, 234 steps without privacy',
         trained(converted(network('batch')), private))
  print(f'MNIST, two convolutions, accuracy on test images; {len(SEEDS)} runs, mean and range. '
        f'{STEPS} steps of {BATCH} are two passes over a half.')
  print('DP-Adam at one learning rate, .003; without privacy Adam at .001.')
  print('Batch normalization is evaluated with moving averages (momentum .99), which probably lag '
        'behind after 234 steps.\n')
  for name, found in rows.items():
    print(f'{name:80}{np.mean(found):.3f}  {min(found):.3f} to {max(found):.3f}')


if __name__ == '__main__':
  main()
