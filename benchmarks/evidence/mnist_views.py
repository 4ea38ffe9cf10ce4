# SPDX-License-Identifier: Apache-2.0
"""Several views of an image: MNIST by convolutions, as in row 1 of `mnist_cnn.py`.

    PYTHONPATH=. python benchmarks/evidence/mnist_views.py --data FOLDER --steps 468 [--views 0 1
        4 16] [--rate .5]

Network, clip norm 1, batches of 256 and the epsilon, 2.38, are those of the row, whose whole run
has 14,040 steps, rate .15 and noise multiplier 1.1. A run here has --steps steps, and the noise
that these steps need. A view is the image, moved by up to two pixels each way by
`RandomTranslation`; 0 views are the image as it is. All runs of a seed start from the same weights.
Accuracy is on the 10,000 test images, or with --held on 5,000 training images that do not train. A
line is printed after --every steps, so a run that is killed leaves those it has done.
"""

import argparse
import os
import sys
import time
from typing import Any

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import mnist_cnn
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--data', default='../shared/data', help='folder with load.py')
  parser.add_argument('--views', type=int, nargs='+', default=[0, 1, 4, 16])
  parser.add_argument('--steps', type=int, default=468, help='instead of 14,040')
  parser.add_argument('--every', type=int, default=78, help='steps between lines; divides --steps')
  parser.add_argument('--rate', type=float, default=.15)
  parser.add_argument('--seeds', type=int, nargs='+', default=[0])
  parser.add_argument('--held', action='store_true', help='judge by 5,000 training images')
  options = parser.parse_args()
  sys.path.insert(0, options.data)
  import load  # pylint: disable=import-outside-toplevel
  train, test = (((x[..., None] / 255.0).astype(np.float32), y.astype(np.int32))
                 for x, y in load.mnist())
  size, row = len(train[0]), mnist_cnn.ROWS[1]
  if options.held:
    train, test = [part[:-5000] for part in train], [part[-5000:] for part in train]
  whole = row.epochs * (size // mnist_cnn.BATCH)
  common: Any = dict(population_size=len(train[0]), batch_size=mnist_cnn.BATCH,
                     l2_norm_clip=row.l2_norm_clip, target_delta=mnist_cnn.DELTA)
  epsilon = tfdp.PrivacyPlan(
      **dict(common, population_size=size), steps=whole,
      noise_multiplier=row.noise_multiplier).epsilon(whole)
  layers = tf.keras.layers
  for views in options.views:
    for seed in options.seeds:
      tf.keras.utils.set_random_seed(seed)
      network = mnist_cnn.build()
      moved = [layers.RandomTranslation(2 / 28, 2 / 28, fill_mode='constant')] if views else []
      model = tfdp.make_private(tf.keras.Sequential(
          [layers.Input([28, 28, 1]), *moved, network]))
      plan = tfdp.PrivacyPlan.calibrate(target_epsilon=epsilon, steps=options.steps, **common)
      model.compile(tfdp.DPSGD(options.rate, plan=plan),
                    tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                    metrics=['accuracy'], views=max(views, 1))
      seconds, batches = 0.0, plan.batches(train)
      for part in range(options.steps // options.every):
        done = (part + 1) * options.every
        begun = time.process_time()
        model.fit(batches, epochs=part + 1, initial_epoch=part, steps_per_epoch=options.every,
                  verbose=0)
        seconds += time.process_time() - begun
        loss, accuracy = model.evaluate(*test, batch_size=500, verbose=0)
        print(f'views {views:2}  seed {seed}  rate {options.rate:g}  noise '
              f'{plan.noise_multiplier:.3f}  step {done:4} of {options.steps}  epsilon '
              f'{plan.epsilon(done):.3f}  accuracy {accuracy:.4f}  loss {loss:.4f}  '
              f'{seconds:.0f} CPU s', flush=True)


if __name__ == '__main__':
  main()
