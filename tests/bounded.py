# SPDX-License-Identifier: Apache-2.0
"""Runs a command for a limited time and ends all that it started.

    python tests/bounded.py SECONDS COMMAND...

Ray and Flower start processes in sessions of their own, which outlive a test that is killed. On
Linux, this process inherits them when their parents end.
"""

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_GRACE = 30  # Seconds for pytest to end its fixtures.


def descendants(pid):
  """Yields all that a process started, and then the process."""
  with contextlib.suppress(FileNotFoundError, ProcessLookupError):
    for task in pathlib.Path(f'/proc/{pid}/task').iterdir():
      for child in (task / 'children').read_text(encoding='ascii').split():
        yield from descendants(int(child))
  yield pid


def signal_all(number):
  """Signals all descendants of this process, and returns how many there are."""
  pids = [pid for pid in descendants(os.getpid()) if pid != os.getpid()]
  for pid in pids:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, number)
  return len(pids)


def main(seconds, *command):
  """Returns the status of the command, or 124 after its time was up."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
  signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background jobs ignore it.
  process = subprocess.Popen(command)
  try:
    return process.wait(float(seconds))
  except subprocess.TimeoutExpired:
    print(f'time was up after {seconds} s: {" ".join(command)}', flush=True)
    signal_all(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(_GRACE)
    return 124
  finally:
    while signal_all(signal.SIGKILL):
      with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
          pass
      time.sleep(0.1)


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
