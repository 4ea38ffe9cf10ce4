# SPDX-License-Identifier: Apache-2.0
"""The book-keeping engine: clipping in a geometry at about the price of a gradient.

One forward and one backward pass give, for every layer, its inputs and the
gradient of each example's loss by its output. From these follow the norms per
example, one weight per example and ask, and the weighted sums, without a second
backward pass and without a gradient per example of the whole model (Li et al.
2021, ghost clipping; Bu et al. 2022, book-keeping). With `S` a diagonal geometry,
`||S * (a e')||^2 = (a^2)' S^2 (e^2)` keeps that true when records are scaled; matrices on
either side of a variable go into the factors, `A (a e') G' = (A a) (G e)'`, and norms and
sums are then formed of these: what is added up is what was measured, rounding included.

The sums equal those of `projection.project_record` but for rounding. Some records have finite
gradients, but the squares of their norms are not finite. Their factors are brought to the size of
one, example by example. This computes the norms once more, so it is done only for such batches.
"""

import math
import types
from typing import Any, Dict, Iterable, List, Mapping, MutableMapping, Optional, Sequence, Tuple
import weakref

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping import rows
from tfdp_adaptive.clipping import tracing
from tfdp_adaptive.clipping.layers import registry

register = registry.register
Unsupported = registry.Unsupported
# Model -> {input signature: batched arguments}.
_PROVEN: MutableMapping[Any, Any] = weakref.WeakKeyDictionary()


def supports(
    model: compat.Model, x: Any = None, asks: Tuple[contract.Ask, ...] = ()) -> Tuple[bool, str]:
  """Whether the engine can clip this model.

  Args:
    model: A built Keras model.
    x: Nest of inputs, or of their specs; without it only the structure is checked.
    asks: The rule's asks.

  Returns:
    `(True, '')`, or False and the reason.
  """
  try:
    _check_asks(asks)
    tracing.units(model) if x is None else prove(model, x)
  except Unsupported as error:
    return False, str(error)
  return True, ''


def engine(
    model: compat.Model, loss: interface.Loss, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """See `interface`: the clipped sums, exact in the scaled geometry.

  Args:
    model: A built Keras model.
    loss: `(y, outputs, sample_weight) -> [n]`, the loss of each example.
    batch: `interface.Batch`; a record of several examples is clipped as one, by folding.
    request: `interface.Request`, of asks with `projection='rescale'`.

  Returns:
    `interface.Clipped`, whose sums are lists like `model.trainable_variables`.

  Raises:
    Unsupported: If a layer cannot be seen or an ask needs the records themselves.
  """
  asks, queries, clips = request
  _check_asks(asks)
  variables = model.trainable_variables
  scales = [_per_variable(query.scale, variables) for query in queries]
  if len(asks) == 1 or not geometry.is_kronecker(scales):
    per_variable, outputs, losses = factors_of(model, loss, batch, scales[0])
    return _clipped(variables, per_variable, outputs, losses, batch.mask, request, scales)
  per_variable, outputs, losses = factors_of(model, loss, batch)
  answers = [
      _clipped(variables, [_into(factor, leaf) for factor, leaf in zip(per_variable, scale)],
               outputs, losses, batch.mask, interface.Request(*[(one,) for one in of_ask]), [scale])
      for scale, *of_ask in zip(scales, *request)]
  return interface.Clipped(
      tuple(answer.sums[0] for answer in answers), outputs, losses,
      tuple(answer.norms[0] for answer in answers))


def _into(factor: Optional[protocol.Factor], scale: Any) -> Optional[protocol.Factor]:
  """Returns a factor multiplied by the sides of a `Kronecker`; other factors unchanged."""
  if factor is None or not isinstance(scale, contract.Kronecker):
    return factor
  return factor.transformed(scale)


def _clipped(
    variables: Sequence[compat.Variable], per_variable: Sequence[Optional[protocol.Factor]],
    outputs: Any, losses: tf.Tensor, mask: tf.Tensor, request: interface.Request,
    scales: Any) -> interface.Clipped:
  """Clips what the factors are of, those of a `Kronecker` being in its space already."""
  asks, queries, clips = request
  parts = projection.parts(asks, queries, clips, len(variables))
  of_asks = [[() if isinstance(leaf, contract.Kronecker) else leaf for leaf in scale]
             for scale in scales]
  scales = [[scale if i in part.leaves else None for i, scale in enumerate(of_asks[part.ask])]
            for part in parts]
  norms = [tf.zeros(tf.shape(losses), tf.float64) for _ in parts]
  for i, factor in enumerate(per_variable):
    if factor is not None:
      own_parts = [p for p, part in enumerate(parts) if i in part.leaves]
      for p, square in zip(own_parts, factor.squared_norms([scales[p][i] for p in own_parts])):
        norms[p] += square
  norms = [tf.sqrt(norm) for norm in norms]
  norms, per_variable, sizes = checked(norms, per_variable, scales)
  weights = _weights(asks, parts, charged(
      tuple(asks[part.ask] for part in parts), norms, per_variable, sizes, scales), mask)
  by_group = _by_group(asks, parts, norms)
  norms = [own[0] if len(own) == 1 else tf.sqrt(tf.add_n([tf.square(norm) for norm in own]))
           for own in by_group]
  sums = tuple(
      one._replace(rider=_rider(
          ask.rider, norm, clip, mask, variables, own, [
              part.clip for part in parts if part.ask == i]))
      for i, (one, ask, norm, clip, own) in enumerate(zip(
          _sums(variables, per_variable, asks, of_asks, parts, weights, sizes), asks, norms,
          clips, by_group)))
  return interface.Clipped(sums, outputs, losses, tuple(norms))


def factors_of(
    model: compat.Model, loss: interface.Loss, batch: interface.Batch,
    scale: Sequence[Any] = (),
    formed: bool = True) -> Tuple[List[Optional[protocol.Factor]], Any, tf.Tensor]:
  """`(factors, outputs, losses)`: the factor of each trainable variable, None if not reached.

  Those whose scale is a `Kronecker` are in its space. Gradients that are best formed at once
  are, unless factors themselves are wanted.
  """
  examples, times = interface.joined(batch)
  proven = prove(model, examples.x)
  tape = tf.GradientTape(watch_accessed_variables=False)
  recorder = tracing.Recorder(tracing.units(model), tape, times)
  with tape:
    outputs = recorder.run(model, examples.x)
    with tracing.no_reads(model):
      losses = loss(examples.y, outputs, examples.sample_weight)
    losses = interface.of_records(losses, batch)
  cotangents = tape.gradient(losses, [record.taps for record in recorder.records])
  keys = [compat.variable_key(v) for v in model.trainable_variables]
  reached = terms(recorder.records, proven, cotangents, dict(zip(keys, scale)), formed)
  per_variable = [reached.get(key) for key in keys]
  return per_variable, interface.divided(outputs, batch), losses


def terms(
    records: Any, proven: Any, cotangents: Sequence[Any],
    scales: Mapping[Any, Any] = types.MappingProxyType({}),
    formed: bool = True) -> Dict[Any, protocol.Factor]:
  """The factor of every variable of recorded calls that the cotangents reach, by variable key.

  Each is in the space of its entry of `scales`, where that is a `Kronecker`.
  Nothing is formed of a layer's inputs before its cotangents are there: it would be kept
  through the backward pass, of all layers at once.
  """
  parts: Dict[Any, List[protocol.Factor]] = {}
  batched = tracing.batched_as_proven(records, proven)
  for record, flags, of_taps in zip(records, batched, cotangents):
    taps, of_taps = tf.nest.flatten(record.taps), tf.nest.flatten(of_taps)
    if all(e is None for e in of_taps):
      continue
    of_taps = tf.nest.pack_sequence_as(record.taps, [
        tf.zeros_like(t) if e is None else tf.convert_to_tensor(e) for t, e in zip(taps, of_taps)])
    with tf.control_dependencies(tf.nest.flatten(of_taps)):
      for key, factor in tracing.factors_of(record, flags, of_taps):
        parts.setdefault(key, []).append(factor)
  per_variable = {}
  for key, several in parts.items():
    with tf.control_dependencies(protocol.tensors(tuple(several))):
      factor = _into(several[0] if len(several) == 1 else rows.add(several), scales.get(key))
      assert factor is not None
      per_variable[key] = factor.simplified() if formed else factor
  return per_variable


def _weights(
    asks: Tuple[contract.Ask, ...], parts: Tuple[projection.Part, ...], norms: Any,
    mask: tf.Tensor) -> List[tf.Tensor]:
  """[n] per part: weights of the records, times the part's scale.

  Zero for padding and where a norm is not finite, be it that of another group.
  """
  finite = [mask for _ in asks]
  for part, norm in zip(parts, norms):
    finite[part.ask] &= tf.math.is_finite(norm)
  weights = []
  for part, norm in zip(parts, norms):
    scale = 1.0 if trees.absent(part.scale) else tf.cast(part.scale, norm.dtype)
    factor = projection.weight_of(
        asks[part.ask].weight, norm * scale, tf.cast(part.clip, norm.dtype))
    weights.append(tf.where(finite[part.ask], factor * scale, tf.zeros_like(norm)))
  return weights


def _by_group(
    asks: Tuple[contract.Ask, ...], parts: Tuple[projection.Part, ...],
    norms: Any) -> List[List[tf.Tensor]]:
  """The norms of each ask's groups, in its geometry."""
  of_asks: List[List[tf.Tensor]] = [[] for _ in asks]
  for part, norm in zip(parts, norms):
    scale = 1.0 if trees.absent(part.scale) else tf.cast(part.scale, norm.dtype)
    of_asks[part.ask].append(norm * scale)
  return of_asks


def _rider(
    rider: Optional[contract.Rider], norm: tf.Tensor, clip: tf.Tensor, mask: tf.Tensor,
    variables: Sequence[compat.Variable], by_group: Any, clips: Any) -> Any:
  """Sums the additional values over records, without padding."""
  if rider is None:
    return ()
  if rider.of_groups:
    numbers = rider.of_norm(
        tf.stack(by_group, -1), tf.stack([tf.cast(one, norm.dtype) for one in clips]))
  else:
    numbers = rider.of_norm(norm, tf.cast(clip, norm.dtype))
  keep = (tf.math.is_finite(norm) & mask)[:, tf.newaxis]
  return tf.cast(tf.reduce_sum(tf.where(keep, numbers, tf.zeros_like(numbers)), 0),
                 trees.wide(tf.as_dtype(variables[0].dtype)))


def _sums(
    variables: Sequence[compat.Variable], per_variable: Sequence[Optional[protocol.Factor]],
    asks: Tuple[contract.Ask, ...], scales: Any, parts: Tuple[projection.Part, ...],
    weights: Any, sizes: Any) -> Tuple[contract.Sums, ...]:
  """Returns one scaled `contract.Sums` per ask."""
  totals: List[List[tf.Tensor]] = [[] for _ in asks]
  squares: List[List[tf.Tensor]] = [[] for _ in asks]
  squared = [i for i, ask in enumerate(asks) if ask.second and ask.second.per_record_square]
  for k, (variable, factor, size) in enumerate(zip(variables, per_variable, sizes)):
    of_asks = [scale[k] for scale in scales]
    if factor is None:
      zeros = tf.zeros(variable.shape, trees.wide(tf.as_dtype(variable.dtype)))
      per_ask, of_squares = [zeros] * len(asks), [zeros] * len(squared)
    else:
      sized = [weight * size for weight, part in zip(weights, parts) if k in part.leaves]
      per_ask = [total if trees.absent(scale) else scale * total
                 for total, scale in zip(factor.weighted_sums(sized), of_asks)]
      of_squares = factor.squared_sums(
          [sized[i] for i in squared], [of_asks[i] for i in squared]) if squared else []
    for i, total in enumerate(per_ask):
      totals[i].append(total)
    for i, square in zip(squared, of_squares):
      squares[i].append(square)
  return tuple(contract.Sums(total, square if i in squared else ())
               for i, (total, square) in enumerate(zip(totals, squares)))


def _per_variable(scale: trees.Tree, variables: Sequence[compat.Variable]) -> List[Any]:
  return [()] * len(variables) if trees.absent(scale) else list(tf.nest.flatten(scale))


def _check_asks(asks: Tuple[contract.Ask, ...]) -> None:
  for ask in asks:
    if ask.projection != 'rescale':
      raise Unsupported(
          "`projection` must be 'rescale' for the book-keeping engine: other projections need the "
          f"gradient of every record. Received: projection={ask.projection!r}. Use "
          "performance=tfdp.Performance('auto'), or 'layered'.")


def prove(model: compat.Model, x: Any) -> tracing.Proof:
  """`tracing.probe`, once per model and kind of input."""
  specs = tf.nest.map_structure(
      lambda t: tf.TensorSpec([None] + list(t.shape[1:]), t.dtype), x)
  trainable = tuple(compat.variable_key(v) for v in model.trainable_variables)
  key = (trainable, str(specs))
  proven = _PROVEN.setdefault(model, {})
  if key not in proven:
    proven[key] = tracing.probe(model, specs)
  return proven[key]


# Norms below leave room for the squares and products they are made of.
MODERATE = 2.0**56


def checked(norms: Any, per_variable: Sequence[Any], scales: Any) -> Tuple[Any, Any, Any]:
  """The same records, whatever their size.

  Args:
    norms: One [n] per ask, from the factors.
    per_variable: The factor of every variable, or None.
    scales: For every norm, the scale of every variable; None for one that it is not of.

  Returns:
    `(norms, per_variable, sizes)`: norms that are not finite where a record counts as none;
    factors that are finite; and for each an [n] float64 by which it is to be multiplied.
  """
  present = [i for i, factor in enumerate(per_variable) if factor is not None]
  before = [per_variable[i] for i in present]
  ones = tf.ones_like(norms[0])
  if not present:
    return norms, per_variable, [ones] * len(per_variable)

  moderate = tf.reduce_all(tf.stack(norms) < MODERATE)  # False where NaN.

  def measured() -> tf.Tensor:
    units, sizes = zip(*[factor.unit() for factor in before])
    return tf.stack([_parts(units, sizes, [of_ask[i] for i in present]) for of_ask in scales])

  # In a condition of its own: XLA would form each part again for all that is made of it.
  parts = tf.cond(
      moderate, lambda: tf.zeros([len(scales), len(present), tf.shape(ones)[0]], ones.dtype),
      measured)

  def carefully() -> Tuple[Any, Any, Any]:
    units, sizes = zip(*[factor.unit() for factor in before])
    values = _tensors(units)
    largest = tf.cast(min(t.dtype.max for t in values if t.dtype.is_floating), tf.float64)
    # Beyond the largest number the gradient itself overflows: no record.
    fits = tf.reduce_all(tf.stack(sizes) <= largest, 0)
    again = _norms(parts)
    again = tf.where(fits & (again <= largest), again, float('inf'))
    # 0 * inf is not 0: what is finite for no ask leaves the products, too.
    finite = tf.reduce_any(tf.math.is_finite(again), 0)
    kept = lambda t: tf.where(_like(finite, t), t, tf.zeros_like(t))
    return tf.unstack(again), [kept(size) for size in sizes], [kept(t) for t in values]

  norms, sizes, values = tf.cond(
      moderate, lambda: (norms, [ones] * len(present), _tensors(before)), carefully)
  per_variable, all_sizes, values = list(per_variable), [ones] * len(per_variable), iter(values)
  for i, factor, size in zip(present, before, sizes):
    per_variable[i] = protocol.rebuilt(factor, [next(values) for _ in protocol.tensors(factor)])
    all_sizes[i] = size
  return norms, per_variable, all_sizes


def charged(
    asks: Tuple[contract.Ask, ...], norms: Any, per_variable: Sequence[Any], sizes: Any,
    scales: Any) -> Any:
  """Returns norms for weights that may exceed one, at least the rounding error.

  Such a weight brings a short record up, and the sum adds its steps up again in another
  order. Norms of records whose steps do not cancel are what they were.
  """
  growing = [ask.weight.may_grow for ask in asks]
  if not any(growing):
    return norms
  present = [i for i, factor in enumerate(per_variable) if factor is not None]
  peaks = {i: per_variable[i].unit()[1] * sizes[i] for i in present}
  result = []
  for norm, of_ask, grows in zip(norms, scales, growing):
    for i in [i for i in present if of_ask[i] is not None] if grows else ():
      rounding = _rounding(per_variable[i]) * math.prod(per_variable[i].shape)**0.5
      smallest = 1.0 if trees.absent(of_ask[i]) else protocol.wide(tf.reduce_min(of_ask[i]))
      norm = tf.maximum(norm, rounding * smallest * peaks[i])
    result.append(norm)
  return result


def _rounding(factor: protocol.Factor) -> float:
  """Relative, of the coarsest of its tensors."""
  dtype = min((t.dtype for t in protocol.tensors(factor) if t.dtype.is_floating),
              key=lambda one: one.size)
  return protocol.eps(dtype)


def _tensors(some: Iterable[protocol.Factor]) -> List[tf.Tensor]:
  return [t for factor in some for t in protocol.tensors(factor)]


def _like(x: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
  return tf.reshape(x, [-1] + [1] * (tensor.shape.rank - 1))


def _parts(units: Any, sizes: Any, scales: Any) -> tf.Tensor:
  """[factors, n] norms of factors times sizes in a geometry.

  Steps may cancel, and what rounding leaves of them is not less than rounding: a
  weight must not bring back up what the sum adds up again, in another order.
  """
  parts = []
  for factor, size, scale in zip(units, sizes, scales):
    if scale is None:
      parts.append(tf.zeros_like(size))
      continue
    rounding = 1.0
    if not trees.absent(scale):
      top = tf.reduce_max(scale)
      top = tf.where(top > 0, top, tf.ones_like(top))
      scale, size = scale / top, size * protocol.wide(top)
      rounding = protocol.wide(tf.reduce_min(scale))
    square, = factor.squared_norms([scale])
    rounding *= _rounding(factor)
    parts.append(size * tf.maximum(tf.sqrt(square), rounding))
  return tf.stack(parts)


def _norms(parts: tf.Tensor) -> tf.Tensor:
  """[asks, n] norms of records, from those [asks, factors, n] of their parts."""
  top = tf.reduce_max(parts, 1, keepdims=True)
  top = tf.where(top > 0, top, tf.ones_like(top))
  return top[:, 0] * tf.sqrt(tf.reduce_sum(tf.square(parts / top), 1))
