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

The sums equal those of `projection.project_record` but for rounding.
"""

import types
from typing import Any, Dict, List, Mapping, MutableMapping, Optional, Sequence, Tuple
import weakref

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import blocks
from tfdp_adaptive.clipping import groups
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import overflow
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping import tied
from tfdp_adaptive.clipping import tracing
from tfdp_adaptive.clipping import weights as weights_lib
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
  """A factor with the sides of a `Kronecker` in it; others as they are."""
  if factor is None or not isinstance(scale, contract.Kronecker):
    return factor
  return factor.transformed(scale)


def _clipped(
    variables: Sequence[compat.Variable], per_variable: Sequence[Optional[protocol.Factor]],
    outputs: Any, losses: tf.Tensor, mask: tf.Tensor, request: interface.Request,
    scales: Any) -> interface.Clipped:
  """Clips what the factors are of, those of a `Kronecker` being in its space already."""
  asks, queries, clips = request
  parts = groups.parts(asks, queries, clips, len(variables))
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
  norms, per_variable, sizes = overflow.checked(norms, per_variable, scales)
  weights = _weights(asks, parts, overflow.charged(
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
    with tf.control_dependencies(blocks.tensors(tuple(several))):
      factor = _into(tied.add(several), scales.get(key))
      assert factor is not None
      per_variable[key] = factor.simplified() if formed else factor
  return per_variable


def _weights(
    asks: Tuple[contract.Ask, ...], parts: Tuple[groups.Part, ...], norms: Any,
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
    factor = weights_lib.factor(
        asks[part.ask].weight, norm * scale, tf.cast(part.clip, norm.dtype))
    weights.append(tf.where(finite[part.ask], factor * scale, tf.zeros_like(norm)))
  return weights


def _by_group(
    asks: Tuple[contract.Ask, ...], parts: Tuple[groups.Part, ...],
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
  """Sum over records of the numbers that ride along; nothing for padding."""
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
    asks: Tuple[contract.Ask, ...], scales: Any, parts: Tuple[groups.Part, ...],
    weights: Any, sizes: Any) -> Tuple[contract.Sums, ...]:
  """One `contract.Sums` per ask, scaled."""
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
          f"gradient of every record. Received: projection={ask.projection!r}. Use engine='auto', "
          "or 'layered'.")


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
