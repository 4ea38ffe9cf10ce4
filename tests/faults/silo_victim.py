# SPDX-License-Identifier: Apache-2.0
"""A client and its server that can be killed: `silo_victim.py LEDGER LIFE FOLDER ROUNDS`.

Every round makes a new model. The server keeps its last weights and the number of the round.
"""

import pathlib
import sys

import ledger
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import runfolder
from tfdp_adaptive.accounting import sampling

STEPS = 3  # Steps per round.


def main(record, folder, rounds):
  rng = np.random.default_rng(0)
  x = rng.normal(size=[200, 5]).astype(np.float32)
  plan = tfdp.PrivacyPlan(batch_size=20, steps=STEPS * rounds, l2_norm_clip=1.0,
                          noise_multiplier=1.0, target_delta=1e-3, population_size=200)

  def make():
    model = tfdp.make_private(tf.keras.Sequential([
        tf.keras.layers.Input([5]), tf.keras.layers.Dense(1, kernel_initializer='ones')]))
    model.compile(tfdp.DPAdam(plan=plan), 'mse')
    fit = model.fit
    watch = tf.keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: record.step(model))
    model.fit = lambda *args, **kwargs: fit(*args, callbacks=[watch], **kwargs)
    return model

  server, done = folder / 'server.npz', 0
  weights = make().get_weights()
  if server.exists():
    weights, done = runfolder.load(server)
    done = done['round']
  for number in range(done + 1, rounds + 1):
    silo = tfdp.federated.Silo(folder / 'silo', plan=plan)
    weights = silo.train(make(), weights, (x, x.sum(1, keepdims=True)), steps=STEPS,
                         server_round=number)
    runfolder.save(server, weights, {'round': number})
  (entry,) = silo.ledger.entries
  assert entry.steps == plan.steps and silo.ledger.epsilon() == plan.epsilon()


if __name__ == '__main__':
  record_of = ledger.Ledger(sys.argv[1], int(sys.argv[2]))
  record_of.watch(sampling.Poisson)
  main(record_of, pathlib.Path(sys.argv[3]), int(sys.argv[4]))
