# SPDX-License-Identifier: Apache-2.0
"""Models train on secret patterns of steps, stop anywhere, and go on with the same coins."""

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras


def test_a_model_goes_on_in_the_middle_of_a_pattern(tmp_path):
  plan = tfdp.PrivacyPlan(
      population_size=60, batch_size=10, steps=8, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-3, sampling=tfdp.sampling.MinSeparation(3, draws=1000),
      mechanism=tfdp.mechanisms.BandedToeplitz(3, 8))
  x = np.arange(60, dtype=np.float32)[:, np.newaxis] / 60
  model = tfdp.DPSequential([keras.layers.Input([1]), keras.layers.Dense(1)])
  model.compile(tfdp.DPAdam(plan=plan), 'mse')
  batches = lambda start: plan.batches((x, x), start_step=start, coins=tmp_path / 'coins')
  model.fit(batches(0), steps_per_epoch=5, epochs=1, verbose=0)
  with pytest.raises(tfdp.PrivacyError, match='must go on where'):
    model.fit(batches(2), steps_per_epoch=3, epochs=1, verbose=0)
  model.fit(batches(5), steps_per_epoch=3, epochs=1, verbose=0)
  assert model.optimizer.steps_done == 8
  assert 'draws of the privacy loss' in model.ledger.statement()
  assert model.ledger.epsilon() == plan.epsilon()


@pytest.mark.thorough
def test_backups_go_on_with_the_coins_of_the_run(tmp_path):
  plan = tfdp.PrivacyPlan(
      population_size=60, batch_size=10, steps=6, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-3, sampling=tfdp.sampling.BallsInBins(6, draws=1000))
  x = np.arange(60, dtype=np.float32)[:, np.newaxis]
  taken = []

  class Killed(Exception):
    pass

  def life(steps):
    model = tfdp.DPSequential([keras.layers.Input([1]), keras.layers.Dense(1)])
    model.compile(tfdp.DPSGD(plan=plan), 'mse')
    model.optimizer.build(model.trainable_variables)

    def end(batch, logs):
      taken.append(model.optimizer.steps_done)
      if len(taken) == steps:
        raise Killed

    model.fit(plan.batches((x, x), coins=tmp_path / 'coins'), epochs=3, steps_per_epoch=2,
              verbose=0, callbacks=[
                  tfdp.callbacks.BackupAndRestore(tmp_path / 'backup',
                                                  delete_checkpoint=False),
                  keras.callbacks.LambdaCallback(on_train_batch_end=end)])

  with pytest.raises(Killed):
    life(3)
  life(0)
  assert taken == [1, 2, 3, 3, 4, 5, 6]
