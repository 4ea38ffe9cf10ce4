# SPDX-License-Identifier: Apache-2.0
"""Two runs of a test draw the same, secrets too; two tests draw different secrets."""

import os
import pathlib
import subprocess
import sys

import pytest

DRAWS = """
import os
import random
import secrets

import numpy as np
import pytest

RNG = np.random.default_rng(0)


@pytest.mark.parametrize('number', [1, 2])
def test(number):
  print('drawn', os.urandom(8), secrets.randbits(64), random.random(), np.random.rand(),
        RNG.normal())
"""


@pytest.mark.thorough
def test_draws_depend_on_the_test_alone(tmp_path):
  (tmp_path / 'draws_test.py').write_text(DRAWS)
  runs = [subprocess.run(
      [sys.executable, '-m', 'pytest', '-q', '-s', '-p', 'no:cacheprovider', '-p', 'entropy',
       *tests], stdout=subprocess.PIPE, text=True, check=True,
      env={**os.environ, 'PYTHONPATH': str(pathlib.Path(__file__).parent)}).stdout
          for tests in ([tmp_path], [f'{tmp_path}/draws_test.py::test[2]'])]
  first, second = [[line for line in run.splitlines() if 'drawn' in line] for run in runs]
  assert len(first) == 2 and len(second) == 1
  assert first[0] != first[1] and first[1].lstrip('.') == second[0].lstrip('.')
