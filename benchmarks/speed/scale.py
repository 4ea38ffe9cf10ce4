# SPDX-License-Identifier: Apache-2.0
"""How a private gradient grows with batch, sequence, width and vocabulary, beside a plain one.

Usage: python benchmarks/speed/scale.py --out benchmarks/results/scale.txt --plot docs/scale.png

A causal transformer of two blocks; each row changes one number. CPU time of all threads, the
two steps in turns, so that other processes disturb the ratio little. "by flops" is the ratio of
operations alone, by the routes of `tfdp.explain_clipping` and the table of docs/scale.md.
"""

import argparse
import os
import pathlib
import sys
import time

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, str(pathlib.Path(__file__).parent / 'clipping'))

import models
import numpy as np
import steps_ours
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

BASE = {'batch': 16, 'length': 64, 'width': 128, 'vocabulary': 2000}
VALUES = {'batch': (4, 8, 16, 32, 64), 'length': (16, 32, 64, 128, 256),
          'width': (32, 64, 128, 256), 'vocabulary': (500, 2000, 8000, 32000)}
BLOCKS, SECONDS = 2, 3.0


def norms(layer, length, width):
  """Operations of the norms of a layer's gradients, per example and step of its sequence."""
  other = layer.parameters // width
  return 2 * length * (width + other + 1) if 'gram' in layer.route else 2 * width * other / length


def expected(model, batch, length, width):
  """The ratio by operations: products with weights and of attention, forward and back."""
  products = [one for one in tfdp.explain_clipping(model, batch_size=batch).layers
              if one.kind in ('Dense', 'EinsumDense')]
  weights = sum(one.parameters for one in products)
  plain = 6 * weights + 12 * length * width * BLOCKS
  more = sum(norms(one, length, width) for one in products)
  return (plain + more) / plain


def point(size):
  task = models.transformer(**size, blocks=BLOCKS)
  model = task.build(compat.keras)
  x, y = tf.constant(task.x), tf.constant(task.y)
  steps = [tf.function(make(model, task), autograph=False)
           for make in (steps_ours._plain, steps_ours._ours(False))]
  for step in steps:
    step(x, y)
  spent, begin = np.zeros((0, 2)), time.process_time()
  while time.process_time() - begin < SECONDS or len(spent) < 5:
    row = []
    for step in steps:
      before = time.process_time()
      step(x, y)[0].numpy()
      row.append(time.process_time() - before)
    spent = np.append(spent, [row], 0)
  plain, private = np.median(spent, 0)
  ratio = np.median(spent[:, 1] / spent[:, 0])
  return plain, private, ratio, expected(model, size['batch'], size['length'], size['width'])


def plot(found, path):
  from matplotlib import pyplot
  from matplotlib import ticker
  figure, axes = pyplot.subplots(1, len(found), figsize=(13, 3.2), sharey=False)
  for axis, (name, points) in zip(axes, found.items()):
    values = VALUES[name]
    plain, private, _, ratio = (np.array(column) for column in zip(*points))
    axis.loglog(values, 1e3 * plain, 'o:', color='gray', label='plain')
    axis.loglog(values, 1e3 * private, 'o', color='tab:red', label='private, measured')
    axis.loglog(values, 1e3 * plain * ratio, '-', color='tab:red', lw=1,
                label='plain x operations')
    axis.set(xlabel=name, xticks=values, xticklabels=values)
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter('{x:g}')
    axis.minorticks_off()
    axis.grid(alpha=.3)
  axes[0].set_ylabel('CPU ms per gradient')
  axes[0].legend(fontsize=8)
  figure.tight_layout()
  figure.savefig(path, dpi=110)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', required=True)
  parser.add_argument('--plot', required=True)
  args = parser.parse_args()
  lines = [f'TensorFlow {tf.__version__}; a transformer of {BLOCKS} blocks: '
           + ', '.join(f'{name} {value}' for name, value in BASE.items()) + ' unless said',
           '', 'varied             plain, ms  private, ms  ratio  by flops']
  found = {}
  for name, values in VALUES.items():
    for value in values:
      one = point(dict(BASE, **{name: value}))
      found.setdefault(name, []).append(one)
      lines.append(f'{name:11}{value:7}{1e3 * one[0]:10.1f}{1e3 * one[1]:13.1f}'
                   f'{one[2]:7.2f}{one[3]:10.2f}')
      print(lines[-1], flush=True)
  with open(args.out, 'w', encoding='utf-8') as file:
    file.write('\n'.join(lines) + '\n')
  plot(found, args.plot)


if __name__ == '__main__':
  main()
