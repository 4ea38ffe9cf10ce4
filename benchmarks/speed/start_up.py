# SPDX-License-Identifier: Apache-2.0
"""CPU time until a command answers, and until a small private model has done its first step.

Usage: python benchmarks/speed/start_up.py [interpreter ...]

One table for each interpreter, of which each may have another stack; else for the one that runs
this. Every figure is the least of some new processes: imports, the model, the first step of `fit`
(check, trace and run), and of the same step of a plain model.
"""

import pathlib
import resource
import subprocess
import sys

REMARKS = pathlib.Path(__file__).parents[1] / 'remarks' / 'start_up.txt'
RUNS = 2
COMMANDS = ['--help', 'privacy --help', 'mechanism --help',
            'privacy --population-size 20000 --batch-size 500 --steps 1000 '
            '--noise-multiplier 1.0 --delta 1e-6']
PROGRAM = '''
import sys, time
marks = [time.process_time()]
import numpy as np
import tensorflow as tf
tf.keras.Model
marks.append(time.process_time())
import tfdp_adaptive as tfdp
tfdp.DPAdam, tfdp.make_private
marks.append(time.process_time())
keras = tfdp.compat.keras
x, y = np.zeros((8, 3), np.float32), np.zeros((8, 1), np.float32)
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(8), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.1)
if sys.argv[1] == 'private':
  model = tfdp.make_private(model)
  optimizer = tfdp.DPAdam(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8)
model.compile(optimizer, loss='mse')
model.fit(x, y, batch_size=8, verbose=0)
marks.append(time.process_time())
print(tf.__version__, *marks)
'''


def first_step(python, kind):
  """`(TensorFlow's version, seconds of each part)`."""
  out = subprocess.run([python, '-c', PROGRAM, kind], stdout=subprocess.PIPE, check=True,
                       stderr=subprocess.DEVNULL, text=True).stdout
  version, *marks = out.split()
  marks = [0.0] + [float(mark) for mark in marks]
  return version, [after - before for before, after in zip(marks, marks[1:])]


def command(python, arguments):
  """CPU seconds of a `tfdp` command."""
  used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
  before = used()
  subprocess.run([pathlib.Path(python).parent / 'tfdp', *arguments.split()],
                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
  return used() - before


def table(python):
  runs = {kind: [first_step(python, kind) for _ in range(RUNS)] for kind in ('plain', 'private')}
  print(f'TensorFlow {runs["plain"][0][0]}; CPU seconds, the least of {RUNS} processes\n')
  least = {kind: [min(parts) for parts in zip(*(seconds for _, seconds in several))]
           for kind, several in runs.items()}
  rows = [('start Python', least['private'][0]),
          ('import TensorFlow and Keras', least['private'][1]),
          ('import tfdp_adaptive', least['private'][2]),
          ('model and first step, private', least['private'][3]),
          ('model and first step, plain', least['plain'][3]),
          ('first private step in all', sum(least['private']))]
  rows += [(f'tfdp {arguments}', min(command(python, arguments) for _ in range(RUNS)))
           for arguments in COMMANDS]
  for name, seconds in rows:
    short = name if len(name) < 30 else name[:27] + '...'
    print(f'{short:30} {seconds:6.2f}', flush=True)


def main():
  print(REMARKS.read_text(encoding='utf-8'))
  for i, python in enumerate(sys.argv[1:] or [sys.executable]):
    if i:
      print()
    table(python)


if __name__ == '__main__':
  main()
