# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that writes the outcome of every test to the file TFDP_PEERS_RESULTS."""

import json
import os
import pathlib
import signal

import pytest

import tfdp_adaptive as tfdp

_OURS = str(pathlib.Path(tfdp.__file__).parent)
_LONGEST = 300  # Seconds of processor time of a test.


def _refused(excinfo):
  """Whether the library raised an error in words of its own."""
  text = str(excinfo.value)
  return excinfo.errisinstance(tfdp.PrivacyError) or 'PrivacyError' in text or (
      'Received' in text and ('Unsupported event' in text or excinfo.errisinstance(
          (ValueError, TypeError)) and any(_OURS in str(one.path) for one in excinfo.traceback)))


def _stop(*_):
  raise TimeoutError(f'The test took more than {_LONGEST} s of processor time.')


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
  """Ends a test that takes too long."""
  del item
  signal.signal(signal.SIGPROF, _stop)
  signal.setitimer(signal.ITIMER_PROF, _LONGEST)
  yield
  signal.setitimer(signal.ITIMER_PROF, 0)


def pytest_runtest_makereport(item, call):
  """Writes the outcome of a test, at once: another may end the process."""
  if call.when != 'call' and call.excinfo is None:
    return
  outcome = 'passed'
  if call.excinfo is not None:
    outcome = 'skipped' if call.excinfo.typename == 'Skipped' else (
        'refused' if _refused(call.excinfo) else 'failed')
  text = '' if call.excinfo is None else str(call.excinfo.value).strip().split('\n')[0][:200]
  line = json.dumps([item.nodeid, outcome, f'{call.excinfo.typename}: {text}' if text else ''])
  with open(os.environ['TFDP_PEERS_RESULTS'], 'a', encoding='utf-8') as file:
    file.write(line + '\n')
