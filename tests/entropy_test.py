# SPDX-License-Identifier: Apache-2.0
"""Two runs of a test draw the same secrets; two tests of a run do not."""

import os
import pathlib
import subprocess
import sys

DRAWS = """
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive.noise import keys

@pytest.mark.parametrize('number', [1, 2])
def test(number):
  plan = tfdp.PrivacyPlan(population_size=40, batch_size=8, steps=2, l2_norm_clip=1.0,
                          noise_multiplier=1.0, target_delta=1e-3)
  print('drawn', [list(batch) for batch in plan.index_batches()], keys.from_system().numpy())
"""


def test_secrets_depend_on_the_test_alone(tmp_path):
  (tmp_path / 'draws_test.py').write_text(DRAWS)
  runs = [subprocess.run(
      [sys.executable, '-m', 'pytest', '-q', '-s', '-p', 'no:cacheprovider', '-p', 'entropy',
       *order, tmp_path], stdout=subprocess.PIPE, text=True, check=True,
      env={**os.environ, 'PYTHONPATH': str(pathlib.Path(__file__).parent)}).stdout
          for order in (['-k', '1 or 2'], ['-k', '2'])]
  first, second = [[line for line in run.splitlines() if 'drawn' in line] for run in runs]
  assert len(first) == 2 and len(second) == 1
  assert first[0] != first[1] and first[1].lstrip('.') == second[0].lstrip('.')
