# SPDX-License-Identifier: Apache-2.0
"""Plants the bugs of `bugs`, one at a time, and tells whether the quick tests notice them.

    python tests/mutants/plant.py                    all that this stack can try
    python tests/mutants/plant.py clip noise         those whose name or file has one of the words
    python tests/mutants/plant.py --list             names, files and reasons

The checkout is copied to a temporary folder; nothing is written into it. Every bug is tried in a
process of its own, forked from one that has imported TensorFlow. What failed with a bug must pass
without: that is tried last. Exit status 1: a bug survived.
"""

import argparse
import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
from typing import NamedTuple

import bugs

ROOT = pathlib.Path(__file__).parent.parent.parent
COPIED = ('tfdp_adaptive', 'federated', 'examples', 'tests', 'docs', 'benchmarks', 'colabs',
          'requirements', '.')
LONGEST = 300  # Seconds of a bug, after which it counts as noticed: it made something endless.
IMPORTED = ('tensorflow', 'keras', 'scipy.signal', 'scipy.stats', 'dp_accounting', 'hypothesis',
            'pytest', 'tensorflow_privacy', 'tensorflow_federated')


class Try(NamedTuple):
  mutant: bugs.Mutant
  began: float
  folder: pathlib.Path
  log: pathlib.Path


def copied(to):
  """A copy of the checkout's files in which its packages beside the library are found first."""
  for name in COPIED:
    if name == '.':
      for path in ROOT.iterdir():
        if path.is_file():
          shutil.copy2(path, to)
    elif (ROOT / name).exists():
      shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns('__pycache__'))
  for name in ('federated', 'examples'):
    (to / 'tfdp_adaptive' / name).symlink_to(to / name)
  return to


def planted(text, mutant):
  if text.count(mutant.old) != 1:
    raise ValueError(f'`old` must be in its file once. Received: {text.count(mutant.old)} times in '
                     f'{mutant.file}, for the bug {mutant.name!r}. Write the line as it is now.')
  return text.replace(mutant.old, mutant.new)


def pytest_in(folder, log, arguments):
  """Forks a process that runs pytest in a copy; its process id."""
  child = os.fork()
  if child:
    return child
  status = 3
  try:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for taken in (1, 2):
      os.dup2(descriptor, taken)
    os.chdir(folder)
    signal.alarm(LONGEST)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(folder)] + [path for path in sys.path if path != str(pathlib.Path(
        __file__).parent)]
    os.environ['PYTHONPATH'] = str(folder)  # For what tests start.
    status = int(importlib.import_module('pytest').main(
        ['-q', '-x', '-p', 'no:cacheprovider', '--color=no', '--part=quick', *arguments]))
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def wait_for_one():
  """`(process id, how pytest ended: 'noticed', 'survived' or 'broken')`."""
  child, status = os.wait()
  with contextlib.suppress(ProcessLookupError):
    os.killpg(child, signal.SIGKILL)  # TFF's worker, if it is there.
  if os.WIFSIGNALED(status):
    return child, 'noticed' if os.WTERMSIG(status) == signal.SIGALRM else 'broken'
  return child, {0: 'survived', 1: 'noticed'}.get(os.WEXITSTATUS(status), 'broken')


def tried(mutants, jobs):
  """Yields `(mutant, how it ended, seconds, log)` as they end, `jobs` at a time."""
  waiting, running = list(mutants), {}
  with tempfile.TemporaryDirectory() as temporary:
    free = []
    for i in range(min(jobs, len(waiting))):
      (pathlib.Path(temporary) / str(i)).mkdir()
      free.append(copied(pathlib.Path(temporary) / str(i)))
    try:
      while waiting or running:
        while waiting and free:
          mutant, folder = waiting.pop(0), free.pop()
          path, log = folder / mutant.file, folder.with_suffix('.log')
          text = path.read_text(encoding='utf-8')
          path.write_text(planted(text, mutant), encoding='utf-8')
          child = pytest_in(folder, log, [f'tests/{name}' for name in mutant.tests.split()])
          running[child] = Try(mutant, time.monotonic(), folder, log), text
        child, ended = wait_for_one()
        one, text = running.pop(child)
        (one.folder / one.mutant.file).write_text(text, encoding='utf-8')
        free.append(one.folder)
        yield one.mutant, ended, time.monotonic() - one.began, one.log.read_text(errors='replace')
    finally:
      for child in running:  # Children of an interrupted run.
        with contextlib.suppress(ProcessLookupError):
          os.killpg(child, signal.SIGKILL)
    yield None, *_without(free[0], temporary)


_FAILED = {}  # Tests that failed with a bug; filled by `main`, tried again at the end.


def _without(folder, temporary):
  """Whether the tests that noticed bugs pass where there is none."""
  if not _FAILED:
    return 'survived', 0.0, ''
  began, log = time.monotonic(), pathlib.Path(temporary) / 'without.log'
  pytest_in(folder, log, sorted(set(_FAILED.values())))
  _, ended = wait_for_one()
  return ended, time.monotonic() - began, log.read_text(errors='replace')


def chosen(words, federated):
  found = [mutant for mutant in bugs.MUTANTS if not words or any(
      word in mutant.name or word in mutant.file for word in words)]
  return [mutant for mutant in found if mutant.federated == federated]


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('words', nargs='*', help='parts of names or files')
  parser.add_argument('--list', action='store_true')
  parser.add_argument('--federated', action='store_true',
                      help='only those that need TensorFlow Federated or TensorFlow Privacy')
  parser.add_argument('--jobs', type=int, default=2)
  arguments = parser.parse_args()
  mutants = chosen(arguments.words, arguments.federated)
  if arguments.list:
    for mutant in bugs.MUTANTS:
      print(f'{mutant.name}: {mutant.file}\n  {mutant.why}')
    return 0
  for name in IMPORTED:
    if importlib.util.find_spec(name) is not None and (
        arguments.federated or name != 'tensorflow_federated'):
      with contextlib.suppress(ImportError):  # On the newer stack, of what it has no use for.
        importlib.import_module(name)
  wrong = 0
  for mutant, ended, seconds, log in tried(mutants, arguments.jobs) if mutants else ():
    if mutant is None:
      print(f'{"the same tests without a bug: " + ("FAILED" if ended != "survived" else "passed")}'
            f', {seconds:.0f} s', flush=True)
      wrong += ended != 'survived'
    else:
      failed = re.search(r'^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$', log, re.M)
      print(f'{ended:9} {seconds:5.0f} s  {mutant.name} ({mutant.file})'
            + (f': {failed.group(1)}' if failed else ''), flush=True)
      if ended == 'noticed' and failed:
        _FAILED[mutant.name] = failed.group(1)
      wrong += ended != 'noticed'
    if ended == 'broken' or mutant is None and ended != 'survived':
      print(log[-3000:], flush=True)
  noticed = len(mutants) - wrong
  print(f'{len(mutants)} bugs: {noticed} noticed')
  return int(wrong > 0)


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  ended_with = main()
  sys.stdout.flush()
  os._exit(ended_with)  # Threads that libraries began do not outlive a fork well.
