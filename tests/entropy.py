# SPDX-License-Identifier: Apache-2.0
"""A test draws the same at every run: a false alarm of a statistic comes always or never.

The library takes its secret coins and keys from the operating system, so a check that is wrong
once in a thousand runs would fail once in a thousand runs. Within a test the system's entropy
comes from a generator that the test's name seeds. Processes that a test starts have the real one.
"""

import os
import random
import secrets
import zlib

import numpy as np
import pytest

_generator = random.Random()


def pytest_configure():
  os.urandom = _generator.randbytes
  secrets.randbits = _generator.getrandbits


def _begin(item, phase):
  seed = zlib.crc32(f'{item.nodeid} {phase}'.encode())
  _generator.seed(seed)
  random.seed(seed)  # Initializers of Keras without a seed draw theirs here.
  np.random.seed(seed)


@pytest.hookimpl(tryfirst=True)  # Before the fixtures.
def pytest_runtest_setup(item):
  _begin(item, 'setup')


@pytest.hookimpl(tryfirst=True)  # Fixtures that other tests share may have drawn or not.
def pytest_runtest_call(item):
  _begin(item, 'call')
