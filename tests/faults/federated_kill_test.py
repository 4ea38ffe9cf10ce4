# SPDX-License-Identifier: Apache-2.0
"""`tfdp federated`, killed at random moments: it goes on, and no noise row serves two batches."""

import csv
import json
import os
import pathlib
import time

import numpy as np
import nursery
import pytest

ROOT = pathlib.Path(__file__).parents[2]
KILLS = int(os.environ.get('TFDP_KILLS', 6))
ROUNDS = 2 * KILLS
# Runs the command and writes down, before each round, which noise its batch will get.
SCRIPT = """
import hashlib, json, os, sys
root, ledger, *arguments = sys.argv[1:]
import tfdp_adaptive as tfdp
import numpy as np
from tfdp_adaptive import noise
from tfdp_adaptive.cli import main
from tfdp_adaptive.examples import corpus
from tfdp_adaptive.federated import rounds
public = corpus.Corpus('a sentence', [corpus.Sentence('', ('the', 'cat', 'sees'))], True)
corpus.standard_library = lambda: public
original = rounds.run

def rows(tree):
  if isinstance(tree, noise.State):
    return [[np.asarray(tree.key).tolist(), int(tree.row)]]
  return [row for child in tree for row in rows(child)] if isinstance(tree, tuple) else []

def spy(process, engine, state, cohort, *args, **kwargs):
  with open(ledger, 'a', encoding='utf-8') as file:
    batch = hashlib.sha256(repr([int(state.round), list(cohort)]).encode()).hexdigest()
    print(json.dumps([int(state.round), rows(state), batch]), file=file, flush=True)
    os.fsync(file.fileno())
  return original(process, engine, state, cohort, *args, **kwargs)

rounds.run = spy
sys.exit(main.main(arguments))
"""


def read(ledger):
  """The whole lines; the last one may be half of one."""
  text = ledger.read_text(encoding='utf-8') if ledger.exists() else ''
  return [json.loads(line) for line in text.split('\n')[:-1]]


def write_data(folder):
  rng = np.random.default_rng(0)
  words = ('the', 'cat', 'dog', 'sees', 'hears', 'it', 'and', 'runs', 'away')
  with open(folder / 'text.jsonl', 'w', encoding='utf-8') as stream:
    for client in range(40):
      for _ in range(1 + client % 4):
        text = f'The {rng.choice(words[1:3])} {rng.choice(words[3:5])} it and runs away.'
        stream.write(json.dumps({'client': f'c{client}', 'text': text}) + '\n')
  (folder / 'words.txt').write_text('\n'.join(words) + '\n', encoding='utf-8')


@pytest.fixture
def process():
  with nursery.Nursery('tensorflow', 'tfdp_adaptive.cli.main') as one:
    yield one


@pytest.mark.slow
def test_a_command_that_is_killed_again_and_again(process, tmp_path):
  write_data(tmp_path)
  out, ledger = tmp_path / 'out', tmp_path / 'ledger'
  script, output = tmp_path / 'script.py', tmp_path / 'output'
  script.write_text(SCRIPT, encoding='utf-8')
  command = [
      script, str(ROOT), str(ledger), 'federated', '--data',
      str(tmp_path / 'text.jsonl'), '--vocabulary', str(tmp_path / 'words.txt'), '--rounds',
      str(ROUNDS), '--clients-per-round', '5', '--methods', 'dp_adam', '--out', str(out)]
  released = out / 'federated.state' / 'dp_adam' / 'metrics.csv'
  rng, killed, released_rounds = np.random.default_rng(), 0, 0
  while True:
    begun = len(read(ledger))
    process.start(output, *command)
    if killed < KILLS:
      # Somewhere in the next rounds, evaluations and writes; at times in the start.
      wanted = begun + rng.integers(0, 3)
      while not process.ended() and len(read(ledger)) < wanted:
        time.sleep(0.001)
      time.sleep(rng.exponential(0.005))  # A round takes some 10 ms.
    else:
      process.ended(None)
    if process.ended() or not process.kill():
      break
    killed += 1
    if released.exists():
      with open(released, encoding='utf-8') as file:
        rounds = [int(row['round']) for row in csv.DictReader(file)]
      assert rounds == list(range(1, len(rounds) + 1)) and len(rounds) >= released_rounds
      released_rounds = len(rounds)
  assert process.status == 0, output.read_text(encoding='utf-8')[-3000:]
  entries = read(ledger)
  order = [round_ for round_, _, _ in entries]
  # No round is lost or skipped, and one is begun again only where a process was killed.
  assert order == sorted(order) and set(order) == set(range(ROUNDS))
  assert len(order) <= ROUNDS + killed
  # No noise row, which a key and a number fix, is there for two batches.
  used = {}
  for _, rows, batch in entries:
    assert rows
    for row in rows:
      assert used.setdefault(json.dumps(row), batch) == batch, f'{row} was used twice.'
  assert len(used) == len(entries) * len(entries[0][1])
  result = json.loads((out / 'results.json').read_text(encoding='utf-8'))
  (row,) = [row for row in result['rows'] if row['epsilon'] is not None]
  assert row['steps'] == ROUNDS and row['curve'][-1][0] == ROUNDS
  assert not (out / 'federated.state').exists()
  nursery.tally('federated', kills=killed, rounds=ROUNDS, rounds_begun=len(entries),
                noise_rows=len(used))
