# SPDX-License-Identifier: Apache-2.0
"""Heads from one release: the solution, its ledger, and what they are good for."""

import dataclasses
import math

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import heads

keras, layers = compat.keras, compat.keras.layers
RNG = np.random.default_rng(0)


def problem(n, d, classes, spread=.3):
  rng = np.random.default_rng(0)  # Without a bias, some centers cannot be told apart.
  y = rng.integers(0, classes, size=n)
  centers = rng.normal(size=[classes, d]) / math.sqrt(d)
  return (centers[y] + spread * rng.normal(size=[n, d])).astype(np.float32), y


def test_the_layer_is_the_ridge_of_the_release():
  """The same release in NumPy, by its seed, and a solver in another form."""
  x, y = problem(3000, 4, 3)
  same = dict(noise_multiplier=2.0, target_delta=1e-4, bound=1.5, constant=.4, seed=3)
  layer = tfdp.heads.least_squares(x, y, ridge=.2, **same)
  found = tfdp.estimates.second_moments(x, y, **same)
  values = np.linalg.eigvalsh(found.covariance)
  assert values.min() > 0  # So that clipping eigenvalues does nothing.
  ridge = .2 * 2 * found.stddev * math.sqrt(5)
  weights = np.linalg.solve(found.covariance + ridge * np.eye(5), found.cross)
  kernel, bias = layer.get_weights()
  np.testing.assert_allclose(kernel, weights[:4], rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(bias, .4 * weights[4], rtol=1e-4, atol=1e-6)


def test_negative_eigenvalues_count_as_zero():
  x = RNG.normal(size=[5, 30])
  found = tfdp.estimates.second_moments(x, x[:, 0], noise_multiplier=1.0, target_delta=1e-2, seed=0)
  values, vectors = np.linalg.eigh(found.covariance)
  assert values.min() < 0
  least = .25 * 2 * found.stddev * math.sqrt(30)
  expected = sum(np.outer(v, v) @ found.cross / (max(w, 0) + least)
                 for w, v in zip(values, vectors.T))
  np.testing.assert_allclose(heads.solve(found, .25), expected, rtol=1e-9)


def test_classes_and_regression_are_learnt():
  x, y = problem(20_000, 5, 3, .15)
  head = tfdp.heads.least_squares(x, y, target_epsilon=1.0, target_delta=1e-6)
  accuracy = np.mean(np.argmax(head(x), 1) == y)
  assert accuracy > .9
  one_hot = tfdp.heads.least_squares(
      x, np.eye(3)[y], target_epsilon=1.0, target_delta=1e-6, constant=0.0)
  assert not one_hot.use_bias and np.mean(np.argmax(one_hot(x), 1) == y) > .9
  target = x @ [.5, -.5, .2, 0, 0] + .3
  line = tfdp.heads.least_squares(
      x, target, target_epsilon=2.0, target_delta=1e-6, bound=2.0, target_bound=1.5)
  error = np.asarray(line(x))[:, 0] - target
  assert np.sqrt(np.mean(error**2)) < .3 * np.std(target)


def test_every_model_with_the_head_shows_its_cost(tmp_path):
  x, y = problem(400, 4, 2)
  head = tfdp.heads.least_squares(x, y, target_epsilon=.5, target_delta=1e-4)
  model = tfdp.make_private(keras.Sequential([layers.Input([4]), head]))
  assert .49 < model.ledger.epsilon(1e-4) <= .5
  assert 'estimates.second_moments' in model.ledger.statement()
  plan = tfdp.PrivacyPlan(batch_size=40, steps=2, l2_norm_clip=1.0, noise_multiplier=1.0,
                          target_delta=1e-4, population_size=400)
  model.compile(tfdp.DPSGD(.1, plan=plan), keras.losses.SparseCategoricalCrossentropy(
      from_logits=True))
  model.fit(plan.batches((x, y)), verbose=0)
  assert model.ledger.epsilon(1e-4) > .5
  assert len(model.ledger.entries) == 2
  model.save(str(tmp_path / 'm.keras'))
  assert keras.models.load_model(str(tmp_path / 'm.keras')).ledger == model.ledger
  outer = keras.Sequential([layers.Input([4]), head, layers.Dense(1)])
  assert len(tfdp.make_private(outer).ledger.entries) == 2


def test_released_inputs_are_the_geometry_of_kfc_and_their_cost_is_counted():
  x, y = problem(512, 6, 3)
  x *= np.array([1, 1, 1, .05, .05, .05], np.float32)
  found = tfdp.estimates.second_moments(x, noise_multiplier=3.0, target_delta=1e-4)
  plan = tfdp.PrivacyPlan(batch_size=64, steps=3, l2_norm_clip=1.0, noise_multiplier=1.0,
                          target_delta=1e-4, population_size=512)
  model = tfdp.make_private(keras.Sequential([
      layers.Input([6]), layers.Dense(3, kernel_initializer='zeros')]))
  public = found.public_data(classes=3)
  model.compile(tfdp.DPKFC(.1, plan=plan, public_data=public),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  model.fit(plan.batches((x, y)), verbose=0)
  assert [entry.rule for entry in model.ledger.entries] == ['estimates.second_moments', 'dp_kfc']
  assert model.optimizer.epsilon() == pytest.approx((found.ledger + plan).epsilon(1e-4))
  left = model.optimizer.rule_state.moments[0][0]
  wanted = public.x.T @ public.x  # The released matrix without its negative eigenvalues.
  np.testing.assert_allclose(left / np.trace(left), wanted / np.trace(wanted), atol=1e-4)


@pytest.mark.parametrize('arguments, message', [
    (dict(y=None), '`y` must be the targets'), (dict(ridge=0), '`ridge` must be positive'),
    (dict(target_epsilon=None), 'One of `noise_multiplier` and `target_epsilon`')])
def test_refusals(arguments, message):
  given = dict(dict(x=np.zeros([4, 2]), y=np.zeros(4, int), target_epsilon=1.0, target_delta=1e-3),
               **arguments)
  with pytest.raises(ValueError, match=message):
    tfdp.heads.least_squares(**given)


def test_matrices_that_are_not_finite_are_refused():
  found = tfdp.estimates.second_moments(np.ones([9, 2]), np.ones(9), noise_multiplier=1.0,
                                        target_delta=1e-2)
  found.covariance[0, 0] = np.nan
  with pytest.raises(ValueError, match='must be finite'):
    heads.solve(found, .25)
  for use in (found.public_data, dataclasses.replace(found, constant=.5).whitening):
    with pytest.raises(ValueError, match='must be finite'):
      use()
