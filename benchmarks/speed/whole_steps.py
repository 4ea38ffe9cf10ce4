# SPDX-License-Identifier: Apache-2.0
"""Whole private steps of the transformer of clipping/models.py, in one run: what one costs.

    python benchmarks/speed/whole_steps.py [DPAdamBC DPSOAP ...] [--rounds 12]

Processor time of `train_on_batch`, all of it (clipped sums, noise, update, weights), TensorFlow
without XLA, relative to the first case: the median of rounds in which all cases take turns. A
refresh of decompositions, of which there is one in `REFRESHING` steps by default, is timed by
itself in the step after these, and added in its share. With that of DP-KFC come the factors of 8
public sequences; other steps have none of it.
"""

import argparse
import os
import pathlib
import sys
import time
import warnings

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
sys.path.insert(0, str(pathlib.Path(__file__).parent / 'clipping'))

import models
import numpy as np

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

tfdp.experimental('dp_shampoo')

keras = compat.keras
CASES = {
    'DPAdamBC': ('DPAdamBC', {}), 'DPShampoo': ('DPShampoo', {}), 'DPSOAP': ('DPSOAP', {}),
    'groups': ('DPAdamBC', dict(clipping=tfdp.clipping.PerLayer())),
    'quantile': ('DPAdamBC', dict(clipping=tfdp.clipping.Quantile())),
    'groups, quantile': ('DPAdamBC', dict(
        clipping=tfdp.clipping.PerLayer(tfdp.clipping.Quantile()))),
    'DPKFC': ('DPKFC', {})}
REFRESHING = {'DPShampoo': 50, 'DPSOAP': 50, 'DPKFC': 20}  # The optimizers' own defaults.


def made(name, rounds):
  kind, arguments = CASES[name]
  if kind in REFRESHING:
    arguments = dict(arguments, refresh_every=rounds + 2)
  task = models.transformer()
  if kind == 'DPKFC':
    arguments = dict(arguments, public_data=(task.x[:8], task.y[:8]))
  model = tfdp.make_private(task.build(keras))
  optimizer = getattr(tfdp, kind)(
      1e-3, l2_norm_clip=.1, noise_multiplier=1.0, batch_size=len(task.x), **arguments)
  model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=False)
  return model, task


def spent(model, task):
  start = time.process_time()
  model.train_on_batch(task.x, task.y)
  return time.process_time() - start


def main():
  warnings.simplefilter('ignore')
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('cases', nargs='*', default=list(CASES))
  parser.add_argument('--rounds', type=int, default=12)
  arguments = parser.parse_args()
  made_ones = {name: made(name, arguments.rounds) for name in arguments.cases}
  times = {name: [] for name in made_ones}
  for one in made_ones.values():
    spent(*one)
  for _ in range(arguments.rounds):
    for name, one in made_ones.items():
      times[name].append(spent(*one))
  base = np.median(times[arguments.cases[0]])
  print(f'{"case":20}{"ms":>8}{"ratio":>8}{"refresh, ms":>14}{"with it":>9}')
  for name, one in made_ones.items():
    usual, refresh = np.median(times[name]), 0.0
    if name in REFRESHING:
      refresh = spent(*one) - usual
    print(f'{name:20}{1e3 * usual:8.1f}{usual / base:8.2f}{1e3 * refresh:14.1f}'
          f'{(usual + refresh / REFRESHING.get(name, 1)) / base:9.2f}', flush=True)


if __name__ == '__main__':
  main()
