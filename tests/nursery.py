# SPDX-License-Identifier: Apache-2.0
"""Processes to be killed, without the wait for TensorFlow: children of one that has imported it.

The parent runs nothing of TensorFlow, so a child differs from a fresh process by its imports
only. What is tried adds up over runs in the file that TFDP_TALLY names;
`python tests/nursery.py FILE` prints the sums.
"""

import collections
import contextlib
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys

import tfdp_adaptive

ROOT = pathlib.Path(tfdp_adaptive.__file__).parent.parent


class Nursery:
  """Starts children, one at a time.

  Args:
    modules: To be imported before.
  """

  def __init__(self, *modules):
    self.child, self.status = None, 0
    self._mother = subprocess.Popen(
        [sys.executable, __file__, '--', *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, bufsize=1, cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'TF_CPP_MIN_LOG_LEVEL': '3'})

  def start(self, output, script, *arguments):
    """Runs a script of Python in a child; `output` gets what it says."""
    print(json.dumps([str(one) for one in (output, script, *arguments)]), file=self._mother.stdin)
    self.child = int(self._mother.stdout.readline())
    self.status = None

  def ended(self, seconds=0.0):
    """Whether the child has ended, now or within so many seconds (None: wait)."""
    if self.status is None and select.select([self._mother.stdout], [], [], seconds)[0]:
      self.status = int(self._mother.stdout.readline())
    return self.status is not None

  def kill(self):
    """Kills the child, if there still is one; whether there was."""
    with contextlib.suppress(ProcessLookupError):
      os.kill(self.child, signal.SIGKILL)
    self.ended(None)
    return self.status == -signal.SIGKILL

  def run(self, output, script, *arguments):
    """Status of a child that ends by itself, and what it said."""
    self.start(output, script, *arguments)
    self.ended(None)
    return self.status, pathlib.Path(output).read_text(encoding='utf-8')

  def __enter__(self):
    return self

  def __exit__(self, *_):
    if not self.ended():
      self.kill()
    self._mother.communicate()


def tally(what, **counts):
  """Says what was tried, and adds it to the tally."""
  print(what, counts)
  if 'TFDP_TALLY' in os.environ:
    with open(os.environ['TFDP_TALLY'], 'a', encoding='utf-8') as file:
      file.write(json.dumps([what, counts]) + '\n')


def sums(path):
  """Returns the sums of the counts in a tally."""
  total = collections.defaultdict(collections.Counter)
  for line in pathlib.Path(path).read_text(encoding='utf-8').splitlines():
    what, counts = json.loads(line)
    total[what].update(counts)
  return total


def _child(output, script, *arguments):
  descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  for taken in (1, 2):
    os.dup2(descriptor, taken)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  sys.argv = [script, *arguments]
  sys.path.insert(0, str(pathlib.Path(script).parent))
  try:
    runpy.run_path(script, run_name='__main__')
    return 0
  except SystemExit as end:
    return end.code or 0
  except BaseException:  # pylint: disable=broad-except
    sys.excepthook(*sys.exc_info())
    return 1


def _mother(modules):
  signal.signal(signal.SIGINT, signal.default_int_handler)
  for module in modules:
    importlib.import_module(module)
  for line in sys.stdin:
    child = os.fork()
    if not child:
      status = _child(*json.loads(line))
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == '__main__':
  if sys.argv[1] == '--':
    _mother(sys.argv[2:])
  else:
    for of, numbers in sums(sys.argv[1]).items():
      print(of, dict(numbers))
