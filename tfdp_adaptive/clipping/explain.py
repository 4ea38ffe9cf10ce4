# SPDX-License-Identifier: Apache-2.0
"""Reports how each layer of a model is clipped, with a reason for what is slow."""

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import chunks
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping import tracing
from tfdp_adaptive.clipping.layers import generic
from tfdp_adaptive.clipping.layers import registry
from tfdp_adaptive.rules import kfc

_TITLES = {
    'bookkeeping': 'book-keeping: one forward and one backward pass, no gradient per example of '
                   'the model',
    'layered': 'layered: the gradient of every example, some examples at a time',
    'materialized': 'materialized: the whole model vectorized over examples',
    'loop': 'loop: the whole model, one example after the other'}


# {variable key: shapes of the left and the right side}, for variables that have a `Kronecker`.
_Sides = Dict[int, Tuple[tf.TensorShape, tf.TensorShape]]


class Layer(NamedTuple):
  """How one layer is clipped."""

  layer: str  # Its name.
  kind: str  # Its class.
  parameters: int  # Number of trainable parameters that it owns.
  route: str  # Route of each of its variables, the largest first.
  memory: Optional[int]  # Estimate of the bytes held while it is clipped; None for open sizes.
  reason: str = ''  # Why it does not take the route of its kind.


class Explanation(NamedTuple):
  """The result of `explain_clipping`, which prints as a table."""

  engine: str  # Name of the engine, not 'auto'.
  reason: str  # Why no faster engine is possible, or ''.
  batch_size: int
  scaled: bool  # Whether gradients are rescaled before clipping.
  budget: int  # Bytes of gradients of single examples that are formed at once.
  layers: Tuple[Layer, ...]
  open_inputs: str = ''  # Shapes of inputs with open axes, whose sizes are known in training.

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
    head = [f'Engine: {_TITLES[self.engine]}.'] + [f'Why: {self.reason}'] * bool(self.reason) + [
        f'Batch of {self.batch_size}, clipped ' + (
            'in a geometry' if self.scaled else 'in the plain norm')
        + f'; at most {self.budget / 2**20:g} MiB of gradients of single examples at once '
        '(of one example at least).']
    if self.open_inputs:
      head.append(f'Inputs of shape {self.open_inputs} have open axes: training decides by the '
                  'sizes of its batches. Give `x`, a batch or its specs, to see what it does.')
    return '\n'.join([*head, '', *rows])


def explain_clipping(
    model: compat.Model, x: trees.Tree = None, *, batch_size: Optional[int] = None,
    scaled: Optional[bool] = None, rule: Optional[contract.Rule] = None,
    engine: Optional[str] = None) -> Explanation:
  """Reports how each layer of a model is clipped, and why this engine was chosen.

  Nothing is run: the model is traced.

  Args:
    model: A built Keras model, private or not.
    x: Inputs whose first axis is the batch, a nest of arrays or `tf.TensorSpec`s. By default, the
      inputs that the model was trained on, or else its own input specification. Needed before the
      first private step of subclassed models, and of models whose inputs have open axes.
    batch_size: Examples in a batch. By default that of the private optimizer, of `x`, or 32.
    scaled: Whether gradients are rescaled before clipping. By default, the rule decides.
    rule: A `tfdp.rules` rule. By default that of the model's private optimizer, or DP-SGD.
    engine: As for the optimizers. By default that of the model's private optimizer, or 'auto'.

  Returns:
    An `Explanation`; `print` it.

  Raises:
    ValueError: If an argument has another type, or if the model is not built.
  """
  checks.instance(compat.keras.Model, 'a Keras model', model=model)
  optimizer = getattr(model, 'optimizer', None)
  optimizer = optimizer if isinstance(getattr(optimizer, 'rule', None), contract.Rule) else None
  rule = getattr(optimizer, 'rule', None) if rule is None else rule
  checks.instance((contract.Rule, type(None)), 'a `tfdp.rules` rule', rule=rule)
  engine = engine or str(getattr(getattr(optimizer, 'performance', None), 'engine', 'auto'))
  specs, batch_size = _inputs(model, x, batch_size, optimizer)
  asks = (contract.Ask(),) if rule is None else rule.asks
  sides = _sides(rule, model) if scaled is None else {}
  scaled = sides is not None if scaled is None else bool(scaled)
  name, reason = engines.decide(engine, model, asks, specs)
  if name in ('bookkeeping', 'layered'):
    layers = _traced(model, specs, scaled, sides or {}, name)
  else:
    layers = list(_untraced(model, batch_size if name == 'materialized' else 1))
  budget = {'bookkeeping': protocol.BLOCK_BYTES, 'layered': materialized.RECORD_BYTES}.get(
      name, 4 * sum(map(_size, model.trainable_variables)) * (batch_size if name != 'loop' else 1))
  shapes = [spec.shape for spec in tf.nest.flatten(specs)]
  unknown = [str(shape) for shape in shapes if not shape.is_fully_defined()]
  return Explanation(
      name, reason, batch_size, scaled, budget, tuple(layers), ', '.join(unknown))


def _size(variable: compat.Variable) -> int:
  return int(np.prod(variable.shape))


def _inputs(
    model: compat.Model, x: trees.Tree, batch_size: Optional[int],
    optimizer: compat.Optimizer) -> Tuple[trees.Tree, int]:
  """Returns the specs of the inputs of a batch, and its size."""
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
  batch_size = int(batch_size) if int(batch_size) == batch_size else batch_size
  checks.whole(batch_size=batch_size)
  return tf.nest.map_structure(
      lambda t: tf.TensorSpec([batch_size] + list(t.shape[1:]), t.dtype), x), batch_size


def _sides(rule: Optional[contract.Rule], model: compat.Model) -> Optional[_Sides]:
  """Returns the shapes of the sides of each variable's `Kronecker`; None without any scale.

  Rules that need gradients of public data have a scale per coordinate, unless they need factors.
  """
  variables = model.trainable_variables
  if rule is None or rule.public not in (None, 'factors'):
    return None if rule is None else {}
  specs = [tf.TensorSpec(v.shape, tf.as_dtype(v.dtype)) for v in variables]
  with tf.Graph().as_default():
    public: trees.Tree = ()
    if rule.public is not None:
      public = [tuple(tf.zeros(shape, spec.dtype) for shape in kfc.sides(spec.shape))
                for spec in specs]
    scales = [query.scale for query in rule.query(rule.init(specs), public)
              if not trees.absent(query.scale)]
    if not scales:
      return None
    return {compat.variable_key(v): (leaf.left.shape, leaf.right.shape)
            for v, leaf in zip(variables, tf.nest.flatten(scales[0]))
            if isinstance(leaf, contract.Kronecker)}


def _traced(
    model: compat.Model, specs: trees.Tree, scaled: bool, sides: _Sides,
    engine: str) -> List[Layer]:
  layers: List[Layer] = []
  proof = bookkeeping.prove(model, specs)

  def run(inputs: trees.Tree) -> tf.Tensor:
    recorder = tracing.Recorder(tracing.owners(model))
    with recorder.tape:
      recorder.run(model, inputs)
    calls = tracing.as_proven(recorder.calls, proof)
    layers.extend(_layers(calls, scaled, sides, engine))
    return tf.zeros([])

  tf.function(run, autograph=False).get_concrete_function(specs)
  return layers


def _layers(
    calls: Sequence[registry.Call], scaled: bool, sides: _Sides, engine: str) -> Iterator[Layer]:
  by_key = bookkeeping.terms(
      calls, [tf.nest.map_structure(tf.zeros_like, call.taps) for call in calls], formed=False)
  for owner in {id(call.owner): call.owner for call in calls}.values():
    layer, variables = owner.layer, sorted(owner.variables, key=_size, reverse=True)
    given, measured = [], []  # Factors, and the factors of their norms.
    for key in map(compat.variable_key, variables):
      factor = by_key.pop(key, None)
      if factor is not None:
        given.append(factor)
        pair = map(tf.zeros, sides[key]) if key in sides else None
        own = factor.transformed(contract.Kronecker(*pair)) if pair else factor
        measured.append((own.simplified(), scaled and not pair))
    routes = [factor.route(scaled) for factor, scaled in measured]
    if owner.kind is generic.KIND:
      routes = ['one example at a time']
    elif engine == 'layered':
      routes = ['records']
    yield Layer(
        layer.name, type(layer).__name__, sum(map(_size, variables)),
        ', '.join(dict.fromkeys(routes)), _memory(given, measured),
        registry.why_unknown(layer) if owner.kind is generic.KIND else '')


def _memory(
    given: Sequence[protocol.Factor],
    measured: Sequence[Tuple[protocol.Factor, bool]]) -> Optional[int]:
  """Returns the bytes of a layer's factors, and of the computation of its largest norm."""
  tensors = protocol.tensors((*given, *(factor for factor, _ in measured)))
  held = {t.ref(): t for t in tensors}.values()
  if not all(t.shape.is_fully_defined() for t in held):
    return None
  peaks = [_peak(factor, scaled) for factor, scaled in measured]
  return sum(t.shape.num_elements() * t.dtype.size for t in held) + max(peaks, default=0)


def _peak(factor: protocol.Factor, scaled: bool) -> int:
  """Returns the peak memory of the computation of a norm."""
  specs = [tf.TensorSpec(t.shape, t.dtype) for t in protocol.tensors(factor)]
  scale = tf.TensorSpec(factor.shape, specs[-1].dtype) if scaled else ()
  return chunks.peak(lambda given: protocol.rebuilt(
      factor, given[0]).squared_norm(given[1]), (specs, scale))


def _untraced(model: compat.Model, n: int) -> Iterator[Layer]:
  for layer in compat.leaf_layers(model):
    parameters = sum(map(_size, layer.trainable_variables))
    if parameters:
      yield Layer(layer.name, type(layer).__name__, parameters, 'whole model', 4 * n * parameters,
                  '' if registry.find(layer) else registry.why_unknown(layer))
