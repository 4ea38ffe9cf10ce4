# SPDX-License-Identifier: Apache-2.0
"""A process of one framework that takes steps on request, so that frameworks can take turns.

    python worker.py ours|tfp|torch|jax GIGABYTES

Imports the framework once. For every line {"fork": [path, path]}, two named pipes, it answers
{"pid": ...} of a copy of itself, which reads commands from one pipe and writes answers to the
other, one JSON object a line:

    {"prepare": [model, case]}          compiled and warmed up: {"seconds": ...}
    {"run": [model, case], "steps": n}  {"times": [seconds of each step]}
    {"memory": [model, case]}           {"bytes": ...}, by a child of its own

At most GIGABYTES are allocated. What cannot be done is answered by {"error": ...}.
A framework is a module with `cases(model)`, a dictionary of functions that build a
case and return `(step, state)`: a step without arguments that ends when its result
is there, and the bytes of weights and optimizer state.
"""

import gc
import importlib
import json
import os
import re
import resource
import signal
import sys
import time


def memory(steps, model, case):
  """Bytes that a warm step needs at its peak, weights and optimizer state included.

  Large blocks are given back to the system as soon as they are free (see `main`),
  so what is resident before a step is no part of its work.
  """
  step, state = steps(model)[case]()
  for _ in range(2):
    step()
  gc.collect()
  with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
    file.write('5')  # Resets the peak to what is resident.
  before = _status('VmHWM')
  for _ in range(2):
    step()
  return {'bytes': state + _status('VmHWM') - before}


def _status(key):
  with open('/proc/self/status', encoding='ascii') as file:
    return 1024 * int(re.search(rf'{key}:\s+(\d+)', file.read()).group(1))


def in_child(function, *arguments):
  """The result of `function`, run in a fork: what it allocates is its own."""
  read, write = os.pipe()
  child = os.fork()
  if not child:
    os.close(read)
    with os.fdopen(write, 'w') as file:
      file.write(json.dumps(_tried(function, *arguments)))
    os._exit(0)
  os.close(write)
  with os.fdopen(read) as file:
    answer = file.read()
  os.waitpid(child, 0)
  return json.loads(answer or '{"error": "out of memory"}')


def _tried(function, *arguments):
  try:
    return function(*arguments)
  except Exception as error:  # pylint: disable=broad-except
    if os.environ.get('VERBOSE'):
      import traceback  # pylint: disable=import-outside-toplevel
      traceback.print_exc()
    return {'error': f'{type(error).__name__}: {error}'[:300]}


def serve(steps, lines, answers):
  """Answers every command."""
  prepared = {}

  def prepare(model, case):
    start = time.perf_counter()
    step = steps(model)[case]()[0]
    step()
    middle = time.perf_counter()
    step()
    prepared[model, case] = step
    return {'seconds': middle - start, 'step': time.perf_counter() - middle}

  def run(model, case, count):
    step, times = prepared[model, case], []
    for _ in range(count):
      start = time.perf_counter()
      step()
      times.append(time.perf_counter() - start)
    return {'times': times}

  for line in lines:
    command = json.loads(line)
    if 'prepare' in command:
      answer = _tried(prepare, *command['prepare'])
    elif 'run' in command:
      answer = _tried(run, *command['run'], command['steps'])
    else:
      answer = in_child(memory, steps, *command['memory'])
    print(json.dumps(answer), file=answers, flush=True)


def main():
  # TensorFlow and others write to standard output: keep the answers apart.
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)
  steps = importlib.import_module('steps_' + sys.argv[1]).cases
  limit = _status('VmData') + int(sys.argv[2]) * 2**30
  resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # No zombies.
  for line in sys.stdin:
    source, target = json.loads(line)['fork']
    child = os.fork()
    if not child:
      os.setsid()  # Its children end with it.
      signal.signal(signal.SIGCHLD, signal.SIG_DFL)
      with open(source, encoding='utf-8') as lines, open(target, 'w', encoding='utf-8') as own:
        serve(steps, lines, own)
      os._exit(0)
    print(json.dumps({'pid': child}), file=answers, flush=True)


if __name__ == '__main__':
  main()
