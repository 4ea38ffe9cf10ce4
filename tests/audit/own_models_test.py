# SPDX-License-Identifier: Apache-2.0
"""A model of one's own under audit: right ones pass and stay as they were, bugs are caught."""

import json

import numpy as np
import planted
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.audit import changes
from tfdp_adaptive.audit import noise_rows
from tfdp_adaptive.audit import subjects

keras = compat.keras
RNG = np.random.default_rng(0)
DATA = (RNG.normal(size=(40, 3)).astype(np.float32), RNG.integers(2, size=(40,)))


def plan_of(**changes):
  return tfdp.PrivacyPlan(**{**dict(
      population_size=40, batch_size=8, steps=10, l2_norm_clip=0.3, noise_multiplier=1.0,
      target_delta=1e-3), **changes})


def model_of(optimizer, kind=tfdp.DPSequential):
  keras.utils.set_random_seed(1)
  model = kind([
      keras.layers.Input([3]), keras.layers.Dense(4, 'tanh'), keras.layers.Dense(2)])
  model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(True))
  return model


@pytest.mark.thorough
def test_a_right_model_passes_and_is_left_as_it_was():
  plan = plan_of()
  model = model_of(tfdp.DPAdamSTP(plan=plan, scale_epsilon=.1))
  before = model.get_weights()
  report = tfdp.audit.white_box(model, data=DATA, seed=1)
  assert not report.violated, str(report)
  assert [one.name for one in report.findings] == [
      'changes', 'data', 'noise', 'accounting', 'batches', 'writes']
  assert 0.9 < report.change.size < 1.001 and 0.9 < report.noise.size < 1.1
  assert 'DPAdamSTP' in str(report) and json.dumps(report.to_dict(), allow_nan=False)
  assert model.optimizer.steps_done == 0 and model.ledger.epsilon() == 0
  for a, b in zip(before, model.get_weights()):
    np.testing.assert_array_equal(a, b)
  model.fit(plan.batches(DATA), steps_per_epoch=2, verbose=0)
  assert model.optimizer.steps_done == 2
  with pytest.raises(ValueError, match='after 2 steps'):
    tfdp.audit.white_box(model, data=DATA)


@pytest.mark.thorough
def test_bugs_are_caught():
  with planted.switched() as bugs:
    model = model_of(tfdp.DPAdam(
        l2_norm_clip=.3, noise_multiplier=1., batch_size=8, adjacency='add_remove'))
    with subjects.of_model(model, DATA) as subject:
      for bug in (None, 'no clipping', 'half the noise', 'the same noise at each step'):
        bugs.only(bug)
        assert changes.largest(subject, 1).violated == (bug == 'no clipping')
        assert (noise_rows.measure(subject, 1, steps=6).p_value < 1e-4) == (
            bug not in (None, 'no clipping')), bug


class Careless(tfdp.DPSequential):
  """A training step of one's own that leaves the private one alone, and yet tells."""

  def train_step(self, data):
    x, y, weight = data
    logs = super().train_step((x - tf.reduce_mean(x, 0), y, weight))  # Mean of the whole batch.
    self.layers[-1].bias.assign_sub(1e-3 * tf.reduce_sum(x, 0)[:2])  # Past the clipping.
    self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))  # For later.
    return logs


@pytest.mark.thorough
def test_mistakes_beside_the_private_step_are_caught():
  model = model_of(tfdp.DPSGD(plan=plan_of()), Careless)
  model.mean = tf.Variable(tf.zeros([3]), trainable=False)
  report = tfdp.audit.white_box(model, data=DATA, seed=1)
  assert [one.name for one in report.findings if one.violated] == ['changes', 'writes']
  assert 'against padding' in report.change.where and 'VIOLATED' in str(report)
  found = report.writes.past_noise
  assert len(found) == 2 and any('bias' in name for name in found) and any(
      'Variable' in name for name in found)
  assert f'{found[0]}, {found[1]} depend on the batch' in str(report)
  assert json.loads(json.dumps(report.to_dict()))['writes']['past_noise'] == list(found)
  assert not np.any(model.mean.numpy()) and not np.any(model.layers[-1].bias.numpy())  # As before.


class Adds(tfdp.DPSequential):
  """Hides data where penalties are taken."""

  def regularization_gradients(self):
    data = tf.constant(DATA[0])
    return [tf.fill(v.shape, 30 * tf.reduce_sum(data**2)) for v in self.trainable_variables]


def penalized(penalty, kind=tfdp.DPSequential, **arguments):
  model = kind([keras.layers.Input([3]), keras.layers.Dense(2, kernel_regularizer=penalty)])
  model.compile(tfdp.DPSGD(plan=plan_of()), keras.losses.SparseCategoricalCrossentropy(True),
                **arguments)
  return model


@pytest.mark.thorough
def test_data_in_penalties_end_in_a_verdict():
  """A penalty of weights alone is none, however large."""
  data = DATA[0][:3, :2]
  closes_over = lambda w: 1e3 * tf.reduce_sum((w - data) ** 2)
  for model, wrong in (
      (penalized(closes_over), ['data', 'noise']), (penalized(None, Adds), ['noise']),
      (penalized(keras.regularizers.L2(1e3)), []),
      (penalized(closes_over, public_penalty='published in 1999'), [])):
    report = tfdp.audit.white_box(model, data=DATA, seed=1)
    assert [one.name for one in report.findings if one.violated] == wrong, str(report)
    assert ('the same from every key' in report.noise.what) == ('noise' in wrong)


@pytest.mark.parametrize('data', [DATA[0], (DATA[0], DATA[1][:3]), (DATA[0][:0], DATA[1][:0]), 3])
def test_data_that_are_no_records_are_refused(data):
  with pytest.raises(ValueError, match='`data` must be a pair.*Received'):
    tfdp.audit.white_box(model_of(tfdp.DPAdam(plan=plan_of())), data=data)


def test_a_model_that_is_not_private_is_refused():
  with pytest.raises(ValueError, match='compiled private model'):
    tfdp.audit.white_box(keras.Sequential(), data=DATA)
