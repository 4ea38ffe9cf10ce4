# SPDX-License-Identifier: Apache-2.0
"""Measures the processor time of tests in seconds, with their processes and threads.

Processor time is nearly the same on a busy machine; seconds on the clock are not.

    python -m pytest tests/rules              prints the ten dearest tests and the sum
    python -m pytest tests --costs build/costs.tsv      writes a line a test
    python tests/costs.py build/costs.tsv     sums them by room and by file
"""

import collections
import os
import pathlib
import resource
import sys
import time

import pytest

SHOWN = 10
_TICKS = os.sysconf('SC_CLK_TCK')


def pytest_addoption(parser):
  parser.addoption('--costs', metavar='FILE', help='write what each test cost into a file')


def pytest_configure(config):
  config.pluginmanager.register(_Costs(config), 'costs-of-tests')


def spent() -> float:
  """Seconds of this process and of its children, ended and living."""
  ended = resource.getrusage(resource.RUSAGE_CHILDREN)
  living = sum(_living(pathlib.Path('/proc/self'))) if _has_children() else 0.0
  return time.process_time() + ended.ru_utime + ended.ru_stime + living


def _has_children():
  """Without a look at each thread, of which TensorFlow has many."""
  try:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
  except ChildProcessError:
    return False
  return True


def _living(process):
  """Yields the seconds of running children and their children; none without /proc."""
  for children in process.glob('task/*/children'):
    try:
      for child in children.read_text(encoding='utf-8').split():
        fields = pathlib.Path('/proc', child, 'stat').read_text(encoding='utf-8')
        # After the name in parentheses: state, ..., utime, stime, cutime, cstime at 11 to 14.
        yield sum(map(int, fields.rpartition(')')[2].split()[11:15])) / _TICKS
        yield from _living(pathlib.Path('/proc', child))
    except OSError:  # It ended meanwhile.
      pass


class _Costs:
  """Measures in the processes that run tests, and sums where their reports arrive."""

  def __init__(self, config):
    self._config = config
    self._by_test = collections.Counter()

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item):
    self._before = spent()
    return (yield)

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_makereport(self, item, call):
    report = yield
    now = spent()
    report.user_properties.append(('cost', now - self._before))
    self._before = now
    return report

  def pytest_runtest_logreport(self, report):
    self._by_test[report.nodeid] += sum(
        value for name, value in report.user_properties if name == 'cost')

  def pytest_terminal_summary(self, terminalreporter):
    if hasattr(self._config, 'workerinput'):
      return
    if self._config.getoption('--costs'):
      lines = [f'{cost:.3f}\t{test}\n' for test, cost in self._by_test.most_common()]
      path = pathlib.Path(self._config.getoption('--costs'))
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(''.join(lines), encoding='utf-8')
    terminalreporter.section(f'the {SHOWN} dearest tests, in seconds of processor time')
    for test, cost in self._by_test.most_common(SHOWN):
      terminalreporter.write_line(f'{cost:7.1f}  {test}')
    terminalreporter.write_line(f'{sum(self._by_test.values()):7.1f}  {len(self._by_test)} tests')


def tables(path):
  """Prints the sums of a file of costs, room by room and file by file."""
  rooms, files, counts = collections.Counter(), collections.Counter(), collections.Counter()
  for line in pathlib.Path(path).read_text(encoding='utf-8').splitlines():
    cost, test = line.split('\t', 1)
    file = test.partition('::')[0]
    room = str(pathlib.PurePosixPath(file).parent)
    for key, sums in [(room, rooms), (file, files)]:
      sums[key] += float(cost)
      counts[key] += 1
  for sums in (rooms, files):
    for key, cost in sums.most_common():
      print(f'{cost:8.1f} s {counts[key]:6} tests  {key}')
    print(f'{sum(sums.values()):8.1f} s')


if __name__ == '__main__':
  tables(sys.argv[1])
