# SPDX-License-Identifier: Apache-2.0
"""Judges outputs by the user's metrics, and fits their temperature and bias on PUBLIC examples."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import numpy as np
from scipy import optimize
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.trees import Scalar
from tfdp_adaptive.trees import Tree

_SMALL = (  # Parts of the names of metrics that should be small.
    'error', 'loss', 'entropy', 'divergence', 'hinge', 'perplexity', 'deviance', 'false', 'cosh',
    'poisson', 'mse', 'mae', 'mape', 'msle')
_INVERSES = {  # Activation -> (its inverse, the activation).
    'linear': (lambda t: t, lambda t: t),
    'sigmoid': (lambda t: tf.math.log(t) - tf.math.log1p(-t), tf.math.sigmoid),
    'softmax': (tf.math.log, tf.nn.softmax)}
_PENALTY = 1.0  # Weight of the squared changes of temperature and bias, beside a sum of losses.


class Judge:
  """Computes the first metric of a model with one output; there may be none.

  Keras itself resolves the metric, on a model whose outputs are its inputs.

  Args:
    loss, metrics: As in `compile`.
    outputs, y: Outputs and targets of some examples.
  """

  def __init__(self, loss: object, metrics: Sequence[object], outputs: Tree, y: Tree) -> None:
    self._model: compat.Model = None
    self.name, self.sign = '', 1
    if not metrics or not isinstance(outputs, np.ndarray):
      return
    keras = compat.keras
    entry = keras.layers.Input(outputs.shape[1:])
    self._model = keras.Model(entry, keras.layers.Activation('linear')(entry))
    try:
      self._model.compile(loss=loss, metrics=tf.nest.flatten(metrics)[:1])
      value = self(outputs, y)
    except Exception as error:
      raise ValueError('`metrics` must hold metrics of Keras that fit to the outputs of the model. '
                       f'Received: {metrics!r} ({str(error)[:200]}).') from error
    if not np.isfinite(value):
      raise ValueError('`metrics` must have a value for the model as it is. Received: '
                       f'{metrics!r}, of which the first is {value}.')

  def __call__(self, outputs: Tree, y: Tree) -> float:
    """Returns the value of the metric, with its sign turned if smaller is better."""
    if self._model is None:
      return 0.0
    self._model.reset_metrics()
    logs = dict(self._model.test_on_batch(outputs, y, return_dict=True))
    logs.pop('loss', None)
    (self.name, value), *_ = logs.items()
    if any(word in self.name.lower() for word in _SMALL):
      self.sign = -1
    return self.sign * float(value)

  def __bool__(self) -> bool:
    return self._model is not None


def last_dense(model: compat.Model) -> Optional[compat.Layer]:
  """Returns the layer whose weights can hold a temperature and a bias, or None."""
  keras, last = compat.keras, model
  while isinstance(last, keras.Sequential):
    last = last.layers[-1]
  if isinstance(last, keras.Model):
    outputs = getattr(last, 'outputs', None) or ()  # The layer of the only one comes last.
    last = last.layers[-1] if len(outputs) == 1 else None
  if isinstance(last, keras.layers.Dense) and last.use_bias and (
      last.activation.__name__ in _INVERSES) and last.trainable:
    return last
  return None


Fitted = Tuple[float, np.ndarray]


def fit(activation: str, loss: interface.Loss, y: Tree, outputs: Tree) -> Fitted:
  """Returns `(temperature, bias)` of the least loss: scores become `temperature * z + bias`."""
  scores, width = _scores(activation, outputs), outputs.shape[-1]

  def value_and_gradient(numbers: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    with tf.GradientTape() as tape:
      tape.watch(numbers)
      moved = _moved(activation, scores, numbers[0], numbers[1:])
      total = tf.reduce_mean(loss(y, moved)) + _PENALTY / len(outputs) * tf.reduce_mean(tf.square(
          numbers - tf.concat([[1.0], tf.zeros([width], tf.float64)], 0)))
    return total, tape.gradient(total, numbers)

  found = optimize.minimize(
      lambda numbers: [t.numpy() for t in value_and_gradient(tf.constant(numbers, tf.float64))],
      np.append(1.0, np.zeros(width)), jac=True, method='L-BFGS-B',
      bounds=[(1e-2, 1e2)] + [(None, None)] * width)
  return float(found.x[0]), found.x[1:]


def apply(activation: str, outputs: Tree, fitted: Fitted) -> np.ndarray:
  """Returns the outputs at another temperature and bias."""
  return _moved(activation, _scores(activation, outputs), *fitted).numpy().astype(np.float32)


def _scores(activation: str, outputs: Tree) -> tf.Tensor:
  values = tf.cast(outputs, tf.float64)
  if activation != 'linear':
    values = tf.clip_by_value(values, 1e-7, 1 - 1e-7)
  return _INVERSES[activation][0](values)


def _moved(activation: str, scores: tf.Tensor, temperature: Scalar, bias: Tree) -> tf.Tensor:
  return _INVERSES[activation][1](temperature * scores + bias)
