# SPDX-License-Identifier: Apache-2.0
"""Training within a budget of memory is training: the same steps, whatever the chunks."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.clipping import chunks

keras = compat.keras
RNG = np.random.default_rng(0)
X = RNG.normal(size=(23, 20)).astype('float32')
Y = X[:, :1] - X[:, 1:2]


def _train(metrics=None, jit_compile=False, dynamic=False, **kwargs):
  keras.utils.set_random_seed(1)
  model = tfdp.DPSequential([keras.layers.Input((20,)), keras.layers.Dense(100, 'relu'),
                             keras.layers.Dense(1)])
  model.compile(tfdp.DPAdam(0.1, l2_norm_clip=0.5, noise_multiplier=1.0, batch_size=23, seed=3,
                            **kwargs), 'mse', metrics=metrics, jit_compile=jit_compile)
  data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(23) if dynamic else (
      tf.data.Dataset.from_tensors((X, Y)))
  history = model.fit(data.repeat(2), verbose=0).history
  return model.get_weights(), history


@functools.lru_cache(None)
def _whole(adjacency):
  return _train(['mae'], adjacency=adjacency)


@pytest.mark.thorough
@pytest.mark.parametrize('kwargs', [
    {}, {'metrics': ['mae']}, {'jit_compile': True},
    {'dynamic': True, 'adjacency': 'add_remove', 'metrics': ['mae']}])
def test_steps_are_those_of_the_whole_batch(kwargs):
  whole, expected = _whole(kwargs.get('adjacency'))
  chunked, history = _train(  # Six or so of 23 examples at a time.
      performance=tfdp.Performance(memory_budget=4e4), **kwargs)
  for a, b in zip(whole, chunked):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  assert set(history) == {'loss', *kwargs.get('metrics', ())}
  for key in history:
    np.testing.assert_allclose(history[key], expected[key], rtol=1e-4)


@pytest.mark.thorough
def test_too_small_a_budget_names_what_is_needed():
  with pytest.raises(ValueError, match='needs about .* for one example'):
    _train(performance=tfdp.Performance(memory_budget=100))


@pytest.mark.parametrize('kwargs,message', [
    ({'memory_budget': 0}, '`memory_budget` must be positive'),
    ({'memory_budget': '1GB'}, '`memory_budget` must be positive'),
    ({'memory_budget': 1e6, 'accumulation_steps': 2}, 'Choose one')])
def test_wrong_budgets_are_refused(kwargs, message):
  with pytest.raises(ValueError, match=message):
    tfdp.Performance(**kwargs)


def test_the_budget_is_part_of_the_configuration():
  optimizer = tfdp.DPAdam(0.1, l2_norm_clip=0.5, noise_multiplier=1.0, batch_size=8,
                          performance=tfdp.Performance(memory_budget=2**20))
  assert tfdp.DPAdam.from_config(
      optimizer.get_config()).performance == optimizer.performance


@pytest.mark.thorough
def test_eager_steps_estimate_once_for_every_kind_of_batch(monkeypatch):
  estimates, rows_within = [], chunks.rows_within
  monkeypatch.setattr(
      chunks, 'rows_within', lambda *args: estimates.append(args[-1]) or rows_within(*args))
  model = tfdp.DPSequential([keras.layers.Input((20,)), keras.layers.Dense(1)])

  def fit(budget):
    model.compile(tfdp.DPSGD(0.1, l2_norm_clip=0.5, noise_multiplier=1.0, batch_size=16,
                             adjacency='add_remove',
                             performance=tfdp.Performance(memory_budget=budget)),
                  'mse', run_eagerly=True)
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0)

  fit(1e5)
  assert estimates == [16, 7]  # The second epoch has the same sizes.
  fit(1e6)
  assert estimates == [16, 7] * 2  # Compiled anew it may be another loss or budget.
  model.train_on_batch(X[:16], Y[:16])  # Arrays.
  assert len(estimates) == 4
