# SPDX-License-Identifier: Apache-2.0
"""Trains one private model on several processes, on one machine or many; Keras 2 and 3.

Start it once a worker, here two of one machine, each with its own index:

    TF_CONFIG='{"cluster": {"worker": ["localhost:12345", "localhost:12346"]}, "task": {"type": "worker", "index": 0}}' python examples/multi_worker.py run &
    TF_CONFIG='{"cluster": {"worker": ["localhost:12345", "localhost:12346"]}, "task": {"type": "worker", "index": 1}}' python examples/multi_worker.py run

When a worker dies, the others stop. Start all of them again by the same lines: they go on from
the backup in the folder `run`, which the first worker writes. Without TF_CONFIG it is one process.
"""

import pathlib
import sys
import tempfile

import numpy as np
import tensorflow as tf

# Before TensorFlow does anything else: it connects the workers.
strategy = tf.distribute.MultiWorkerMirroredStrategy()

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras  # Keras of either stack; in your own programs `import keras`, as usual.


def main(folder: pathlib.Path, steps: int = 40) -> None:
  # Every worker has ALL records, in the same order, and reads the rows that it needs.
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2000, 20)).astype(np.float32)
  y = (x[:, :1] + 0.1 * rng.normal(size=(2000, 1)) > 0).astype(np.float32)
  plan = tfdp.PrivacyPlan(
      population_size=2000, batch_size=100, steps=steps, l2_norm_clip=1.0, noise_multiplier=1.5,
      target_delta=1e-6)
  with strategy.scope():
    model = tfdp.DPSequential([
        keras.layers.Input([20]), keras.layers.Dense(16, activation='relu'),
        keras.layers.Dense(1, activation='sigmoid')])
    model.compile(tfdp.DPAdam(0.05, plan=plan), loss='binary_crossentropy', metrics=['accuracy'])
  model.fit(
      plan.batches((x, y)), epochs=4, steps_per_epoch=steps // 4, verbose=2,
      callbacks=[tfdp.callbacks.BackupAndRestore(folder / 'backup'),
                 tfdp.callbacks.PrivacyReport()])
  # All workers take part, since Keras 2 saves metrics that are spread over them; one file counts.
  chief = strategy.extended.should_checkpoint
  with tempfile.TemporaryDirectory() as elsewhere:
    model.save((folder if chief else pathlib.Path(elsewhere)) / 'model.keras')
  if chief:
    print(model.ledger.statement())


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
