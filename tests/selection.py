# SPDX-License-Identifier: Apache-2.0
"""Which tests run: those that find what no other finds, and with options the rest.

    python -m pytest tests               what `make test` runs
    python -m pytest tests --thorough    and what `.ci/run` runs besides
    python -m pytest tests --rest        only what `.ci/run` runs besides
    python -m pytest tests --slow        everything

A test is `thorough` where a cheaper one notices every bug that it was written for, and it tries
the same once more: another row of a table whose rows share all code, a larger size, a whole
command over parts that are tested one by one. A test is `slow` where it takes minutes.
"""

import importlib.metadata
import pathlib

import pytest

KERAS_2 = importlib.metadata.version('keras').startswith('2.')
TESTS = pathlib.Path(__file__).parent
# Their subjects compute with NumPy alone, so one stack is enough; what is marked `both_stacks`
# runs on the other too, and notices another NumPy or SciPy.
ONCE = ('mechanisms', 'privacy')


def pytest_addoption(parser):
  group = parser.getgroup('selection')
  group.addoption('--thorough', action='store_true', help='also the tests marked thorough')
  group.addoption('--rest', action='store_true', help='only what a plain run leaves out')
  group.addoption('--slow', action='store_true', help='also the tests marked slow')


def pytest_configure(config):
  for line in ('slow: takes minutes; runs with --slow',
               'thorough: tries once more what a cheaper test notices; runs with --thorough',
               'both_stacks: runs on both stacks, in a room that runs on one'):
    config.addinivalue_line('markers', line)


def _plain(item):
  """Whether a plain run has the test."""
  if item.get_closest_marker('thorough'):
    return False
  once = KERAS_2 and item.path.relative_to(TESTS).parts[0] in ONCE
  return not once or item.get_closest_marker('both_stacks') is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
  slow, rest = config.getoption('--slow'), config.getoption('--rest')
  wanted = {
      item for item in items
      if (slow or not item.get_closest_marker('slow'))
      and (_plain(item) is not rest or slow or config.getoption('--thorough'))}
  config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
  items[:] = [item for item in items if item in wanted]
