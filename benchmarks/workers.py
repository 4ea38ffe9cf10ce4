# SPDX-License-Identifier: Apache-2.0
"""What a step costs on several workers: run it as `examples/multi_worker.py` says, or alone.

Prints the processor time of this worker's steps, its largest memory and what a step sends.
"""

import resource
import sys
import time

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()

import tfdp_adaptive as tfdp  # pylint: disable=wrong-import-position,g-import-not-at-top
from tfdp_adaptive import compat  # pylint: disable=wrong-import-position,g-import-not-at-top

keras = compat.keras
ROWS, FIRST, LAST = 8192, 5, 35


class Clock(keras.callbacks.Callback):
  """Processor time from the end of step FIRST, which has traced and warmed up."""

  def on_train_batch_end(self, batch, logs=None):
    if batch == FIRST:
      self.begin = time.process_time()
    if batch == LAST:
      self.seconds = (time.process_time() - self.begin) / (LAST - FIRST)


def main(size: int = 512) -> None:
  plan = tfdp.PrivacyPlan(
      population_size=ROWS, batch_size=size, steps=LAST + 2, l2_norm_clip=1.0,
      noise_multiplier=1.0, target_delta=1e-6, sampling=tfdp.sampling.FixedOrder())
  with strategy.scope():
    model = tfdp.DPSequential([
        keras.layers.Input([784]), keras.layers.Dense(512, 'relu'),
        keras.layers.Dense(512, 'relu'), keras.layers.Dense(10)])
    model.compile(tfdp.DPAdam(plan=plan), loss=keras.losses.SparseCategoricalCrossentropy(True))
  x = np.random.default_rng(0).normal(size=(ROWS, 784)).astype(np.float32)
  clock = Clock()
  model.fit(plan.batches((x, np.arange(ROWS) % 10)), callbacks=[clock], verbose=0)
  weights = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
  print(f'{strategy.num_replicas_in_sync} worker(s): {1e3 * clock.seconds:.1f} ms of processor '
        f'time a step, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB, '
        f'{4 * weights / 1e6:.2f} MB of sums a step', flush=True)


if __name__ == '__main__':
  main(*map(int, sys.argv[1:]))
