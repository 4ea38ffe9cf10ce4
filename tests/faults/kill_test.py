# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed go on: no noise row for two batches, no step lost, none twice in the end."""

import json
import os
import pathlib
import random
import time

import ledger
import numpy as np
import nursery
import pytest

VICTIM = pathlib.Path(ledger.__file__)


@pytest.fixture(scope='module')
def mother():
  with nursery.Nursery(
      'tensorflow', 'tfdp_adaptive.keras.callbacks', 'tfdp_adaptive.keras.private') as one:
    yield one


def live(mother, path, life, *arguments):
  """Exit status of a victim, -9 if it was killed, and what it said."""
  return mother.run(path.with_name('output'), VICTIM, path, life, *arguments)


def live_some_time(seconds, mother, path, *arguments):
  """The same, killed from outside at any moment after its first step, which is the long one."""
  before = path.read_text().count('"row"') if path.exists() else 0
  output = path.with_name('output')
  mother.start(output, VICTIM, path, 0, *arguments)
  while not mother.ended() and (
      not path.exists() or path.read_text().count('"row"') < before + 2):
    time.sleep(.001)
  time.sleep(seconds)
  mother.kill()
  return mother.status, output.read_text()


@pytest.mark.thorough
def test_fit_with_backups_survives_kills(mother, tmp_path):
  path = tmp_path / 'ledger'
  assert live(mother, path, 25, tmp_path, 40)[0] == -9
  status, said = live(mother, path, 0, tmp_path, 40)
  assert status == 0, said
  runs, again = ledger.judge(path, 40)
  assert runs == 2 and again < 5  # A backup is made after every epoch of four steps.


@pytest.mark.thorough
def test_views_after_a_kill_are_those_of_an_unbroken_run(mother, tmp_path):
  weights = []
  for name, lives in (('unbroken', [0]), ('killed', [15, 0])):
    folder = tmp_path / name
    folder.mkdir()
    for life in lives:
      status, said = live(mother, folder / 'ledger', life, folder, 12, 2)
      assert status == (-9 if life else 0), said
    with np.load(folder / 'result.npz') as saved:
      weights.append([saved[key] for key in saved])
  for unbroken, resumed in zip(*weights):
    np.testing.assert_array_equal(unbroken, resumed)


@pytest.mark.pitfall(
    'A killed run uses the same noise for two different batches.',
    severity='critical', stops='the state is saved before any result of a step is released')
@pytest.mark.slow
def test_kills_at_any_moment(mother, tmp_path):
  kills = int(os.environ.get('TFDP_KILLS', 25))
  rng, path, steps = random.Random(), tmp_path / 'ledger', 80 * kills
  command = [tmp_path, steps]
  killed = 0
  for _ in range(kills):
    status, said = live_some_time(rng.expovariate(1 / .05), mother, path, *command)
    if status != -9:
      break
    killed += 1
  else:
    status, said = live(mother, path, 0, *command)
  assert status == 0, said
  runs, again = ledger.judge(path, steps)
  nursery.tally('fit', kills=killed, runs=runs, steps=steps, taken_again=again)
  assert runs > min(5, kills - 1) and again > 0


def test_the_ledger_would_notice(tmp_path):
  path = tmp_path / 'ledger'
  good = [dict(run=1, batch='a'), dict(run=1, row=0, key='k0', weights='w0'),
          dict(run=1, batch='b'), dict(run=1, row=1, key='k1', weights='w1'),
          dict(run=2, batch='c'), dict(run=2, row=1, key='k2', weights='w1')]

  def judged(lines):
    path.write_text('\n'.join(map(json.dumps, lines)), encoding='utf-8')
    return ledger.judge(path, 2)

  assert judged(good) == (2, 1)
  for number, change in [(5, dict(key='k1')), (5, dict(row=2)), (5, dict(weights='other')),
                         (3, dict(row=2)), (5, dict(key='k0'))]:
    bad = [dict(line, **change) if i == number else line for i, line in enumerate(good)]
    with pytest.raises(AssertionError):
      judged(bad)
