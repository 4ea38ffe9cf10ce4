# SPDX-License-Identifier: Apache-2.0
"""What private steps cost, beside plain ones and beside every peer: `make bench`.

    python benchmarks/speed/clipping_table.py [--models mlp,cnn] [--only isotropic] [--seconds 0.8]

Needs both stacks (.venv, .venv-keras3) and, for the peers, `make bench-peers`; what is
not installed is left out. Every framework runs in processes of its own, which take
turns with those of the plain steps, case by case: a figure is the median over rounds of
its ratio to the plain step of the same framework in the same round. What is measured
replaces what an earlier run measured of the same model (build/bench/clipping.json); the
table shows all there is, below benchmarks/remarks/clipping_speed.txt, which says what the
figures do not.
"""

import argparse
import atexit
import concurrent.futures
import contextlib
import json
import os
import pathlib
import platform
import select
import signal
import statistics
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).parents[2]
STORE = ROOT / 'build' / 'bench' / 'clipping.json'
REMARKS = ROOT / 'benchmarks' / 'remarks' / 'clipping_speed.txt'
MODELS = ('mlp', 'cnn', 'lstm', 'transformer', 'transformer6', 'embedding')
PATIENCE = 300  # Seconds that a first step, a few more, or a peak of memory, may take.
GIGABYTES = 6  # Largest memory of a case.

OURS = ('plain', 'isotropic', 'diagonal', 'Kronecker', 'materialized', 'plain fit', 'DPAdam fit',
        'STP fit', 'SOAP fit')
# Library -> (interpreter, module of steps, cases: each with its plain step).
_FLOOR = {'plain': 'plain', 'isotropic': 'plain', 'diagonal': 'plain', 'Kronecker': 'plain',
          'materialized': 'plain', 'plain fit': 'plain fit', 'DPAdam fit': 'plain fit',
          'STP fit': 'plain fit', 'SOAP fit': 'plain fit'}
_OURS = {case + xla: _FLOOR[case] + xla for xla in ('', ' xla') for case in OURS}
# XLA decomposes matrices on a CPU by the second: see results/kronecker.txt.
for _left_out in ('materialized', 'Kronecker', 'SOAP fit'):
  del _OURS[_left_out + ' xla']
# Models whose steps compile for minutes: without what their smaller neighbours show already.
BRIEF = {model: ('STP fit xla', 'SOAP fit', 'vectorized', 'TF 2.14: plain fit xla',
                 'TF 2.14: DPAdam fit xla') for model in ('lstm', 'transformer')}
BRIEF['transformer6'] = ('STP fit', 'STP fit xla', 'SOAP fit', 'materialized', 'plain fit xla',
                         'DPAdam fit xla', 'vectorized', 'DPModel', 'DPModel fast')
_CHUNKED = {f'{n} batches {how}': 'plain' for how in ('at once', 'in a budget') for n in (1, 4, 16)}
LIBRARIES = {
    'TF 2.14': ('.venv', 'ours', _OURS),
    'TF 2.21': ('.venv-keras3', 'ours', {**_OURS, **_CHUNKED}),
    'tensorflow_privacy': ('.venv', 'tfp', {
        name: 'TF 2.14: plain fit' for name in (
            'DPKerasAdam', 'vectorized', 'DPModel', 'DPModel fast')}),
    'torch': ('build/peers/torch', 'torch', {
        'plain': 'plain', 'Opacus hooks': 'plain', 'Opacus ghost': 'plain',
        'plain fit': 'plain fit', 'Opacus hooks fit': 'plain fit',
        'Opacus ghost fit': 'plain fit'}),
    'jax': ('build/peers/jax', 'jax', {
        'plain': 'plain', 'jax_privacy': 'plain', 'jax_privacy one by one': 'plain'}),
}
REFERENCE = {False: 'TF 2.21: plain', True: 'TF 2.21: plain fit'}
# Times relative to the plain step; peak memory may be 1.5 of its.
TARGETS = {
    'isotropic': {'mlp': 1.15, 'transformer': 1.15, 'transformer6': 1.15, 'cnn': 1.5, 'lstm': 2},
    'diagonal': {'mlp': 1.8, 'transformer': 1.5, 'transformer6': 1.5, 'cnn': 2, 'lstm': 2.5},
    'DPAdam fit': {'mlp': 1.5},
}
MEMORY_TARGET = 1.5


class Server:
  """A process of `clipping/worker.py`, which has imported a library for all workers."""

  def __init__(self, library, memory):
    environment, steps, _ = LIBRARIES[library]
    variables = dict(os.environ, PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL='2')
    if memory:
      # Freed blocks go back to the system; oneDNN's allocator would keep them.
      variables.update(MALLOC_MMAP_THRESHOLD_='32768', MALLOC_TRIM_THRESHOLD_='32768',
                       MALLOC_TOP_PAD_='0', TF_ENABLE_ONEDNN_OPTS='0')
    self._lock = threading.Lock()
    self._process = subprocess.Popen(
        [ROOT / environment / 'bin' / 'python', 'worker.py', steps, str(GIGABYTES)],
        cwd=ROOT / 'benchmarks' / 'speed' / 'clipping', env=variables, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    atexit.register(self._process.kill)

  def fork(self, paths):
    """The process id of a copy that listens on these named pipes."""
    with self._lock:
      self._process.stdin.write(json.dumps({'fork': paths}).encode() + b'\n')
      self._process.stdin.flush()
      return json.loads(self._process.stdout.readline())['pid']


class Worker:
  """A copy of a library's server, which takes its steps and may be given up."""

  _servers, _lock = {}, threading.Lock()

  def __init__(self, library, memory=False):
    with Worker._lock:
      if (library, memory) not in Worker._servers:
        Worker._servers[library, memory] = Server(library, memory)
    with tempfile.TemporaryDirectory() as folder:
      paths = [os.path.join(folder, name) for name in ('commands', 'answers')]
      for path in paths:
        os.mkfifo(path)
      self._pid = Worker._servers[library, memory].fork(paths)
      self._commands, self._answers = open(paths[0], 'wb'), open(paths[1], 'rb')

  def ask(self, **command):
    """The answer to a command; the process is given up if there is none in time."""
    try:
      self._commands.write(json.dumps(command).encode() + b'\n')
      self._commands.flush()
    except (BrokenPipeError, ValueError):
      return {'error': 'ended'}
    if not select.select([self._answers], [], [], PATIENCE)[0]:
      self.close()
      return {'error': f'over {PATIENCE} s'}
    return json.loads(self._answers.readline() or b'{"error": "crashed"}')

  def close(self):
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._pid, signal.SIGKILL)
    for file in (self._commands, self._answers):
      with contextlib.suppress(BrokenPipeError):
        file.close()


def wanted_cases(libraries, only):
  """[(library, case)]: of the `only` ones (of all, if there are none) and the plain ones."""
  return [(library, case) for library in libraries for case in LIBRARIES[library][2]
          if case in only or 'plain' in case or not only and 'batches' not in case]


def installed(libraries):
  """Of these libraries, those that can be run here, in the order of `LIBRARIES`."""
  return [library for library, (environment, *_) in LIBRARIES.items()
          if library in libraries and (ROOT / environment / 'bin' / 'python').exists()]


def floor_of(library, case):
  floor = LIBRARIES[library][2][case]
  return floor if ':' in floor else f'{library}: {floor}'


def portions(wanted):
  """Lists of cases to measure in turns: their processes fit into memory together.

  Each has the plain steps that its cases are measured by.
  """
  groups = {}
  for library, case in wanted:
    ours = LIBRARIES[library][1] == 'ours'
    group = library + ' xla' if 'xla' in case else 'ours' if ours else library
    groups.setdefault(group, []).append((library, case))
  for cases in groups.values():
    floors = {floor_of(*one) for one in cases} | set(REFERENCE.values())
    yield [(library, case) for library, case in wanted
           if (library, case) in cases or f'{library}: {case}' in floors]


def memory(model, wanted):
  """{name: {'bytes': ...} or {'error': ...}}, in two processes at a time."""
  groups = {}
  for library, case in wanted:
    if 'xla' not in case:
      groups.setdefault(library, []).append(case)

  def measure(library):
    answers, worker = {}, Worker(library, memory=True)
    for case in groups[library]:
      answers[f'{library}: {case}'] = answer = worker.ask(memory=[model, case])
      if answer.get('error', '').startswith(('over', 'crashed')):
        worker.close()
        worker = Worker(library, memory=True)
    worker.close()
    return answers

  with concurrent.futures.ThreadPoolExecutor(2) as threads:
    return {name: answer for answers in threads.map(measure, groups)
            for name, answer in answers.items()}


def prepared(model, wanted):
  """{name: (worker, case, first step's answer)}; what may take too long has its own process."""
  groups = {}
  for library, case in wanted:
    own = case if LIBRARIES[library][1] != 'ours' or 'xla' in case else ''
    groups.setdefault((library, own), []).append(case)

  def prepare(group):
    worker = Worker(group[0])
    return [(f'{group[0]}: {case}', worker, case, worker.ask(prepare=[model, case]))
            for case in groups[group]]

  with concurrent.futures.ThreadPoolExecutor(2) as threads:
    return {name: rest for entries in threads.map(prepare, groups) for name, *rest in entries}


def times(model, wanted, seconds):
  """{name: {'times': seconds per round} or {'error': ...}}, all in turns."""
  ready = prepared(model, wanted)
  result = {name: {'times': [], 'first': answer.get('seconds')} if 'error' not in answer else answer
            for name, (_, _, answer) in ready.items()}
  usable = {name: max(answer['step'], 1e-4) for name, (_, _, answer) in ready.items()
            if 'error' not in answer}
  floors = {floor_of(*name.split(': ', 1)) for name in usable} & set(usable)
  spent, rounds = dict.fromkeys(usable, 0.0), dict.fromkeys(usable, 0)
  while True:
    active = [name for name, step in usable.items()
              if spent[name] < seconds or rounds[name] < (3 if step < 2 else 1)]
    if not set(active) - floors:
      break
    for name in list(usable):
      if name in active or name in floors:
        worker, case, _ = ready[name]
        count = max(1, min(20, int(0.06 / usable[name])))
        answer = worker.ask(run=[model, case], steps=count)
        if 'error' in answer:
          result[name].update(answer, times=[])
          del usable[name]
          continue
        usable[name] = statistics.median(answer['times'])
        spent[name] += sum(answer['times'])
        rounds[name] += 1
      result[name]['times'].append(usable[name] if name in active or name in floors else None)
  for worker, _, _ in ready.values():
    worker.close()
  return result


def ratio(measured, name, floor):
  """Median of the ratios of the same rounds, or None."""
  pairs = [(a, b) for a, b in zip(measured.get(name, {}).get('times', ()),
                                  measured.get(floor, {}).get('times', ())) if a and b]
  return statistics.median(a / b for a, b in pairs) if pairs else None


def figures(wanted, peaks, measured):
  """{name: figures} of one model, from what `memory` and `times` found."""
  result = {}
  for library, case in wanted:
    name, floor = f'{library}: {case}', floor_of(library, case)
    known, peak = measured.get(name, {}), peaks.get(name, {})
    entry = result[name] = {}
    if known or peak:
      entry['error'] = known.get('error') or peak.get('error')
    if known.get('times'):
      entry.update(ms=1000 * statistics.median(t for t in known['times'] if t),
                   ratio=ratio(measured, name, floor), first=known['first'],
                   ours=ratio(measured, name, REFERENCE[is_whole(library, case)]))
    if 'bytes' in peak:
      entry['bytes'] = peak['bytes']
      if 'bytes' in peaks.get(floor, {}):
        entry['memory'] = peak['bytes'] / peaks[floor]['bytes']
  return result


def stored():
  """{model: {name: figures}} of this run and earlier ones."""
  return json.loads(STORE.read_text(encoding='utf-8')) if STORE.exists() else {}


def keep(model, entries):
  store = stored()
  for name, entry in entries.items():
    store.setdefault(model, {}).setdefault(name, {}).update(entry)
  STORE.parent.mkdir(parents=True, exist_ok=True)
  STORE.write_text(json.dumps(store, indent=1), encoding='utf-8')


def is_whole(library, case):
  return 'fit' in case or library == 'tensorflow_privacy'


def table(store):
  """The lines of the table."""
  for model in MODELS:
    entries = store.get(model)
    if not entries:
      continue
    yield ''
    yield (f"{model:32}{'first s':>8}{'ms':>9}{'/ plain':>9}{'/ Keras':>9}{'MB':>9}{'/ plain':>9}"
           '   target')
    previous = None
    for library, case in wanted_cases(LIBRARIES, ()):
      entry = entries.get(f'{library}: {case}')
      if entry is None:
        continue
      if library != previous:
        yield f'  {library}'
      previous = library
      show = lambda key, form, scale=1: (
          format(entry[key] / scale, form) if entry.get(key) is not None else '-')
      line = (f"    {case:28}{show('first', '.1f'):>8}{show('ms', '.2f'):>9}"
              f"{show('ratio', '.2f'):>9}"
              f"{show('ours', '.2f'):>9}{show('bytes', '.1f', 1e6):>9}{show('memory', '.2f'):>9}")
      yield (line + '   ' + (brief(entry.get('error')) or verdict(
          model, library, case, entry))).rstrip()


def brief(error):
  """What an error comes to, in a few words."""
  if error and any(words in error for words in ('Exhausted', 'EXHAUSTED', 'alloc', 'crashed')):
    return f'needs more than {GIGABYTES} GB'
  return error and error.splitlines()[0][:60]


def verdict(model, library, case, entry):
  """The target, and by how much it is missed."""
  if LIBRARIES[library][1] != 'ours':
    return ''
  kind, said = case.replace(' xla', ''), []
  target = TARGETS.get(kind, {}).get(model)
  if target and entry.get('ratio'):
    said.append(_said(entry['ratio'], target, f'time {target}'))
  if kind in ('isotropic', 'diagonal', 'DPAdam fit', 'STP fit') and entry.get('memory'):
    said.append(_said(entry['memory'], MEMORY_TARGET, f'memory {MEMORY_TARGET}'))
  return ', '.join(said)


def _said(value, target, name):
  return f'{name} met' if value <= target else f'{name} MISSED by {value / target - 1:.0%}'


def chunks_table(store):
  """Peak memory of larger and larger batches, worked through within a budget."""
  for model in MODELS:
    entries = [(name, entry) for name, entry in store.get(model, {}).items()
               if 'batches' in name and 'bytes' in entry]
    if entries:
      yield ''
      yield f'{model}: MB of the isotropic gradient of larger batches'
      for name, entry in entries:
        yield f"    {name:36}{entry['bytes'] / 1e6:9.1f}"


def rivals(store):
  """For every model: our step against the fastest peer's, gradients and whole steps."""
  for model in MODELS:
    entries = store.get(model, {})
    for whole, mine in ((False, 'isotropic'), (True, 'DPAdam fit')):
      fastest = lambda names: min(((entries[n]['ours'], n) for n in names
                                   if entries[n].get('ours')), default=None)
      ours = fastest([n for n in entries if n.split(': ')[1].replace(' xla', '') == mine])
      peers = fastest([n for n in entries if LIBRARIES[n.split(': ')[0]][1] != 'ours'
                       and 'plain' not in n and is_whole(*n.split(': ')) == whole])
      if ours and peers:
        yield (f"{model:14}{'whole step' if whole else 'gradient':12}{ours[0]:6.2f} {ours[1]:30}"
               f'{peers[0]:8.2f} {peers[1]:40}' + (
                   'faster' if ours[0] <= peers[0] else f'SLOWER by {ours[0] / peers[0] - 1:.0%}'))


def report(store):
  yield from REMARKS.read_text(encoding='utf-8').splitlines()
  yield ''
  yield (f'Python {platform.python_version()}, {os.cpu_count()} CPUs. "/ plain": to the plain step '
         'of the same framework; "/ Keras": to plain Keras on TF 2.21,')
  yield ('without XLA: of the gradient, or of the whole `fit` step for whole steps. '
         '"first s": building '
         'and compiling, two cases at a time.')
  yield "\"MB\": weights, optimizer state and a warm step's peak above them."
  yield from table(store)
  yield from chunks_table(store)
  yield ''
  yield 'Times relative to plain Keras on TF 2.21: our fastest isotropic step, and the fastest peer'
  yield from rivals(store)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--models', default=','.join(MODELS))
  parser.add_argument('--only', default='', help='cases besides the plain ones')
  parser.add_argument('--libraries', default=','.join(LIBRARIES))
  parser.add_argument('--seconds', type=float, default=0.8, help='of steps per case')
  parser.add_argument('--skip', default='', help='times, memory or both: show what there is')
  parser.add_argument('--out', help='also write the table to this file')
  arguments = parser.parse_args()
  split = lambda text: set(filter(None, text.split(',')))
  every = wanted_cases(installed(split(arguments.libraries)), split(arguments.only))
  skip = split(arguments.skip)
  chunked = [('TF 2.21', case) for case in _CHUNKED] if not arguments.only else []
  for model in arguments.models.split(',') if len(skip) < 2 else ():
    start = time.time()
    wanted = [(l, c) for l, c in every
              if arguments.only or not {c, f'{l}: {c}'} & set(BRIEF.get(model, ()))]
    more = chunked if model == 'transformer' else []
    peaks = {} if 'memory' in skip else memory(model, wanted + more)
    keep(model, figures(wanted + more, peaks, {}))
    # Cases that fail or do not fit are not tried again.
    able = [(l, c) for l, c in wanted if 'error' not in peaks.get(f'{l}: {c}', {})]
    for portion in portions(able) if 'times' not in skip else ():
      keep(model, figures(portion, peaks, times(model, portion, arguments.seconds)))
    print(f'{model}: {time.time() - start:.0f} s', flush=True)
  text = '\n'.join(report(stored())) + '\n'
  print(text, end='')
  if arguments.out:
    pathlib.Path(arguments.out).write_text(text, encoding='utf-8')


if __name__ == '__main__':
  main()
