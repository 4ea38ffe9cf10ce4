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

import types
from typing import Any, Dict, List, Mapping, MutableMapping, Optional, Sequence, Tuple
import weakref

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factored_sums
from tfdp_adaptive.clipping import interface
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
  scales = [factored_sums.scales_of(query.scale, variables) for query in request.queries]
  alone = scales[0] if len(scales) == 1 else []
  per_variable, outputs, losses = factors_of(model, loss, batch, alone)
  interface.name_silent(model, per_variable)
  answers = [
      factored_sums.clip_factors(
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
