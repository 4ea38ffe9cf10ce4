# SPDX-License-Identifier: Apache-2.0
"""Reports how each layer of a model is clipped, with a reason for what is slow."""

import math
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping import tracing
from tfdp_adaptive.clipping.layers import generic
from tfdp_adaptive.clipping.layers import registry
from tfdp_adaptive.rules import kfc

_SAID = {
    'bookkeeping': 'book-keeping: one forward and one backward pass, no gradient per example of '
                   'the model',
    'layered': 'layered: the gradient of every example, some examples at a time',
    'materialized': 'materialized: the whole model vectorized over examples',
    'loop': 'loop: the whole model, one example after the other'}


class Layer(NamedTuple):
  """How one layer is clipped."""

  layer: str  # Its name.
  kind: str  # Its class.
  parameters: int  # Trainable ones that it owns.
  route: str  # Route of each of its variables, the largest first; see README.
  memory: Optional[int]  # Bytes held while it is clipped, an estimate; None: open sizes.
  reason: str = ''  # Why it goes another way than its kind does.


class Explanation(NamedTuple):
  """The result of `explain_clipping`, which prints as a table."""

  engine: str  # One of the optimizers' `engine`, but 'auto'.
  reason: str  # Why not a faster one, or ''.
  batch_size: int
  scaled: bool  # Whether records are clipped in a geometry.
  budget: int  # Bytes of gradients of single examples that are formed at once.
  layers: Tuple[Layer, ...]
  open_inputs: str = ''  # Shapes of inputs that have open axes, which training knows.

  def to_dict(self) -> Dict[str, Any]:
    """Returns JSON values."""
    return dict(self._asdict(), layers=[layer._asdict() for layer in self.layers])

  def __str__(self) -> str:
    table = [('layer', 'kind', 'parameters', 'MiB', 'route', '')] + [
        (one.layer, one.kind, f'{one.parameters:,}',
         '?' if one.memory is None else f'{one.memory / 2**20:.1f}', one.route, one.reason)
        for one in self.layers]
    widths = [max(map(len, column)) for column in zip(*table)]
    align = [str.ljust, str.ljust, str.rjust, str.rjust, str.ljust, str.ljust]
    rows = ['  '.join(f(cell, width) for f, cell, width in zip(align, row, widths)).rstrip()
            for row in table]
    head = [f'Engine: {_SAID[self.engine]}.'] + [f'Why: {self.reason}'] * bool(self.reason) + [
        f'Batch of {self.batch_size}, clipped ' + (
            'in a geometry' if self.scaled else 'in the plain norm')
        + f'; at most {self.budget / 2**20:g} MiB of gradients of single examples at once '
        '(of one example at least).']
    if self.open_inputs:
      head.append(f'Inputs of shape {self.open_inputs} have open axes: training decides by the '
                  'sizes of its batches. Give `x`, a batch or its specs, to see what it does.')
    return '\n'.join([*head, '', *rows])


def explain_clipping(
    model: compat.Model, x: Any = None, *, batch_size: Optional[int] = None,
    scaled: Optional[bool] = None, rule: Optional[contract.Rule] = None,
    engine: Optional[str] = None) -> Explanation:
  """Reports how each layer of a model is clipped, and why by this engine.

  Nothing is run: the model is traced.

  Args:
    model: A built Keras model, private or not.
    x: Nest of inputs with the batch as first axis, arrays or `tf.TensorSpec`s. If None, what
      the model was trained on, or else the model's own input specification. Needed before the
      first private step of subclassed models, and of models whose inputs have open axes.
    batch_size: Examples in a batch; that of the model's private optimizer, of `x`, or 32.
    scaled: Whether records are clipped in a geometry; what the rule does if None.
    rule: A `tfdp.rules` rule; that of the model's private optimizer if None, or else one
      that clips as DP-SGD does.
    engine: As for the optimizers; that of the model's private optimizer, or 'auto'.

  Returns:
    An `Explanation`; `print` it.

  Raises:
    ValueError: If an argument is not of this kind, or the model is not built.
  """
  if not isinstance(model, compat.keras.Model):
    raise ValueError('`model` must be a Keras model. '
                     f'Received: model={model!r} of type {type(model).__name__}.')
  optimizer = getattr(model, 'optimizer', None)
  optimizer = optimizer if isinstance(getattr(optimizer, 'rule', None), contract.Rule) else None
  rule = getattr(optimizer, 'rule', None) if rule is None else rule
  if rule is not None and not isinstance(rule, contract.Rule):
    raise ValueError(f'`rule` must be a `tfdp.rules` rule. Received: rule={rule!r}.')
  engine = engine or str(getattr(getattr(optimizer, 'performance', None), 'engine', 'auto'))
  specs, batch_size = _inputs(model, x, batch_size, optimizer)
  asks = (contract.Ask(),) if rule is None else rule.asks
  shapes = _geometry(rule, model) if scaled is None else [None] * len(model.trainable_variables)
  scaled = shapes is not None if scaled is None else bool(scaled)
  name, reason = engines.decide(engine, model, asks, specs)
  if name in ('bookkeeping', 'layered'):
    layers = _traced(model, specs, batch_size, scaled, shapes or [], name)
  else:
    layers = _untraced(model, batch_size if name == 'materialized' else 1)
  budget = {'bookkeeping': protocol.BLOCK_BYTES, 'layered': materialized.RECORD_BYTES}.get(
      name, 4 * sum(map(_size, model.trainable_variables)) * (batch_size if name != 'loop' else 1))
  shapes = [spec.shape for spec in tf.nest.flatten(specs)]
  unknown = [str(shape) for shape in shapes if not shape.is_fully_defined()]
  return Explanation(
      name, reason, batch_size, scaled, budget, tuple(layers), ', '.join(unknown))


def _size(variable: compat.Variable) -> int:
  return int(np.prod(variable.shape))


def _inputs(
    model: compat.Model, x: Any, batch_size: Optional[int], optimizer: Any) -> Tuple[Any, int]:
  """Specs of the inputs of a batch, and its size."""
  if isinstance(x, (list, tuple)) and x and all(isinstance(one, str) for one in x):
    x = tf.constant(x)
    if hasattr(model, 'preprocess_samples'):  # A task of KerasHub.
      x = compat.keras.utils.unpack_x_y_sample_weight(model.preprocess_samples(x))[0]
  seen = x is None
  x = engines.SEEN.get(model) if seen else x
  size = None if seen else tf.nest.flatten(x)[0].shape[0]
  x = compat.input_specs(model) if x is None else x
  if not model.built or x is None:
    raise ValueError('`model` must be built and `x` given, unless the model tells its inputs. '
                     f'Received: a {type(model).__name__} that '
                     + ('does not.' if model.built else 'is not built. Call it once.'))
  batch_size = size if batch_size is None else batch_size
  if batch_size is None:
    batch_size = getattr(optimizer, 'batch_size', None) or 32
  if int(batch_size) != batch_size or batch_size < 1:
    raise ValueError(f'`batch_size` must be a positive integer. Received: batch_size={batch_size}.')
  batch_size = int(batch_size)
  return tf.nest.map_structure(
      lambda t: tf.TensorSpec([batch_size] + list(t.shape[1:]), t.dtype), x), batch_size


def _geometry(rule: Optional[contract.Rule], model: compat.Model) -> Optional[List[Any]]:
  """Per variable the shapes of its two sides, or None for a scale per coordinate.

  None instead of a list where records are not scaled at all. Rules that need gradients of
  public data to say have a scale per coordinate, but for those that need factors.
  """
  variables = model.trainable_variables
  if rule is None or rule.public not in (None, 'factors'):
    return None if rule is None else [None] * len(variables)
  specs = [tf.TensorSpec(v.shape, tf.as_dtype(v.dtype)) for v in variables]
  with tf.Graph().as_default():
    public: Any = ()
    if rule.public is not None:
      public = [tuple(tf.zeros(shape, spec.dtype) for shape in kfc.sides(spec.shape))
                for spec in specs]
    scales = [query.scale for query in rule.query(rule.init(specs), public)
              if not trees.absent(query.scale)]
    return None if not scales else [
        (leaf.left.shape, leaf.right.shape) if isinstance(leaf, contract.Kronecker) else None
        for leaf in tf.nest.flatten(scales[0])]


def _traced(
    model: compat.Model, specs: Any, n: int, scaled: bool, shapes: Sequence[Any],
    engine: str) -> List[Layer]:
  layers: List[Layer] = []

  def run(inputs: Any) -> tf.Tensor:
    tape = tf.GradientTape(watch_accessed_variables=False)
    recorder = tracing.Recorder(tracing.units(model), tape)
    with tape:
      recorder.run(model, inputs)
    sides = {compat.variable_key(v): contract.Kronecker(*map(tf.zeros, pair))
             for v, pair in zip(model.trainable_variables, shapes) if pair is not None}
    layers.extend(_layers(model, recorder.records, specs, n, scaled, sides, engine))
    return tf.zeros([])

  tf.function(run, autograph=False).get_concrete_function(specs)
  return layers


def _layers(
    model: compat.Model, records: Any, specs: Any, n: int, scaled: bool, sides: Dict[Any, Any],
    engine: str) -> Iterator[Layer]:
  terms = bookkeeping.terms(records, bookkeeping.prove(model, specs), [
      tf.nest.map_structure(tf.zeros_like, record.taps) for record in records], formed=False)
  for unit in {id(record.unit.layer): record.unit for record in records}.values():
    variables = sorted(unit.variables, key=_size, reverse=True)
    keys = [compat.variable_key(v) for v in variables]
    keys = [key for key in keys if key in terms]
    taken = [terms.pop(key) for key in keys]
    measured = [_measured(one, sides.get(key), scaled) for key, one in zip(keys, taken)]
    routes = [factor.route(scaled) for factor, scaled in measured]
    if unit.kind is generic.KIND:
      routes = ['one example at a time']
    elif engine == 'layered':
      routes = ['records']
    yield Layer(unit.layer.name, type(unit.layer).__name__, sum(map(_size, variables)),
                ', '.join(dict.fromkeys(routes)), _memory(taken, measured, n), _why(unit))


def _measured(
    factor: protocol.Factor, sides: Optional[contract.Kronecker],
    scaled: bool) -> Tuple[protocol.Factor, bool]:
  """What a variable's norms are formed of, and whether that is still to be scaled."""
  if sides is None:
    return factor.simplified(), scaled
  return factor.transformed(sides).simplified(), False


def _memory(
    taken: Sequence[protocol.Factor], measured: Sequence[Tuple[protocol.Factor, bool]],
    n: int) -> Optional[int]:
  """Bytes of what a layer's norms are formed of, and of the largest norm at work."""
  factors = [*taken, *(factor for factor, _ in measured)]
  held = {t.ref(): t for t in protocol.tensors(tuple(factors))}.values()
  if not all(t.shape[1:].is_fully_defined() for t in held):
    return None
  return n * sum(math.prod(t.shape[1:]) * t.dtype.size for t in held) + max(
      [4 * factor.formed(n, scaled) for factor, scaled in measured], default=0)


def _why(unit: tracing.Unit) -> str:
  return registry.why_unknown(unit.layer) if unit.kind is generic.KIND else ''


def _untraced(model: compat.Model, n: int) -> Iterator[Layer]:
  for layer in compat.leaf_layers(model):
    parameters = sum(map(_size, layer.trainable_variables))
    if parameters:
      yield Layer(layer.name, type(layer).__name__, parameters, 'whole model', 4 * n * parameters,
                  '' if registry.find(layer) else registry.why_unknown(layer))
