# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed go on: no noise row for two batches, no step lost, none twice in the end."""

import json
import os
import pathlib
import random
import subprocess
import sys
import time

import ledger
import numpy as np
import nursery
import pytest

import tfdp_adaptive

VICTIM = pathlib.Path(ledger.__file__)


def live(path, life, *arguments):
  """Exit status of a victim, -9 if it was killed, and what it said."""
  done = subprocess.run(
      [sys.executable, str(VICTIM), str(path), str(life), *map(str, arguments)],
      capture_output=True, text=True, check=False, timeout=300,
      env={'PYTHONPATH': str(pathlib.Path(tfdp_adaptive.__file__).parent.parent),
           'TF_CPP_MIN_LOG_LEVEL': '3'})
  return done.returncode, done.stderr


def live_some_time(seconds, nursery, path, *arguments):
  """The same, killed from outside at any moment after its first step, which is the long one."""
  before = path.read_text().count('"row"') if path.exists() else 0
  output = path.with_name('output')
  nursery.start(output, VICTIM, path, 0, *arguments)
  while not nursery.ended() and (
      not path.exists() or path.read_text().count('"row"') < before + 2):
    time.sleep(.001)
  time.sleep(seconds)
  nursery.kill()
  return nursery.status, output.read_text()


def text(folder):
  """200 sentences of 20 clients and a vocabulary; the arguments that name them."""
  rng = np.random.default_rng(0)
  (folder / 'text.jsonl').write_text('\n'.join(
      json.dumps({'client': i % 20, 'text': f'The {rng.choice(["cat", "dog"])} sees and runs.'})
      for i in range(200)), encoding='utf-8')
  (folder / 'words.txt').write_text('the\ncat\ndog\nsees\nand\nruns', encoding='utf-8')
  return ['train', '--data', folder / 'text.jsonl', '--vocabulary', folder / 'words.txt',
          '--batch-size', '32', '--method', 'dp_adam', '--out', folder / 'out']


def test_fit_with_backups_survives_kills(tmp_path):
  path = tmp_path / 'ledger'
  assert live(path, 25, 'fit', tmp_path)[0] == -9
  status, said = live(path, 0, 'fit', tmp_path)
  assert status == 0, said
  runs, again = ledger.judge(path, ledger.STEPS)
  assert runs == 2 and again < 5  # A backup is made after every epoch of four steps.


def test_train_survives_kills_and_keeps_its_curve(tmp_path):
  path, command = tmp_path / 'ledger', [*text(tmp_path), '--steps', '23', '--save-every', '2']
  assert live(path, 21, *command)[0] == -9
  status, said = live(path, 0, *command)
  assert status == 0, said
  runs, again = ledger.judge(path, 23)
  assert runs == 2 and again < 3
  row = json.loads((tmp_path / 'out' / 'results.json').read_text(encoding='utf-8'))['rows'][1]
  assert [point[0] for point in row['curve']] == [0, 3, 6, 9, 12, 15, 18, 21, 23]


@pytest.mark.pitfall(
    'A run that was killed uses a row of noise for two different batches.',
    severity='critical', stops='state is saved before anything of a step is shown; proven '
                               'by a ledger')
@pytest.mark.slow
@pytest.mark.parametrize('kind', ['train', 'fit'])
def test_kills_at_any_moment(kind, tmp_path):
  kills = int(os.environ.get('TFDP_KILLS', 25))
  rng, path = random.Random(), tmp_path / 'ledger'
  steps = ledger.STEPS if kind == 'fit' else 80 * kills
  command = ['fit', tmp_path] if kind == 'fit' else [
      *text(tmp_path), '--steps', str(steps), '--save-every', '1']
  mother = nursery.Nursery('tensorflow', 'tfdp_adaptive.cli.main', 'tfdp_adaptive.cli.training',
                           'tfdp_adaptive.keras_adapter.callbacks')
  killed = 0
  for _ in range(kills):
    status, said = live_some_time(rng.expovariate(1 / .05), mother, path, *command)
    if status != -9:
      break
    killed += 1
  else:
    status, said = live(path, 0, *command)
  mother.close()
  assert status == 0, said
  runs, again = ledger.judge(path, steps)
  nursery.tally(kind, kills=killed, runs=runs, steps=steps, taken_again=again)
  assert runs > min(5, kills) and again > 0


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
