# SPDX-License-Identifier: Apache-2.0
"""A test draws the same at every run: a false alarm of a statistic comes always or never.

The library takes its secret coins and keys from the operating system, so a check that is wrong
once in a thousand runs would fail once in a thousand runs. Within a test the system's entropy
comes from a generator that the test's name seeds. Processes that a test starts have the real one.
The `numpy.random.Generator`s of a test module begin each test as its import left them, so that
no test draws after another one's draws.
"""

import os
import random
import secrets
import zlib

import numpy as np
import pytest

_generator = random.Random()
_imported = {}  # The state of each test module's generators after the import, by their ids.


def pytest_configure():
  os.urandom = _generator.randbytes
  secrets.randbits = _generator.getrandbits


def _module_generators(item):
  """Yields the generators of the test's module."""
  for value in vars(getattr(item, 'module', item)).values():
    if isinstance(value, np.random.Generator):
      yield value


def pytest_collection_finish(session):
  for item in session.items:
    for generator in _module_generators(item):
      _imported[id(generator)] = generator.bit_generator.state


def _begin(item, phase):
  seed = zlib.crc32(f'{item.nodeid} {phase}'.encode())
  _generator.seed(seed)
  random.seed(seed)  # Initializers of Keras without a seed draw theirs here.
  np.random.seed(seed)
  for generator in _module_generators(item):
    generator.bit_generator.state = _imported[id(generator)]


@pytest.hookimpl(tryfirst=True)  # Before the fixtures.
def pytest_runtest_setup(item):
  _begin(item, 'setup')


@pytest.hookimpl(tryfirst=True)  # Fixtures that other tests share may have drawn or not.
def pytest_runtest_call(item):
  _begin(item, 'call')
