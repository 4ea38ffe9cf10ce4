# SPDX-License-Identifier: Apache-2.0
"""Memory of a private run over 10 GB of records that nobody has: a source computes them.

Usage: python benchmarks/speed/data_memory.py [gigabytes] > benchmarks/results/data_memory.txt

Every record is read once (fixed order), through `plan.batches` and the private step of a
small model. What grows with the data is the order of the records, 8 bytes each.
"""

import os
import sys
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

WIDTH, BATCH = 4096, 1024


class Rows:
  """Records computed when they are asked for."""

  def __init__(self, count):
    self._count = count
    self._pattern = np.random.default_rng(0).standard_normal(2 * WIDTH, np.float32)

  def __len__(self):
    return self._count

  def __getitem__(self, index):
    start = index % WIDTH
    return self._pattern[start:start + WIDTH], np.float32(index % 2)


def resident():
  """MB of this process in memory."""
  with open('/proc/self/statm', encoding='ascii') as file:
    return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20


def main():
  gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 10
  steps = int(gigabytes * 2**30 / (4 * WIDTH * BATCH))
  plan = tfdp.PrivacyPlan(
      population_size=steps * BATCH, batch_size=BATCH, steps=steps, l2_norm_clip=1.0,
      noise_multiplier=1.0, target_delta=1e-8, sampling=tfdp.sampling.FixedOrder())
  layers = compat.keras.layers
  model = tfdp.DPSequential([layers.Input([WIDTH]), layers.Dense(1)])
  model.compile(tfdp.DPAdam(1e-3, plan=plan), loss='mse')
  print(f'{plan.population_size} records of {WIDTH} float32, {gigabytes:g} GB in all; batches of '
        f'{BATCH}.')
  print('  read, GB   resident, MB   seconds')
  start, every = time.perf_counter(), max(1, steps // 20)

  class Curve(compat.keras.callbacks.Callback):

    def on_train_batch_end(self, batch, logs=None):
      if batch % every == 0 or batch == steps - 1:
        read = (batch + 1) * BATCH * WIDTH * 4 / 2**30
        print(f'{read:10.2f} {resident():14.0f} {time.perf_counter() - start:9.0f}', flush=True)

  model.fit(plan.batches(Rows(plan.population_size)), callbacks=[Curve()], verbose=0)


if __name__ == '__main__':
  main()
