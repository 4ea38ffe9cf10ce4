# SPDX-License-Identifier: Apache-2.0
"""The result of `tfdp.recommend`: a table, and everything needed to train."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privacy
from tfdp_adaptive.advice import inputs as inputs_lib
from tfdp_adaptive.advice import outputs as outputs_lib
from tfdp_adaptive.advice import trial as trial_lib
from tfdp_adaptive.keras import named_optimizers
from tfdp_adaptive.keras import private
from tfdp_adaptive.trees import Tree


class Row(NamedTuple):
  """A row of the table that a recommendation prints.

  Attributes:
    name: What was tried.
    loss: Mean loss of the public examples.
    metric: Value of the user's first metric; None without one.
    more: By how much the loss is above that of the proposal.
    interval: Half the 95% interval of `more`, over examples.
  """

  name: str
  loss: float
  metric: Optional[float]
  more: float
  interval: float


class Origin(NamedTuple):
  """The data and settings that a recommendation was made from.

  Attributes:
    model: The user's model.
    loss: The loss of examples.
    x, y: PUBLIC examples.
    layers: The layers of the model, one after the other; () if they do not form a chain.
    front: The number of frozen layers in front of the scales.
    inputs: The public scales.
    weights: Values of the trainable variables that were trained on the public examples, or ().
    recipe: Rate and steps of that training.
    last: Whether the last layer alone is trained privately.
  """

  model: compat.Model
  loss: Any = None
  x: Tree = ()
  y: Tree = np.zeros(0)
  layers: Sequence[compat.Layer] = ()
  front: int = 0
  inputs: inputs_lib.Inputs = inputs_lib.Inputs()
  weights: trial_lib.Weights = ()
  recipe: Tuple[float, int] = (0.0, 0)
  last: bool = False

  @property
  def source(self) -> str:
    return f'{len(tf.nest.flatten(self.y)[0])} public examples of tfdp.recommend'


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """The result of `recommend`. Print it to read it.

  Attributes:
    plan: The `PrivacyPlan` to train with; None if nothing private is better than the model
      trained on the public examples alone, or than the model as it is. Its `batches` raises an
      error if public examples are among the private ones.
    method: Name of the optimizer class; None without a plan.
    settings: Arguments of the class besides `plan`.
    rows: What was tried, as `Row`s.
    reasons: Sentences that say why, and how sure the result is.
    metric: Name of the metric; '' without one.
  """

  plan: Optional[privacy.PrivacyPlan]
  method: Optional[str]
  settings: Dict[str, Any]
  rows: Tuple[Row, ...]
  reasons: Tuple[str, ...]
  metric: str
  _origin: Origin = dataclasses.field(repr=False)

  @functools.cached_property
  def model(self) -> compat.Model:
    """The private model to train, or the trained one if there is no plan.

    It is made when it is first read, and shares its layers with the model that was given. Public
    scales of the inputs are layers of it, and weights of a public start are assigned. Layers that
    stay as the public examples made them are frozen.
    """
    origin = self._origin
    for variable, value in zip(origin.model.trainable_variables, origin.weights):
      variable.assign(tf.cast(value, variable.dtype))
    if origin.last:
      for layer in origin.layers[:-1]:
        layer.trainable = False
    scales = origin.inputs.layers(origin.source)
    if not scales:
      return private.make_private(origin.model)
    keras = compat.keras
    entry = keras.layers.Input(np.shape(origin.x)[1:], dtype=origin.x.dtype)
    if origin.layers:
      return private.DPSequential(
          [entry, *origin.layers[:origin.front], *scales, *origin.layers[origin.front:]])
    value = entry
    for layer in scales:
      value = layer(value)
    return private.make_private(keras.Model(entry, origin.model(value)))

  def optimizer(self) -> compat.Optimizer:
    """Returns a new optimizer for `model`, for one run of the plan."""
    if self.plan is None:
      raise ValueError('There is no private optimizer to use: the model without private training '
                       'is proposed, which `found.model` is. Received: plan=None.')
    origin, settings = self._origin, dict(self.settings)
    if not settings.get('use_ema'):
      settings['learning_rate'] = compat.keras.optimizers.schedules.PolynomialDecay(
          settings['learning_rate'], self.plan.steps, 0.0)
    if self.method == 'DPKFC':
      settings['public_data'] = origin.x, origin.y
    made = getattr(named_optimizers, str(self.method))(plan=self.plan, **settings)
    if self.rows:
      used = ['the settings',
              *['the scales of the inputs'] * (origin.inputs.kind != inputs_lib.AS_GIVEN),
              *['the weights that training started from'] * bool(origin.weights)]
      made.run.note(f'{origin.source}, which cost no privacy, were used for {" and ".join(used)}.')
    return made

  def calibrate(self, model: compat.Model) -> outputs_lib.Fitted:
    """Fits temperature and bias of a trained model's outputs on the public examples.

    Clipping shrinks the scores of rare classes. The last `Dense` layer takes the new temperature
    and bias. This costs no privacy, because it reads public examples and the model only.

    Returns:
      The temperature and the bias.
    """
    origin, last = self._origin, outputs_lib.last_dense(self._origin.model)
    if last is None or not self.rows:
      raise ValueError('`model` must end in a `Dense` layer with a bias and the activation linear, '
                       'sigmoid or softmax, and the recommendation must be made of public '
                       f'examples. Received: {model!r}.')
    fitted = outputs_lib.fit(last.activation.__name__, origin.loss, origin.y,
                             model.predict(origin.x, verbose=0))
    kernel, bias = last.get_weights()
    last.set_weights([fitted[0] * kernel, fitted[0] * bias + fitted[1]])
    return fitted

  def code(self) -> str:
    """Returns the proposal as lines of Keras, for your own program."""
    origin, inputs = self._origin, self._origin.inputs
    lines, front = ['x, y = public'], origin.front
    if inputs.kind != inputs_lib.AS_GIVEN or origin.last:
      if set(map(id, origin.layers)) - set(map(id, origin.model.layers)):  # See `inputs.chain`.
        lines.append('last = model.layers[-1]')
        found = '[keras.Model(model.inputs, last.input), last]'
      else:
        found = ("[one for one in model.layers if type(one).__name__ != 'InputLayer']"
                 if origin.layers else '[model]')
      lines.append(f'layers = {found}')
    if inputs.kind != inputs_lib.AS_GIVEN:
      lines += [f'scale = keras.layers.Normalization(mean={_listed(inputs.mean)},',
                f'                                   variance={_listed(inputs.variance)})']
      if inputs.matrix is not None:
        features = f'keras.Sequential(layers[:{front}])(x)' if front else 'x'
        lines += [f'covariance = np.cov(np.transpose(scale({features})))',
                  'values, vectors = np.linalg.eigh(covariance)',
                  'whiten = keras.layers.Dense(len(values), use_bias=False, trainable=False)',
                  'whiten.build([None, len(values)])',
                  f'scales = np.sqrt(np.maximum(values, 0) + {inputs.ridge:.4g})',
                  'whiten.set_weights([vectors / scales @ vectors.T])']
      scales = 'scale, whiten' if inputs.matrix is not None else 'scale'
      before, after = (f'*layers[:{front}], ', f'*layers[{front}:]') if front else ('', '*layers')
      # Without an input, Keras would build the scale inside the graph of `fit`.
      lines += ['model = keras.Sequential([',
                f'    keras.layers.Input(x.shape[1:]), {before}{scales}, {after}])']
    if origin.weights:
      rate, steps = origin.recipe
      count = len(tf.nest.flatten(origin.y)[0])
      lines += [f'model.compile(keras.optimizers.Adam({rate:.3g}), loss=loss)',
                f'model.fit(x, y, batch_size={trial_lib.BATCH}, epochs='
                f'{max(1, round(steps * trial_lib.BATCH / count))})']
    if origin.last:
      lines += ['for layer in layers[:-1]:', '  layer.trainable = False']
    if self.plan is not None:
      plan, settings = self.plan, dict(self.settings)
      rate = settings.pop('learning_rate')
      lines += [
          f'plan = tfdp.PrivacyPlan.calibrate(target_epsilon={plan.epsilon():.4g}, '
          f'target_delta={plan.target_delta:g},',
          f'    population_size={plan.population_size}, batch_size={plan.batch_size}, '
          f'steps={plan.steps},',
          f'    l2_norm_clip={plan.l2_norm_clip:g}, sampling=tfdp.sampling.{plan.sampling!r},',
          f'    adjacency={plan.adjacency!r}, unit={plan.unit!r},',
          f'    mechanism=tfdp.mechanisms.{_mechanism(plan.mechanism)}'
          + (', public=x)' if isinstance(origin.x, np.ndarray) else ')'),
          f'rate = {rate:g}' if settings.get('use_ema') else
          f'rate = keras.optimizers.schedules.PolynomialDecay({rate:g}, {plan.steps}, 0.0)',
          f'optimizer = tfdp.{self.method}(rate, plan=plan'
          + ''.join(f', {name}={value!r}' for name, value in settings.items())
          + (', public_data=public)' if self.method == 'DPKFC' else ')'),
          'model = tfdp.make_private(model)', 'model.compile(optimizer, loss=loss)',
          f'model.fit(plan.batches(data), epochs=1, steps_per_epoch={plan.steps})']
    return '\n'.join(lines)

  def __str__(self) -> str:
    lines = []
    if self.rows:
      width = max(len(row.name) for row in self.rows)
      lines.append(f'{"":{width}} {"loss":>9} {self.metric[:10]:>10}   above the proposal')
      for row in self.rows:
        metric = '' if row.metric is None else f'{row.metric:.4g}'
        lines.append(f'{row.name:{width}} {row.loss:9.4g} {metric:>10}' + (
            f'   {row.more:+.3g} +- {row.interval:.2g}' if row.more or row.interval else ''))
      lines.append('')
    return '\n'.join([*lines, *self.reasons])


def array(part: Any) -> np.ndarray:
  """Returns an array, of float32 if its numbers are not whole."""
  part = np.asarray(part)
  return part.astype(np.float32) if part.dtype.kind == 'f' else part


def _listed(values: Tree) -> str:
  return '[' + ', '.join(f'{value:.6g}' for value in np.ravel(values)) + ']'


def _mechanism(mechanism: mechanisms.Mechanism) -> str:
  if isinstance(mechanism, mechanisms.BandedToeplitz):
    return f'BandedToeplitz({mechanism.bands}, {mechanism.steps})'
  return f'{type(mechanism).__name__}()'
