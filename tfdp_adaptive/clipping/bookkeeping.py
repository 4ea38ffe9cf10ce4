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
gradients, but the squares of their norms are not finite. In batches with such records, the factors
are brought to the size of one, example by example, before their norms are computed.
"""

import math
import types
from typing import Any, Dict, Iterator, List, Mapping, MutableMapping, Optional, Sequence, Tuple
import weakref

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
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
_DISTRUSTED: MutableMapping[Any, str] = weakref.WeakKeyDictionary()  # Model -> why.


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
  if model in _DISTRUSTED:
    return False, _DISTRUSTED[model]
  try:
    _check_asks(asks)
    tracing.units(model) if x is None else prove(model, x)
  except Unsupported as error:
    return False, str(error)
  return True, ''


def distrust(model: compat.Model, reason: str) -> None:
  """Has `supports` refuse a model whose gradients were found to be wrong."""
  _DISTRUSTED[model] = reason


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
  together = len(asks) == 1 or not geometry.is_kronecker(scales)
  per_variable, outputs, losses = factors_of(model, loss, batch, scales[0] if together else ())
  interface.name_silent(model, per_variable)
  if together:
    return _clipped(variables, per_variable, outputs, losses, batch.mask, request, scales)
  answers = [
      _clipped(variables, [_into(factor, leaf) for factor, leaf in zip(per_variable, scale)],
               outputs, losses, batch.mask, interface.Request(*[(one,) for one in of_ask]), [scale])
      for scale, *of_ask in zip(scales, *request)]
  return interface.Clipped(
      tuple(answer.sums[0] for answer in answers), outputs, losses,
      tuple(answer.norms[0] for answer in answers), interface.masks(outputs))


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
  bundles, per_bundle = factors.bundled(per_variable, [
      (*(i in part.leaves for part in parts), *(trees.absent(scale[i]) for scale in of_asks))
      for i in range(len(variables))])
  of_asks = [factors.flat(scale, bundles) for scale in of_asks]
  scales = [[scale if first in part.leaves else None
             for scale, (first, *_) in zip(of_asks[part.ask], bundles)] for part in parts]
  norms, per_bundle, sizes = norms_of(
      per_bundle, scales, tf.zeros(tf.shape(losses), tf.float64))
  weights = _weights(asks, parts, charged(
      tuple(asks[part.ask] for part in parts), norms, per_bundle, sizes, scales), mask)
  by_group = _by_group(asks, parts, norms)
  norms = [own[0] if len(own) == 1 else tf.sqrt(tf.add_n([tf.square(norm) for norm in own]))
           for own in by_group]
  by_variable = lambda totals: factors.apart(totals, bundles, variables)
  sums = tuple(
      contract.Sums(by_variable(total), squares if trees.absent(squares) else by_variable(squares),
                    _side_sum(ask.side_query, norm, clip, mask, variables, own, [
                        part.clip for part in parts if part.ask == i]))
      for i, ((total, squares), ask, norm, clip, own) in enumerate(zip(
          _sums(per_bundle, asks, of_asks, scales, parts, weights, sizes), asks, norms, clips,
          by_group)))
  return interface.Clipped(sums, outputs, losses, tuple(norms), interface.masks(outputs))


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
        if factor is not None:
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
    factor = asks[part.ask].weight.factor(norm * scale, tf.cast(part.clip, norm.dtype))
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


def _side_sum(
    side: Optional[contract.SideQuery], norm: tf.Tensor, clip: tf.Tensor, mask: tf.Tensor,
    variables: Sequence[compat.Variable], by_group: Any, clips: Any) -> Any:
  """Sums the additional values over records, without padding."""
  if side is None:
    return ()
  numbers = projection.side_values(side, norm, clip, by_group, clips)
  keep = (tf.math.is_finite(norm) & mask)[:, tf.newaxis]
  return tf.cast(tf.reduce_sum(tf.where(keep, numbers, tf.zeros_like(numbers)), 0),
                 trees.wide(tf.as_dtype(variables[0].dtype)))


def _sums(
    per_bundle: Sequence[Optional[protocol.Factor]], asks: Tuple[contract.Ask, ...], of_asks: Any,
    scales: Any, parts: Tuple[projection.Part, ...], weights: Any,
    sizes: Any) -> List[Tuple[Any, Any]]:
  """`(totals, squares)` per ask, scaled, by bundle; None where a factor is."""
  totals: List[Any] = [[] for _ in asks]
  squared = [i for i, ask in enumerate(asks) if ask.second and ask.second.per_record_square]
  squares: List[Any] = [[] if i in squared else () for i in range(len(asks))]
  for b, (factor, size) in enumerate(zip(per_bundle, sizes)):
    own = [scale[b] for scale in of_asks]
    per_ask, of_squares = [None] * len(asks), [None] * len(squared)
    if factor is not None:
      sized = [weight * size for weight, scale in zip(weights, scales) if scale[b] is not None]
      per_ask = [total if trees.absent(scale) else scale * total
                 for total, scale in zip(factor.weighted_sums(sized), own)]
      of_squares = factor.squared_sums(
          [sized[i] for i in squared], [own[i] for i in squared]) if squared else []
    for into, one in [*zip(totals, per_ask), *zip([squares[i] for i in squared], of_squares)]:
      into.append(one)
  return list(zip(totals, squares))


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


# Products of squared sums below this bound neither overflow nor lose terms to underflow.
MODERATE = 2.0**80


def norms_of(
    per_variable: Sequence[Optional[protocol.Factor]], scales: Any,
    zeros: tf.Tensor) -> Tuple[Any, Any, Any]:
  """The norms of records, whatever their size, and factors that can be summed.

  If any number is too large for squares and products, factors and scales are divided by their
  largest numbers beforehand, those of each record by its own.

  Args:
    per_variable: The factor of every variable, or None.
    scales: For every norm, the scale of every variable; None for one that it is not of.
    zeros: [n] float64.

  Returns:
    `(norms, per_variable, sizes)`: norms that are not finite where a record counts as none;
    factors that are finite; and for each an [n] float64 by which it is to be multiplied.
  """
  before = {i: factor for i, factor in enumerate(per_variable) if factor is not None}
  ones = tf.ones_like(zeros)
  if not before:
    return [zeros for _ in scales], per_variable, [ones for _ in per_variable]
  own = _distinct(scale for of_norm in scales for scale in of_norm)
  values = [t for factor in before.values() for t in protocol.tensors(factor)]
  floating = [t for t in values if t.dtype.is_floating]
  largest = min(t.dtype.max for t in floating)
  squares = iter(tf.unstack(1 + 2 * tf.stack([
      protocol.wide(tf.nn.l2_loss(t)) for t in floating])))
  bounds = [_bound(factor, _distinct(of_norm[i] for of_norm in scales), squares)
            for i, factor in before.items()]

  def as_they_are() -> Tuple[Any, ...]:
    return (values, tf.stack([ones for _ in before]), list(own.values()),
            [tf.ones([], tf.float64) for _ in own], tf.ones_like(zeros, tf.bool))

  def divided() -> Tuple[Any, ...]:
    units, peaks = zip(*[factor.unit() for factor in before.values()])
    sizes = tf.stack(peaks)
    good = sizes <= largest  # Beyond it, the gradient itself overflows: no record.
    tops = [protocol.peak(scale, 0) for scale in own.values()]
    return (protocol.tensors(units), tf.where(good, sizes, 0),
            [protocol.divided(*pair) for pair in zip(own.values(), tops)],
            [tf.reshape(protocol.wide(top), []) for top in tops], tf.reduce_all(good, 0))

  values, peaks, divided_scales, tops, fits = tf.cond(
      tf.reduce_all(tf.stack(bounds) < MODERATE), as_they_are, divided)
  own = dict(zip(own, zip(divided_scales, tops)))
  values, per_variable = iter(values), list(per_variable)
  sizes, totals = [ones for _ in per_variable], [[zeros] for _ in scales]
  for (i, factor), size, square_size in zip(
      before.items(), tf.unstack(peaks), tf.unstack(tf.square(peaks))):
    unit = protocol.rebuilt(factor, [next(values) for _ in protocol.tensors(factor)])
    per_variable[i], sizes[i] = unit, size
    norms = [p for p, of_norm in enumerate(scales) if of_norm[i] is not None]
    pairs = [own.get(id(scales[p][i]), ((), ())) for p in norms]
    # One after the other: each may square scales as large as its variable.
    with tf.control_dependencies([*protocol.tensors(unit), *(total[-1] for total in totals)]):
      squares = unit.squared_norms([one for one, _ in pairs])
    for p, (_, top), square in zip(norms, pairs, squares):
      square *= square_size
      totals[p].append(square if trees.absent(top) else square * tf.square(top))
  norms = [tf.sqrt(tf.add_n(total)) for total in totals]
  return [tf.where(fits & (norm <= largest), norm, float('inf'))
          for norm in norms], per_variable, sizes


def _distinct(scales: Iterator[Any]) -> Dict[int, tf.Tensor]:
  """Returns the scales that are tensors, by id."""
  return {id(scale): scale for scale in scales if scale is not None and not trees.absent(scale)}


def _bound(
    factor: protocol.Factor, scales: Dict[int, tf.Tensor],
    squares: Iterator[tf.Tensor]) -> tf.Tensor:
  """[] float64, no less than any product of squares on the way to a norm; not finite for NaN."""
  tops = [tf.square(protocol.wide(tf.reduce_max(scale))) for scale in scales.values()]
  bound = 1 + sum((top + 1 / top for top in tops), tf.zeros([], tf.float64))
  for tensor in protocol.tensors(factor):
    if tensor.dtype.is_floating:
      bound *= next(squares)
  return bound


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
      rounding = protocol.rounding(per_variable[i]) * math.prod(per_variable[i].shape)**0.5
      smallest = 1.0 if trees.absent(of_ask[i]) else protocol.wide(tf.reduce_min(of_ask[i]))
      norm = tf.maximum(norm, rounding * smallest * peaks[i])
    result.append(norm)
  return result
