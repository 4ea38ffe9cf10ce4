# SPDX-License-Identifier: Apache-2.0
"""A silo that is killed at any moment goes on: no noise row for two batches, no step lost."""

import os
import pathlib
import random
import time

import ledger
import nursery
import pytest

VICTIM = pathlib.Path(__file__).with_name('silo_victim.py')
KILLS = int(os.environ.get('TFDP_KILLS', 3))


@pytest.mark.thorough
@pytest.mark.pitfall(
    'A silo is killed during a round, or after saving and before answering.',
    severity='critical',
    stops='the folder is written before the answer is sent, so the saved answer is sent again')
def test_a_silo_that_is_killed_again_and_again(tmp_path):
  rng, path, killed = random.Random(), tmp_path / 'ledger', 0
  rounds = 3 * KILLS
  command = [path, 0, tmp_path, rounds]
  with nursery.Nursery('tensorflow', 'tfdp_adaptive.keras.private') as mother:
    for _ in range(KILLS):
      before = path.read_text().count('"row"') if path.exists() else 0
      mother.start(tmp_path / 'output', VICTIM, *command)
      wanted = before + rng.randint(1, 4)  # Somewhere in a round, or between two.
      while not mother.ended() and (
          not path.exists() or path.read_text().count('"row"') < wanted):
        time.sleep(.001)
      time.sleep(rng.expovariate(1 / .02))
      killed += mother.kill()
    status, said = mother.run(tmp_path / 'output', VICTIM, *command)
  assert status == 0, said
  runs, again = ledger.judge(path, 3 * rounds)
  nursery.tally('silo', kills=killed, runs=runs, rounds=rounds, steps=3 * rounds,
                taken_again=again)
  assert runs > killed / 2
