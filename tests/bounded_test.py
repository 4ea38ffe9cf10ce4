# SPDX-License-Identifier: Apache-2.0
"""Nothing that a command started outlives its limit of time, or its end."""

import pathlib
import subprocess
import sys
import time

import bounded
import pytest

# Ends at once or never, and leaves a process in a session of its own.
COMMAND = """
import subprocess, sys, time
left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],
                        start_new_session=True)
print(left.pid, flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='processes are found in /proc')
@pytest.mark.parametrize('seconds, status', [('0', 3), ('60', 124)])
def test_no_process_is_left(seconds, status):
  begun = time.monotonic()
  done = subprocess.run(
      [sys.executable, bounded.__file__, '3', sys.executable, '-c', COMMAND, seconds],
      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=50, check=False)
  said = done.stdout.split('\n')
  assert done.returncode == status and time.monotonic() - begun < 50
  assert ('time was up after 3 s' in done.stdout) == (status == 124)
  assert not pathlib.Path(f'/proc/{said[0]}').exists()
