# SPDX-License-Identifier: Apache-2.0
"""Temperature and bias have closed forms, and metrics are those of Keras."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.advice import outputs
from tfdp_adaptive.clipping import losses

RNG = np.random.default_rng(0)
keras = compat.keras


def test_linear_outputs_get_the_line_of_least_squares(monkeypatch):
  monkeypatch.setattr(outputs, '_PENALTY', 0.0)
  scores = RNG.normal(size=[200, 1])
  y = 3 * scores - 2 + RNG.normal(size=[200, 1])
  slope, bias = outputs.fit('linear', losses.ExampleLoss('mse'), y, scores)
  np.testing.assert_allclose([slope, bias[0]], np.polyfit(scores[:, 0], y[:, 0], 1), atol=1e-3)


@pytest.mark.parametrize('activation, loss', [
    ('sigmoid', 'binary_crossentropy'), ('softmax', 'sparse_categorical_crossentropy')])
def test_probabilities_that_were_spoiled_are_found_again(activation, loss):
  width = 1 if activation == 'sigmoid' else 3
  scores = 2 * RNG.normal(size=[4000, width])
  function = {'sigmoid': tf.math.sigmoid, 'softmax': tf.nn.softmax}[activation]
  right = function(scores).numpy()
  y = (RNG.random([4000, 1]) < right if width == 1 else
       (RNG.random([4000, 1]) < np.cumsum(right, 1)).argmax(1)).astype(np.float32)
  spoiled = function((scores - np.arange(width) - 1) / 4).numpy()
  fitted = outputs.fit(activation, losses.ExampleLoss(loss), y, spoiled)
  assert 2.5 < fitted[0] < 5
  moved = outputs.apply(activation, spoiled, fitted)
  assert np.abs(moved - right).mean() < .03 < np.abs(spoiled - right).mean()


@pytest.mark.parametrize('metric, name, sign', [
    ('accuracy', 'accuracy', 1), ('AUC', 'AUC', 1), ('mae', 'mae', -1)])
def test_metrics_are_those_of_keras_and_larger_is_better(metric, name, sign):
  found = RNG.random([50, 1]).astype(np.float32)
  y = (RNG.random([50, 1]) < .5).astype(np.float32)
  judge = outputs.Judge('binary_crossentropy', [metric], found, y)
  values = {'accuracy': np.mean((found > .5) == y), 'mae': -np.mean(np.abs(found - y)),
            'AUC': np.mean(found[y == 1][:, None] > found[y == 0][None])}
  for _ in range(2):  # The value of the first call is not added up.
    assert judge(found, y) == pytest.approx(values[name], abs=.01)
  assert judge and judge.sign == sign


@pytest.mark.parametrize('loss, metric, sign', [
    *(('mse', one, -1) for one in ('mse', 'mape', 'msle', 'poisson', 'RootMeanSquaredError')),
    ('binary_crossentropy', 'FalseNegatives', -1), ('binary_crossentropy', 'Precision', 1),
    ('mse', 'cosine_similarity', 1)])
def test_the_names_of_metrics_say_whether_less_is_better(loss, metric, sign):
  found = RNG.random([50, 1]).astype(np.float32)
  assert outputs.Judge(loss, [metric], found, (found > .7).astype(np.float32)).sign == sign


def test_without_metrics_nothing_judges():
  judge = outputs.Judge('mse', (), np.zeros([3, 1]), np.zeros([3, 1]))
  assert not judge and judge(np.zeros([3, 1]), np.zeros([3, 1])) == 0


@pytest.mark.parametrize('metrics', ['mae', ['mae', 'mse'], {'out': 'mae'}])
def test_one_metric_may_come_in_any_structure(metrics):
  found = np.full([3, 1], 2.0, np.float32)
  assert outputs.Judge('mse', metrics, found, 0 * found)(found, 0 * found) == -2


@pytest.mark.parametrize('metric', ['no such metric', lambda y, outputs: tf.constant(np.nan)])
def test_a_metric_without_a_value_is_refused(metric):
  with pytest.raises(ValueError, match='`metrics` must .*Received'):
    outputs.Judge('mse', [metric], np.zeros([3, 1], np.float32), np.zeros([3, 1], np.float32))


def test_the_last_layer_that_can_hold_them():
  layers = keras.layers
  model = lambda *more: keras.Sequential([layers.Input([2]), *more])
  last = layers.Dense(1, activation='sigmoid')
  assert outputs.last_dense(model(layers.Dense(3), last)) is last
  assert outputs.last_dense(model(layers.Dense(1, use_bias=False))) is None
  assert outputs.last_dense(model(layers.Dense(1, activation='relu'))) is None
  assert outputs.last_dense(model(layers.Dense(1), layers.LayerNormalization())) is None
  entry = keras.Input([2])
  assert outputs.last_dense(keras.Model(entry, last(layers.Dense(3)(entry)))) is last
  both = keras.Model(entry, [last(layers.Dense(3)(entry)), layers.Dense(1)(entry)])
  assert outputs.last_dense(both) is None
