# SPDX-License-Identifier: Apache-2.0
"""Selects the tests that run on a stack, by the options below.

    python -m pytest tests                  all but the slow ones
    python -m pytest tests --part=quick     the quick ones: every test that finds what no other does
    python -m pytest tests --part=half      this stack's half of them: `make test`, on both stacks
    python -m pytest tests --part=rest      the other half, and half of those that are not quick
    python -m pytest tests --slow           all
    python -m pytest tests --shuffle=3      in another order, of files and in each; 3 is the seed
    python -m pytest tests --limit=900      begins no test after 900 s, and says how many are left

A test is marked `thorough`, and is not quick, where cheaper ones notice every bug that it was
written for: its rows share all code, or a smaller test or those of the parts fail as well. It may
keep some rows, `thorough(but=['adam'])`, or lose some, `thorough(rows=['*-xla'])`; `*` stands for
anything. A test that alone notices a bug of `tests/mutants` must stay.

The two stacks share the tests: each runs on one of them, but for those that ask which stack they
are on, which run on both. The rest are the quick tests on the stack that they did not run on, and
the others on one; `.ci/run` gives them a limit, and an order by the number of commits: what a slow
machine leaves out of one run is in others. What can compute with NumPy alone runs on the newer
stack, `tests/federated` on the older one, and a few of both, marked `both_stacks`, on both.
"""

import fnmatch
import importlib.metadata
import pathlib
import random
import time
import zlib

import pytest

TESTS = pathlib.Path(__file__).parent
KERAS_2 = importlib.metadata.version('keras').startswith('2.')
NUMPY = ('mechanisms', 'accounting')
BOTH = ('both_stacks', 'skipif', 'federated')  # Marks of tests that run on both stacks.
ASKS = {'KERAS_3', 'find_spec'}  # Names by which a test asks for its stack.


def pytest_addoption(parser):
  group = parser.getgroup('selection')
  group.addoption('--part', choices=('quick', 'half', 'rest'), help='see tests/selection.py')
  group.addoption('--slow', action='store_true', help='also the tests marked slow')
  group.addoption('--shuffle', type=int, metavar='SEED', help='run files and their tests in an '
                  'order that is drawn')
  group.addoption('--limit', type=float, metavar='SECONDS', help='begin no test after so long')


def pytest_configure(config):
  for line in ('slow: takes minutes; runs with --slow',
               'thorough(but=None, rows=None): not quick, or only some rows; see selection.py',
               'both_stacks: runs on both stacks, where others run on one'):
    config.addinivalue_line('markers', line)
  if config.getoption('--limit') is not None:
    config.pluginmanager.register(Limit(config.getoption('--limit')))


class Limit:
  """Skips what is left when time is up, and says how much."""

  SAID = 'left out: time was up'

  def __init__(self, seconds):
    self._end = time.monotonic() + seconds

  @pytest.hookimpl(tryfirst=True)
  def pytest_runtest_setup(self):
    if time.monotonic() > self._end:
      pytest.skip(self.SAID)

  def pytest_terminal_summary(self, terminalreporter):
    left = [one for one in terminalreporter.stats.get('skipped', ())
            if isinstance(one.longrepr, tuple) and self.SAID in one.longrepr[-1]]
    terminalreporter.write_line(f'{len(left)} tests {self.SAID}')


def pytest_ignore_collect(collection_path, config):
  """Does not even import files whose tests are all for the other stack."""
  if config.getoption('--part') not in ('half', 'rest') or not KERAS_2 or (
      collection_path.suffix != '.py' or collection_path.parent.name not in NUMPY):
    return None
  text = collection_path.read_text(encoding='utf-8')
  return None if any(word in text for word in (*BOTH, *ASKS)) else True


def _name(item):
  """`room/file_test.py::test`, and the row."""
  path, _, test = item.nodeid.partition('::')
  test, _, row = test.partition('[')
  file = pathlib.Path(item.path).relative_to(TESTS).as_posix() if path else path
  return f'{file}::{test}', row[:-1]


def _room(item):
  return item.path.relative_to(TESTS).parts[0]


def _is_quick(item):
  marker = item.get_closest_marker('thorough')
  if marker is None:
    return True
  in_any = lambda patterns: any(fnmatch.fnmatchcase(_name(item)[1], one) for one in patterns)
  if 'rows' in marker.kwargs:
    return not in_any(marker.kwargs['rows'])
  return in_any(marker.kwargs.get('but', ()))


def _is_ours(item):
  """Whether this stack is the one that a quick test runs on."""
  code = getattr(item.function, '__code__', None)
  if (any(item.get_closest_marker(name) for name in BOTH)
      or code is not None and ASKS.intersection(code.co_names)):
    return True
  if _room(item) in NUMPY:
    return not KERAS_2
  if _room(item) == 'federated':  # TensorFlow Federated is on the older stack alone.
    return KERAS_2
  shared = any(definitions[-1].scope in ('module', 'session') and definitions[-1].baseid
               and definitions[-1].baseid.endswith(item.path.name)
               for definitions in item._fixtureinfo.name2fixturedefs.values())
  name, row = _name(item)  # Users of a costly fixture stay together.
  return zlib.crc32((name.partition('::')[0] if shared else name + row).encode()) % 2 == KERAS_2


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
  part, slow = config.getoption('--part'), config.getoption('--slow')

  def is_wanted(item):
    if item.get_closest_marker('slow') and not slow:
      return False
    if part is None:
      return True
    quick = _is_quick(item)
    if part == 'quick':
      return quick
    if part == 'half':
      return quick and _is_ours(item)
    return _is_ours(item) is not quick and not (quick and KERAS_2 and _room(item) in NUMPY)

  kept, left = [], []
  for item in items:
    (kept if is_wanted(item) else left).append(item)
  config.hook.pytest_deselected(items=left)
  items[:] = kept if config.getoption('--shuffle') is None else shuffled(
      kept, config.getoption('--shuffle'))


def shuffled(items, seed):
  """Items in another order; those of a file stay together, as they share fixtures."""
  rng, files = random.Random(seed), {}
  for item in items:
    files.setdefault(item.path, []).append(item)
  of_files = list(files.values())
  rng.shuffle(of_files)
  for of_file in of_files:
    rng.shuffle(of_file)
  return [item for of_file in of_files for item in of_file]
