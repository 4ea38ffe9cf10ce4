# SPDX-License-Identifier: Apache-2.0
"""Records which noise protected which batch, outliving kills, and judges the record.

Run as a script it is the victim: `ledger.py LEDGER LIFE FOLDER STEPS [VIEWS]` runs `fit` with
BackupAndRestore, and ends by `kill -9` when it has written so many lines (0: never). With several
views of an example, the k-th view is always the same, and a seed makes all runs alike.
"""

import collections
import hashlib
import itertools
import json
import os
import pathlib
import signal
import sys

import numpy as np


def fingerprint(*arrays):
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(np.ascontiguousarray(array))
  return digest.hexdigest()[:24]


class Ledger:
  """Appends a line per batch drawn and per step begun, at once: a kill cannot take it back.

  Batches are drawn ahead of the steps, in their order.
  """

  def __init__(self, path, life=0):
    self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    self._life = life

  def _write(self, **line):
    os.write(self._file, (json.dumps({'run': os.getpid(), **line}) + '\n').encode())
    self._life -= 1
    if not self._life:
      os.kill(os.getpid(), signal.SIGKILL)

  def watch(self, scheme):
    """Wraps the drawing of batches."""
    draw = scheme.index_batches

    def index_batches(*arguments):
      for indices in draw(*arguments):
        self._write(batch=fingerprint(indices))
        yield indices

    scheme.index_batches = index_batches

  def step(self, model):
    key = model.optimizer.run.state[1].noise.key
    self._write(row=model.optimizer.steps_done, key=fingerprint(np.asarray(key)),
                weights=fingerprint(*model.get_weights()))


def judge(path, steps):
  """Checks a ledger of runs that were killed and went on, the last of which ended.

  * A key serves one step of one run, hence one batch: no noise row is used for two.
  * A run goes on where one before it was, with its weights: no step is lost, none is skipped.
  * The last run reaches the last step; every step that was followed by another had a batch.

  Returns:
    The number of runs that took steps, and of steps that were taken again.
  """
  lines = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
  taken = [line for line in lines if 'row' in line]
  keys = collections.defaultdict(set)
  seen = collections.defaultdict(set)  # Row -> weights before it, in every run so far.
  runs = list(dict.fromkeys(line['run'] for line in taken))
  for run in runs:
    mine = [line for line in taken if line['run'] == run]
    batches = [line['batch'] for line in lines if line['run'] == run and 'batch' in line]
    first = mine[0]['row']
    assert [line['row'] for line in mine] == list(range(first, first + len(mine)))
    if first in seen:
      assert mine[0]['weights'] in seen[first], 'weights that no run had there'
    else:  # Killed after it was saved, before the next step began.
      assert first == len(seen), 'a step was skipped'
    assert len(batches) >= len(mine) - 1
    for number, line in enumerate(mine):
      keys[line['key']].add((run, line['row'], *batches[number:number + 1]))
      seen[line['row']].add(line['weights'])
  assert all(len(uses) == 1 for uses in keys.values()), 'a noise row was used for two batches'
  assert taken[-1]['row'] == steps - 1 and set(seen) == set(range(steps))
  return len(runs), len(taken) - steps


def fit(ledger, folder, steps, views=1):
  """`fit` with backups, and the batches of what is left of the plan."""
  import tensorflow as tf

  import tfdp_adaptive as tfdp
  rng = np.random.default_rng(0)
  x = rng.normal(size=[200, 5]).astype(np.float32)
  y = x.sum(1, keepdims=True)
  seed = 3 if views > 1 else None
  plan = tfdp.PrivacyPlan(batch_size=20, steps=steps, l2_norm_clip=1.0, noise_multiplier=1.0,
                          target_delta=1e-3, population_size=200, seed=seed)
  tf.keras.utils.set_random_seed(0)
  model = tfdp.make_private(tf.keras.Sequential(
      [tf.keras.layers.Input([5]), tf.keras.layers.Dense(1)]))
  model.compile(tfdp.DPAdam(plan=plan, seed=seed), 'mse', views=views)
  backup = tfdp.callbacks.BackupAndRestore(
      os.path.join(folder, 'backup'), delete_checkpoint=False)
  watch = tf.keras.callbacks.LambdaCallback(
      on_train_batch_begin=lambda batch, logs: ledger.step(model))
  calls = itertools.count()
  augment = (lambda x, y: (x * (1 + next(calls) % views), y)) if views > 1 else None
  model.fit(plan.batches((x, y), augment=augment, views=views), epochs=steps // 4,
            steps_per_epoch=4, verbose=0, callbacks=[backup, watch])
  np.savez(os.path.join(folder, 'result.npz'), *model.get_weights())
  return 0


if __name__ == '__main__':
  from tfdp_adaptive.accounting import sampling
  record_of = Ledger(sys.argv[1], int(sys.argv[2]))
  record_of.watch(sampling.Poisson)
  sys.exit(fit(record_of, sys.argv[3], *map(int, sys.argv[4:])))
