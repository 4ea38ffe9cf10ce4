# SPDX-License-Identifier: Apache-2.0
"""Several views of an image: MNIST by convolutions, as in row 1 of `mnist_cnn.py`.

    PYTHONPATH=. python benchmarks/evidence/mnist_views.py --data FOLDER --steps 234 [--views 0 1
        4 16]

Network, rate .15, noise multiplier 1.1, clip norm 1 and batches of 256 are those of the row, whose
whole run has 14,040 steps. A view is the image, moved by up to two pixels each way by
`RandomTranslation`; 0 views are the image as it is. All runs start from the same weights. Accuracy
is on the 10,000 test images. Nothing is tuned.
"""

import argparse
import os
import sys
import time

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
  parser.add_argument('--steps', type=int, default=234, help='of 14,040')
  parser.add_argument('--seeds', type=int, default=1)
  options = parser.parse_args()
  sys.path.insert(0, options.data)
  import load  # pylint: disable=import-outside-toplevel
  train, test = (((x[..., None] / 255.0).astype(np.float32), y.astype(np.int32))
                 for x, y in load.mnist())
  row = mnist_cnn.ROWS[1]
  whole = row.epochs * (len(train[0]) // mnist_cnn.BATCH)
  layers = tf.keras.layers
  for views in options.views:
    for seed in range(options.seeds):
      tf.keras.utils.set_random_seed(seed)
      network = mnist_cnn.build()
      moved = [layers.RandomTranslation(2 / 28, 2 / 28, fill_mode='constant')] if views else []
      model = tfdp.make_private(tf.keras.Sequential(
          [layers.Input([28, 28, 1]), *moved, network]))
      plan = tfdp.PrivacyPlan(
          population_size=len(train[0]), batch_size=mnist_cnn.BATCH, steps=whole,
          l2_norm_clip=row.l2_norm_clip, noise_multiplier=row.noise_multiplier,
          target_delta=mnist_cnn.DELTA)
      model.compile(tfdp.DPSGD(row.learning_rate, plan=plan),
                    tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                    metrics=['accuracy'], views=max(views, 1))
      begun = time.process_time()
      model.fit(plan.batches(train), epochs=1, steps_per_epoch=options.steps, verbose=0)
      seconds = time.process_time() - begun
      loss, accuracy = model.evaluate(*test, batch_size=500, verbose=0)
      print(f'views {views:2}  seed {seed}  steps {options.steps} ({options.steps / whole:.2%})  '
            f'epsilon {plan.epsilon(options.steps):.3f}  accuracy {accuracy:.4f}  loss {loss:.4f}  '
            f'{seconds:.0f} CPU s', flush=True)


if __name__ == '__main__':
  main()
