# SPDX-License-Identifier: Apache-2.0
"""`fit` runs with the newer sampling schemes, and its ledger costs what the plan says."""

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat

keras = compat.keras


@pytest.mark.parametrize('sampling, users', [
    (tfdp.sampling.RandomAllocation(cycle=4), None),
    (tfdp.sampling.BallsInBins(cycle=4), None),
    (tfdp.sampling.PoissonExamples(examples_per_user=2), np.arange(32) // 2),
    (tfdp.sampling.PoissonExamples(examples_per_user=1),
     np.c_[np.arange(32) // 2, np.where(np.arange(32) % 2, 0, -1)])],
    ids=('allocation', 'bins', 'users', 'owners'))
def test_fit_costs_what_the_plan_says(sampling, users):
  plan = tfdp.PrivacyPlan(
      population_size=32, batch_size=8, steps=8, l2_norm_clip=1.0, noise_multiplier=4.0,
      target_delta=1e-3, sampling=sampling, unit='example' if users is None else 'user')
  model = tfdp.DPSequential([keras.Input((3,)), keras.layers.Dense(1)])
  model.compile(tfdp.DPSGD(0.1, plan=plan), 'mse')
  x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
  batches = plan.batches((x, x[:, :1]), **({} if users is None else dict(users=users)))
  before = model.get_weights()[0].copy()
  model.fit(batches, steps_per_epoch=4, epochs=2, verbose=0)
  assert model.optimizer.steps_done == 8 and np.any(model.get_weights()[0] != before)
  assert model.ledger.epsilon() == pytest.approx(plan.epsilon(), rel=1e-9)
  assert type(sampling).__name__ in repr(plan.sampling) and 'Sampling:' in plan.statement()
