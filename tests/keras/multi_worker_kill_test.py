# SPDX-License-Identifier: Apache-2.0
"""Workers that are killed: all are started again and go on from the chief's backup."""

import collections
import json
import pathlib
import random
import re
import shlex
import sys
import time

import cluster
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

WAIT = 120
EXAMPLE = pathlib.Path(__file__).parents[2] / 'examples' / 'multi_worker.py'
_VICTIM = cluster.BEGIN + '''
import hashlib, json, os
steps, folder = int(sys.argv[2]), sys.argv[1]
x = np.random.default_rng(0).normal(size=(40, 3)).astype('float32')
plan = tfdp.PrivacyPlan(population_size=40, batch_size=10, steps=steps, l2_norm_clip=1.0,
                        noise_multiplier=1.0, target_delta=1e-3)
with strategy.scope():
  model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
  model.compile(tfdp.DPAdam(0.1, plan=plan), loss='mse')
file = os.open(f'{folder}/steps{worker}', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
digest = lambda *values: hashlib.sha256(b''.join(v.tobytes() for v in values)).hexdigest()

class Tell(keras.callbacks.Callback):
  def on_train_batch_end(self, batch, logs=None):
    key = compat.read(model.optimizer.run.state[1].noise.key)
    os.write(file, (json.dumps(dict(
        life=sys.argv[3], row=model.optimizer.steps_done, key=digest(key),
        weights=digest(*model.get_weights()))) + '\\n').encode())

model.fit(plan.batches((x, x[:, :1])), verbose=0, callbacks=[
    Tell(), tfdp.callbacks.BackupAndRestore(f'{folder}/backup', save_freq=1)])
assert model.ledger.entries[0].steps == steps and len(model.ledger.entries) == 1
assert worker or not os.path.exists(f'{folder}/backup')  # The chief's, who removes it.
'''


def lines(folder, worker):
  path = folder / f'steps{worker}'
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def live(folder, life, rng, kill, steps):
  """Starts both workers; kills one of them after some steps, or waits for their end."""
  before = len(lines(folder, 0))
  command = [sys.executable, '-c', _VICTIM, str(folder), str(steps), str(life)]
  with cluster.started(command, folder) as processes:
    end = time.monotonic() + WAIT
    while time.monotonic() < end and any(process.poll() is None for process in processes):
      time.sleep(0.02)
      assert not any(process.poll() for process in processes), [
          cluster.log(folder, index).read_text()[-2000:] for index in (0, 1)]
      if kill and len(lines(folder, 0)) > before:
        time.sleep(rng.uniform(0, 0.3))
        processes[rng.randrange(2)].kill()
        break
    if kill:  # The other cannot go on alone. It says so after a while; the test need not wait.
      return None
    assert [process.poll() for process in processes] == [0, 0], cluster.log(
        folder, 0).read_text()[-3000:]


@pytest.mark.thorough
@pytest.mark.parametrize('kills', [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_and_uses_no_noise_twice(tmp_path, kills):
  rng, steps = random.Random(0), 30 * kills  # More than are done between two kills.
  for life in range(kills):
    live(tmp_path, life, rng, True, steps)
  live(tmp_path, 'last', rng, False, steps)
  lives = collections.defaultdict(list)
  for line in lines(tmp_path, 0):
    lives[line['life']].append(line)
  used = [(line['key'], line['row']) for line in lines(tmp_path, 0)]
  assert len(set(used)) == len(used)
  done = 0
  for life in lives.values():
    rows = [line['row'] for line in life]
    assert rows == list(range(rows[0], rows[-1] + 1))
    assert done <= rows[0] <= done + 1  # From the last backup, which may lack the last step.
    done = rows[-1]
  assert done == steps and len(lives) == kills + 1
  chiefs = {(line['key'], line['row']): line['weights'] for line in lines(tmp_path, 0)}
  for line in lines(tmp_path, 1):  # The other may be a step ahead when the chief is killed.
    assert chiefs.get((line['key'], line['row']), line['weights']) == line['weights']


@pytest.mark.thorough
def test_the_example_runs_by_the_lines_that_it_shows(tmp_path):
  shown = re.findall(r"^    (TF_CONFIG=.*)$", EXAMPLE.read_text(encoding='utf-8'), re.M)
  assert len(shown) == 2
  for index, line in enumerate(shown):
    config, program, path, folder = shlex.split(line.rstrip('& '))
    assert (program, path, folder) == ('python', 'examples/multi_worker.py', 'run')
    ports = re.findall(r'localhost:(\d+)', config)
    assert json.loads(config.split('=', 1)[1]) == json.loads(
        cluster.config(index, ports).replace('127.0.0.1', 'localhost'))
  with cluster.started([sys.executable, str(EXAMPLE), str(tmp_path), '8'], tmp_path) as processes:
    assert [process.wait(WAIT * 3) for process in processes] == [0, 0], cluster.log(
        tmp_path, 0).read_text()[-3000:]
  said = [cluster.log(tmp_path, index).read_text() for index in (0, 1)]
  assert 'accuracy' in said[0] and 'epsilon' in said[0]
  assert '-differential privacy' in said[0] and '-differential privacy' not in said[1]
  kind, _ = tfdp.DPSequential, tfdp.DPAdam  # Known to Keras from now on.
  model = compat.keras.models.load_model(tmp_path / 'model.keras')
  assert isinstance(model, kind) and model.ledger.entries[0].steps == 8
