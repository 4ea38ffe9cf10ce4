# SPDX-License-Identifier: Apache-2.0
"""Private steps beside plain ones on a GPU: time, memory, and whether it computes the same.

Usage: python benchmarks/speed/gpu.py [--device GPU:0] [--models mlp,transformer] [--seconds 2]

Runs as it is on either stack. Times are of the clock (a GPU works while the processor waits),
of steps in turns, each over when its result is on the host. Memory is what a step takes of the
device beyond what is held between steps. "error" is a gradient's distance from the same
gradient on the processor, relative: TF32 products, TensorFlow's default on a GPU, have some
1e-3. Without TensorFlow or without the device a line says so, and the exit status is 1.
`--device CPU:0` measures the processor by the same clock.
"""

import argparse
import os
import pathlib
import statistics
import sys
import time
import warnings

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
sys.path.insert(0, str(pathlib.Path(__file__).parent / 'clipping'))

try:
  import numpy as np
  import tensorflow as tf
except ImportError as error:
  sys.exit(f'TensorFlow is not installed here ({error}): install either lock of requirements/.')

import models
import steps_ours

from tfdp_adaptive.noise import keys
from tfdp_adaptive.noise import streams

CASES = ('plain', 'isotropic', 'diagonal', 'plain fit', 'DPAdam fit', 'STP fit')
NORMALS = 10**7


def memory_of(step, device):
  """Bytes that a step has the device's allocator give out at most, beyond what is held anyway."""
  memory = tf.config.experimental
  try:
    memory.reset_memory_stats(device)
    held = memory.get_memory_info(device)['current']
  except ValueError:  # Not every device counts.
    return None
  step()
  return memory.get_memory_info(device)['peak'] - held


def turns(steps, seconds):
  """Seconds of a step, [rounds] for every case; each case is asked `seconds` altogether."""
  spent = {name: [] for name in steps}
  while sum(map(sum, spent.values())) < seconds * len(steps) or len(spent[next(iter(spent))]) < 5:
    for name, step in steps.items():
      start = time.perf_counter()
      step()
      spent[name].append(time.perf_counter() - start)
  return spent


def gradient_error(name, case):
  """A gradient's distance from the same gradient on the processor, relative."""
  task = models.MODELS[name]()
  model = task.build(steps_ours.keras)
  make = {'plain': steps_ours._plain, 'isotropic': steps_ours._ours(False),
          'diagonal': steps_ours._ours(True)}[case]
  step = make(model, task)

  def total():
    x, y = tf.constant(task.x), tf.constant(task.y)
    return np.concatenate([np.ravel(g) for g in tf.function(step, autograph=False)(x, y)])

  here = total()
  with tf.device('CPU:0'):
    there = total()
  return np.linalg.norm(here - there) / np.linalg.norm(there)


def report(name, device, seconds):
  makers = steps_ours.cases(name)
  print(f'\n{name:28}{"ms":>9}{"/ plain":>9}{"MB":>9}{"error":>10}', flush=True)
  for xla in ('', ' xla'):
    steps, most = {}, {}
    for case in CASES:
      step, _ = makers[case + xla]()
      step()
      steps[case], most[case] = step, memory_of(step, device)
    spent = turns(steps, seconds)
    for case in CASES:
      floor = spent['plain fit' if 'fit' in case else 'plain']
      ratio = statistics.median(a / b for a, b in zip(spent[case], floor))
      memory = '-' if most[case] is None else f'{most[case] / 1e6:.1f}'
      error = '-' if xla or 'fit' in case else f'{gradient_error(name, case):.1e}'
      print(f'  {case + xla:26}{1e3 * statistics.median(spent[case]):9.2f}{ratio:9.2f}{memory:>9}'
            f'{error:>10}', flush=True)


def report_noise(seconds):
  """A row of normals: its time, and whether the processor draws the same."""
  specs = streams.flat_specs((tf.TensorSpec([NORMALS]),))
  draw = tf.function(lambda: streams.vectors(keys.from_seed(1), specs)[0], autograph=False)
  here = draw().numpy()
  with tf.device('CPU:0'):
    there = streams.vectors(keys.from_seed(1), specs)[0].numpy()
  spent = turns({'row': lambda: draw()[0].numpy()}, seconds)['row']
  print(f'\na row of {NORMALS:,} normals: {1e3 * statistics.median(spent):.2f} ms; from the '
        f"processor's it differs by at most {np.abs(here - there).max():.1e}")


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--device', default='GPU:0')
  parser.add_argument('--models', default='mlp,cnn,lstm,transformer,transformer6,embedding')
  parser.add_argument('--seconds', type=float, default=2.0)
  arguments = parser.parse_args()
  warnings.simplefilter('ignore')
  tf.get_logger().setLevel('ERROR')
  unknown = sorted(set(arguments.models.split(',')) - set(models.MODELS))
  if unknown:
    parser.error(f'--models must be of {", ".join(models.MODELS)}. Received: {", ".join(unknown)}')
  if arguments.device.startswith('CPU'):
    tf.config.set_visible_devices([], 'GPU')
  found = [one.name.rpartition('device:')[2] for one in tf.config.list_logical_devices()]
  if arguments.device not in found:
    sys.exit(f'TensorFlow {tf.__version__} sees no {arguments.device} here, only '
             f'{", ".join(found)}. GPU builds of TensorFlow: pip install "tensorflow[and-cuda]".')
  described = [tf.config.experimental.get_device_details(one).get('device_name', one.name)
               for one in tf.config.list_physical_devices(arguments.device.partition(':')[0])]
  print(f'TensorFlow {tf.__version__} on {described[0]}; TF32 '
        f'{"on" if tf.config.experimental.tensor_float_32_execution_enabled() else "off"}')
  for name in arguments.models.split(','):
    report(name, arguments.device, arguments.seconds)
  report_noise(arguments.seconds)


if __name__ == '__main__':
  main()
