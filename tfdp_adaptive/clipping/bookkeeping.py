# SPDX-License-Identifier: Apache-2.0
"""The book-keeping engine: clips scaled gradients at about the cost of one gradient.

One forward and one backward pass give, for every layer, its inputs and the gradient of each
example's loss by its output. From these follow the norm of each example, its weight, and the
weighted sums, without a second backward pass and without a gradient per example of the whole model
(Li et al. 2021, ghost clipping; Bu et al. 2022, book-keeping). With a diagonal geometry `S`, the
norm is `||S * (a e')||^2 = (a^2)' S^2 (e^2)`. Matrices on either side of a variable go into the
factors, `A (a e') G' = (A a) (G e)'`, so that norms and sums have the same rounding.

The sums equal those of `projection.project_record` up to rounding.
"""

import collections
import math
import types
from typing import Any, Dict, Hashable, List, Mapping, MutableMapping, Optional, Sequence, Tuple
import weakref

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
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
# Model -> {input signature: proof}.
_PROVEN: MutableMapping[compat.Model, Dict[Any, tracing.Proof]] = weakref.WeakKeyDictionary()
_DISTRUSTED: MutableMapping[compat.Model, str] = weakref.WeakKeyDictionary()  # Model -> reason.


def supports(
    model: compat.Model, x: trees.Tree = None,
    asks: Tuple[contract.Ask, ...] = ()) -> Tuple[bool, str]:
  """Returns whether the engine can clip this model.

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
    tracing.owners(model) if x is None else prove(model, x)
  except Unsupported as error:
    return False, str(error)
  return True, ''


def distrust(model: compat.Model, reason: str) -> None:
  """Makes `supports` return False for a model whose gradients were found to be wrong."""
  _DISTRUSTED[model] = reason


def engine(
    model: compat.Model, loss: interface.Loss, batch: interface.Batch,
    request: interface.Request) -> interface.Clipped:
  """Returns the clipped sums, exact in the scaled geometry; see `interface`.

  Args:
    model: A built Keras model.
    loss: `(y, outputs, sample_weight) -> [n]`, the loss of each example.
    batch: `interface.Batch`; a record of several examples is clipped as one, by folding.
    request: `interface.Request`, of asks with `projection='rescale'`.

  Returns:
    `interface.Clipped`, whose sums are lists like `model.trainable_variables`.

  Raises:
    Unsupported: If a layer cannot be recorded or an ask needs whole gradients.
  """
  _check_asks(request.asks)
  variables = model.trainable_variables
  scales = [scales_of(query.scale, variables) for query in request.queries]
  alone = scales[0] if len(scales) == 1 else []
  per_variable, outputs, losses = factors_of(model, loss, batch, alone)
  interface.name_silent(model, per_variable)
  answers = [
      clip_factors(
          variables, per_variable if alone else list(map(_into, per_variable, scale)),
          batch.mask, ask, query, clip)
      for scale, ask, query, clip in zip(scales, *request)]
  sums, norms = zip(*answers)
  return interface.Clipped(sums, outputs, losses, norms, interface.masks(outputs))


def _into(factor: Optional[protocol.Factor], scale: trees.Leaf) -> Optional[protocol.Factor]:
  """Returns a factor multiplied by the sides of a `Kronecker`; other factors unchanged."""
  if factor is None or not isinstance(scale, contract.Kronecker):
    return factor
  return factor.transformed(scale)


def factors_of(
    model: compat.Model, loss: interface.Loss, batch: interface.Batch,
    scale: Sequence[trees.Leaf] = (), formed: bool = True,
    ) -> Tuple[List[Optional[protocol.Factor]], trees.Tree, tf.Tensor]:
  """Returns `(factors, outputs, losses)`: a factor per trainable variable, None if not reached.

  See `terms` for `scale` and `formed`.
  """
  examples, times = interface.joined(batch)
  proof = prove(model, examples.x)
  recorder = tracing.Recorder(tracing.owners(model), times)
  with recorder.tape:
    outputs = recorder.run(model, examples.x)
    with tracing.no_reads(model):
      losses = loss(examples.y, outputs, examples.sample_weight)
    losses = interface.of_records(losses, batch)
  cotangents = recorder.tape.gradient(losses, [call.taps for call in recorder.calls])
  keys = [compat.variable_key(v) for v in model.trainable_variables]
  reached = terms(
      tracing.as_proven(recorder.calls, proof), cotangents, dict(zip(keys, scale)), formed)
  return [reached.get(key) for key in keys], interface.divided(outputs, batch), losses


def terms(
    calls: Sequence[registry.Call], cotangents: Sequence[trees.Tree],
    scales: Mapping[int, trees.Leaf] = types.MappingProxyType({}),
    formed: bool = True) -> Dict[int, protocol.Factor]:
  """Returns the factors of recorded calls that the cotangents reach, by variable key.

  The computation of a layer's factors waits for its cotangents. Otherwise the results of all layers
  would stay in memory through the backward pass.

  Args:
    calls: The recorded calls of owners.
    cotangents: The gradients by the taps of each call.
    scales: By variable key; a factor is in the space of its scale if that is a `Kronecker`.
    formed: Whether to form the gradients that are best formed at once.
  """
  parts: Dict[int, List[protocol.Factor]] = {}
  for call, by_taps in zip(calls, cotangents):
    taps, by_taps = tf.nest.flatten(call.taps), tf.nest.flatten(by_taps)
    if all(e is None for e in by_taps):
      continue
    by_taps = tf.nest.pack_sequence_as(call.taps, [
        tf.zeros_like(t) if e is None else tf.convert_to_tensor(e) for t, e in zip(taps, by_taps)])
    with tf.control_dependencies(tf.nest.flatten(by_taps)):
      for key, factor in tracing.factors_of(call, by_taps):
        if factor is not None:
          parts.setdefault(key, []).append(factor)
  per_variable = {}
  for key, several in parts.items():
    with tf.control_dependencies(protocol.tensors(tuple(several))):
      factor = _into(several[0] if len(several) == 1 else rows.add(several), scales.get(key))
      assert factor is not None
      per_variable[key] = factor.simplified() if formed else factor
  return per_variable


def _check_asks(asks: Tuple[contract.Ask, ...]) -> None:
  for ask in asks:
    if ask.projection != 'rescale':
      raise Unsupported(
          "`projection` must be 'rescale' for the book-keeping engine: other projections need the "
          f"gradient of every record. Received: projection={ask.projection!r}. Use "
          "performance=tfdp.Performance('auto'), or 'layered'.")


def prove(model: compat.Model, x: trees.Tree) -> tracing.Proof:
  """Calls `tracing.probe`, once per model and kind of input."""
  specs = tf.nest.map_structure(
      lambda t: tf.TensorSpec([None] + list(t.shape[1:]), t.dtype), x)
  trainable = tuple(compat.variable_key(v) for v in model.trainable_variables)
  key = (trainable, str(specs))
  proven = _PROVEN.setdefault(model, {})
  if key not in proven:
    proven[key] = tracing.probe(model, specs)
  return proven[key]


# From factors and scales to sums and norms. Some records have finite gradients, but the squares of
# their norms are not finite. In batches with such records, the factors of each example are divided
# by their size before their norms are computed.

# If at least `MANY` variables have at most `SMALL` numbers, they are clipped in bundles of about
# `FULL` numbers. Copying more takes longer than it saves, and the gradients of a bundle are in
# memory twice at first.
MANY, SMALL, FULL = 8, 2**12, 2**15
Bundle = Tuple[int, ...]  # Positions of variables; most bundles have one.
# Products of squared sums below this bound neither overflow nor lose terms to underflow.
MODERATE = 2.0**80


def clip_factors(
    variables: Sequence[compat.Variable], per_variable: Sequence[Optional[protocol.Factor]],
    mask: tf.Tensor, ask: contract.Ask, query: contract.Query,
    clip: trees.Scalar) -> Tuple[contract.Sums, tf.Tensor]:
  """Clips the gradients of records; returns their sums for one ask, and their norms.

  The factors of variables whose scale is a `Kronecker` must be in its space already.
  """
  parts = projection.parts(ask, query, clip, len(variables))
  scales = [() if isinstance(leaf, contract.Kronecker) else leaf
            for leaf in scales_of(query.scale, variables)]
  part_of = {leaf: k for k, part in enumerate(parts) for leaf in part.leaves}
  bundles, per_bundle = bundled(
      per_variable, [(part_of[i], trees.absent(scale)) for i, scale in enumerate(scales)])
  scales = flat(scales, bundles)
  groups = [part_of[first] for first, *_ in bundles]
  norms, per_bundle, sizes = norms_of(
      per_bundle, scales, tf.zeros_like(mask, tf.float64), groups)

  finite, weights = mask, []
  charged = _charged(ask, norms, per_bundle, sizes, scales, groups)
  for norm in charged:  # A record is left out if any of its groups is not finite.
    finite &= tf.math.is_finite(norm)
  for part, norm in zip(parts, charged):
    weight = ask.weight.factor(part.scaled(norm), tf.cast(part.clip, norm.dtype))
    weights.append(tf.where(finite, part.scaled(weight), tf.zeros_like(norm)))

  totals: List[Optional[tf.Tensor]] = [None] * len(bundles)
  squares: List[Optional[tf.Tensor]] = [None] * len(bundles)
  for b, (factor, size, scale, k) in enumerate(zip(per_bundle, sizes, scales, groups)):
    if factor is not None:
      weight = weights[k] * size
      total = factor.weighted_sum(weight)
      totals[b] = total if trees.absent(scale) else scale * total
      squares[b] = factor.squared_sum(weight, scale) if ask.squares else None

  by_group = [part.scaled(norm) for part, norm in zip(parts, norms)]
  norm = by_group[0] if len(parts) == 1 else tf.sqrt(tf.add_n(list(map(tf.square, by_group))))
  side: Any = ()
  if ask.side_query is not None:
    values = projection.side_values(
        ask.side_query, norm, clip, by_group, [part.clip for part in parts])
    counted = (tf.math.is_finite(norm) & mask)[:, tf.newaxis]
    side = tf.cast(tf.reduce_sum(tf.where(counted, values, tf.zeros_like(values)), 0),
                   trees.wide(tf.as_dtype(variables[0].dtype)))
  return contract.Sums(
      apart(totals, bundles, variables),
      apart(squares, bundles, variables) if ask.squares else (), side), norm


def scales_of(scale: trees.Tree, variables: Sequence[compat.Variable]) -> List[trees.Leaf]:
  return [()] * len(variables) if trees.absent(scale) else list(tf.nest.flatten(scale))


def norms_of(
    per_variable: Sequence[Optional[protocol.Factor]], scales: Sequence[trees.Tree],
    zeros: tf.Tensor, groups: Sequence[int] = ()) -> Tuple[
        List[tf.Tensor], List[Optional[protocol.Factor]], List[tf.Tensor]]:
  """Computes the norms of records, whatever their size, and factors that can be summed.

  If any number is too large for squares and products, factors and scales are divided by their
  largest numbers beforehand, those of each record by its own.

  Args:
    per_variable: The factor of every variable, or None.
    scales: The scale of every variable.
    zeros: [n] float64.
    groups: The group of every variable, from 0. By default, all are one group.

  Returns:
    `(norms, per_variable, sizes)`: for every group [n] norms, not finite for records to leave out;
    factors that are finite; and for each factor an [n] float64 by which to multiply it.
  """
  groups = groups or [0] * len(per_variable)
  totals: List[List[tf.Tensor]] = [[zeros] for _ in range(max(groups, default=0) + 1)]
  present = {i: factor for i, factor in enumerate(per_variable) if factor is not None}
  ones, result = tf.ones_like(zeros), list(per_variable)
  sizes = [ones for _ in per_variable]
  if not present:
    return [zeros for _ in totals], result, sizes
  own = {i: scales[i] for i in present if not trees.absent(scales[i])}
  values = protocol.tensors(tuple(present.values()))
  floating = [t for t in values if t.dtype.is_floating]
  largest = min(t.dtype.max for t in floating)
  squares = iter(tf.unstack(1 + 2 * tf.stack([
      protocol.wide(tf.nn.l2_loss(t)) for t in floating])))
  bounds = []  # Upper bounds of all products of squares on the way to a norm; not finite for NaN.
  for i, factor in present.items():
    bound = tf.ones([], tf.float64)
    if i in own:
      top = tf.square(protocol.wide(tf.reduce_max(own[i])))
      bound += top + 1 / top
    for tensor in protocol.tensors(factor):
      bound = bound * next(squares) if tensor.dtype.is_floating else bound
    bounds.append(bound)

  def as_they_are() -> Tuple[Any, ...]:
    return (values, tf.stack([ones for _ in present]), list(own.values()),
            [tf.ones([], tf.float64) for _ in own], tf.ones_like(zeros, tf.bool))

  def divided() -> Tuple[Any, ...]:
    units, peaks = zip(*[factor.unit() for factor in present.values()])
    stacked = tf.stack(peaks)
    good = stacked <= largest  # Otherwise the gradient itself overflows.
    tops = [protocol.peak(scale, 0) for scale in own.values()]
    return (protocol.tensors(units), tf.where(good, stacked, 0),
            [protocol.divided(*pair) for pair in zip(own.values(), tops)],
            [tf.reshape(protocol.wide(top), []) for top in tops], tf.reduce_all(good, 0))

  values, peaks, divided_scales, tops, fits = tf.cond(
      tf.reduce_all(tf.stack(bounds) < MODERATE), as_they_are, divided)
  pairs = dict(zip(own, zip(divided_scales, tops)))
  values, last = iter(values), zeros
  for i, size, square_size in zip(present, tf.unstack(peaks), tf.unstack(tf.square(peaks))):
    unit = protocol.rebuilt(present[i], [next(values) for _ in protocol.tensors(present[i])])
    result[i], sizes[i] = unit, size
    scale, top = pairs.get(i, ((), ()))
    # One after the other, because each may square a scale as large as its variable.
    with tf.control_dependencies([*protocol.tensors(unit), last]):
      last = unit.squared_norm(scale)
    last *= square_size
    last = last if trees.absent(top) else last * tf.square(top)
    totals[groups[i]].append(last)
  norms = [tf.sqrt(tf.add_n(total)) for total in totals]
  return [tf.where(fits & (norm <= largest), norm, float('inf')) for norm in norms], result, sizes


def _charged(
    ask: contract.Ask, norms: List[tf.Tensor], per_variable: Sequence[Optional[protocol.Factor]],
    sizes: List[tf.Tensor], scales: Sequence[trees.Tree],
    groups: Sequence[int]) -> List[tf.Tensor]:
  """Returns norms for weights that may exceed one, at least the rounding error.

  Such a weight enlarges a short record, and the sum adds its steps in another order. Norms of
  records whose steps do not cancel remain the same.
  """
  norms = list(norms)
  for i, factor in enumerate(per_variable):
    if ask.weight.may_grow and factor is not None:
      rounding = protocol.rounding(factor) * math.prod(factor.shape)**0.5
      smallest = 1.0 if trees.absent(scales[i]) else protocol.wide(tf.reduce_min(scales[i]))
      peak = factor.unit()[1] * sizes[i]
      norms[groups[i]] = tf.maximum(norms[groups[i]], rounding * smallest * peak)
  return norms


def bundled(
    per_variable: Sequence[Optional[protocol.Factor]],
    kinds: Sequence[Hashable]) -> Tuple[List[Bundle], List[Optional[protocol.Factor]]]:
  """Returns `(bundles, factors)`: small whole gradients of a dtype and a kind are one factor.

  A model has a bias or a scale beside almost every matrix. Norms and sums take some fifty
  operations a variable, however small; a bundle takes them once.

  Args:
    per_variable: The factor of every variable, or None.
    kinds: Variables of different kinds are not bundled.
  """
  places: Dict[Hashable, List[int]] = {}
  numbers: Dict[Hashable, int] = collections.Counter()
  many = sum(map(_small, per_variable)) >= MANY
  for i, (factor, kind) in enumerate(zip(per_variable, kinds)):
    key: Hashable = i
    if many and isinstance(factor, factors.Explicit) and _small(factor):
      alike = factor.parts[0].dtype, kind
      key = alike, numbers[alike] // FULL
      numbers[alike] += math.prod(factor.shape)
    places.setdefault(key, []).append(i)
  bundles, bundled = [tuple(some) for some in places.values()], []
  for first, *others in bundles:
    several = [one for one in (per_variable[i] for i in (first, *others)) if one is not None]
    bundled.append(factors.explicit(tf.concat([
        tf.reshape(one.gradient(), [-1, math.prod(one.shape)]) for one in several
    ], 1)) if others else per_variable[first])
  return bundles, bundled


def _small(factor: Optional[protocol.Factor]) -> bool:
  return isinstance(factor, factors.Explicit) and math.prod(factor.shape) <= SMALL


def flat(scale: Sequence[trees.Tree], bundles: Sequence[Bundle]) -> List[trees.Tree]:
  """Turns the scales of variables into those of bundles, whose scales are all absent or none."""
  return [scale[first] if not others or trees.absent(scale[first]) else tf.concat([
      tf.reshape(scale[i], [-1]) for i in (first, *others)], 0) for first, *others in bundles]


def apart(
    totals: Sequence[Optional[tf.Tensor]], bundles: Sequence[Bundle],
    variables: Sequence[compat.Variable]) -> List[tf.Tensor]:
  """Turns the totals of bundles into those of variables; zeros where a total is None."""
  result: Dict[int, tf.Tensor] = {}
  for total, bundle in zip(totals, bundles):
    shapes = [variables[i].shape for i in bundle]
    if total is None:
      total = tf.zeros(shapes[0], trees.wide(tf.as_dtype(variables[bundle[0]].dtype)))
    elif len(bundle) > 1:
      total = tf.split(total, [math.prod(shape) for shape in shapes])
    result.update(zip(bundle, [total] if len(bundle) == 1 else map(tf.reshape, total, shapes)))
  return [result[i] for i in range(len(variables))]
