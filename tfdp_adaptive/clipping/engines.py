# SPDX-License-Identifier: Apache-2.0
"""Chooses the engine that clips a model's gradients, and gives it ids in range, in chunks.

Token ids out of range make their example count as no record, like a gradient that is not finite. On
a CPU such an id would abort the program, so that one record could stop a training.
"""

from typing import Any, List, MutableMapping, Tuple
import warnings
import weakref

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping import tracing
from tfdp_adaptive.clipping.layers import registry

ENGINES = ('auto', 'bookkeeping', 'layered', 'materialized', 'loop')
ENGINE = {
    'bookkeeping': bookkeeping.engine, 'layered': materialized.layered,
    'materialized': materialized.vectorized, 'loop': materialized.looped}


def decide(
    name: str, model: compat.Model, asks: Tuple[contract.Ask, ...],
    x: Any = None) -> Tuple[str, str]:
  """Returns `(name, reason)`: an engine, and why no faster one can be used.

  Args:
    name: One of `ENGINES`; 'auto' for the fastest that can do it.
    model: A built Keras model.
    asks: The rule's asks; projections other than rescaling need every record.
    x: Nest of inputs or their specs; without it only the structure is checked.

  Raises:
    ValueError: If the engine is unknown.
  """
  if name not in ENGINES:
    raise ValueError(f'`engine` must be one of {ENGINES}. Received: engine={name!r}.')
  if name in ('bookkeeping', 'layered'):
    return name, ''
  seen, reason = bookkeeping.supports(model, x)
  if name == 'auto' and seen:
    possible, reason = bookkeeping.supports(model, x, asks)
    return ('bookkeeping', '') if possible else ('layered', reason)
  if name == 'loop' or _must_loop(model):
    return 'loop', reason
  return 'materialized', reason


def choose(
    name: str, model: compat.Model, asks: Tuple[contract.Ask, ...], x: Any) -> interface.Engine:
  """Returns the engine of `decide`. Warns if 'auto' must use a slow one."""
  decided, reason = decide(name, model, asks, x)
  if name == 'auto' and decided != 'bookkeeping':
    how = 'layer by layer' if decided == 'layered' else 'for the whole model'
    warnings.warn(
        f'Gradients of single examples are formed {how}, which takes more time and memory than '
        f'book-keeping: {reason} See tfdp.explain_clipping(model).', errors.Caution,
        stacklevel=2)
  engine = guarded(ENGINE[decided])
  engine.name = decided  # type: ignore[attr-defined]
  return engine


def record_gradients(model: compat.Model, loss: interface.Loss, x: Any, y: Any) -> List[tf.Tensor]:
  """[n, ...] gradients of every example, a list like the trainable variables."""
  if bookkeeping.supports(model, x)[0]:
    return materialized.layered_gradients(model, loss, x, y)
  return materialized.record_gradients(model, loss, x, y, vectorize=not _must_loop(model))


def _must_loop(model: compat.Model) -> bool:
  """Whether vectorizing examples goes wrong.

  Recurrent layers have no vectorized gradient, and CPUs no convolution of volumes in groups.
  """
  return any(
      isinstance(layer, compat.keras.layers.RNN) or compat.vectorizes_wrongly(layer)
      or getattr(layer, 'groups', 1) > 1 and len(getattr(layer, 'kernel_size', ())) == 3
      for layer in model._flatten_layers())


def guarded(engine: interface.Engine) -> interface.Engine:
  """The same engine, which it holds as `engine`, given ids that its embeddings have."""

  def run(
      model: compat.Model, loss: interface.Loss, batch: interface.Batch,
      request: interface.Request) -> interface.Clipped:
    x, inside = in_range(model, interface.joined(batch)[0].x)
    if inside is None:
      return engine(model, loss, batch, request)
    if not trees.absent(batch.examples):
      inside = tf.reduce_all(interface.divided(inside, batch), 1)
    clipped = engine(model, loss, batch._replace(
        x=interface.divided(x, batch), mask=batch.mask & inside), request)
    return clipped._replace(norms=tuple(
        tf.where(inside, norm, tf.constant(float('inf'), norm.dtype)) for norm in clipped.norms))

  run.engine = engine  # type: ignore[attr-defined]
  return run


def in_range(model: compat.Model, x: Any) -> Tuple[Any, Any]:
  """`(x, inside)`: ids out of range replaced by zero, and [n] which examples had none.

  `inside` is None where no input is known to go to an embedding as it is.
  """
  try:
    rows = bookkeeping.prove(model, x).limits
  except registry.Unsupported:
    rows = tracing.traced_limits(model, x)
  flat, inside = tf.nest.flatten(x), None
  for i, limit in rows.items():
    above = flat[i] >= 0 if flat[i].dtype.is_integer else flat[i] > -1  # Its whole part counts.
    good = above & (flat[i] < tf.cast(limit, flat[i].dtype))
    flat[i] = tf.where(good, flat[i], tf.zeros_like(flat[i]))
    good = tf.reduce_all(good, list(range(1, good.shape.rank)))
    inside = good if inside is None else inside & good
  return tf.nest.pack_sequence_as(x, flat), inside


SEEN: MutableMapping[Any, Any] = weakref.WeakKeyDictionary()  # Inputs that models trained on.


def remember(model: Any, x: Any) -> None:
  """Stores the specs of training inputs, for models without declared inputs."""
  SEEN[model] = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), x)


def chunked(
    engine: interface.Engine, count: int = 1, rows: Any = None,
    keep_outputs: bool = True) -> interface.Engine:
  """Processes a batch in chunks and adds up their sums, to limit memory.

  All chunks see the same query within one training step, so no clean sum is ever
  stored between steps, and noise is drawn once, after the last chunk.

  Args:
    engine: See `interface`.
    count: Number of chunks, unless `rows` is given.
    rows: Examples of a chunk; the last one is padded.
    keep_outputs: Whether to return the model's outputs, which for the whole batch
      may need more memory than all else; otherwise, those of no example.
  """
  if count == 1 and rows is None:
    return engine

  def run(
      model: compat.Model, loss: interface.Loss, batch: interface.Batch,
      request: interface.Request) -> interface.Clipped:
    static = batch.mask.shape[0]
    size = tf.shape(batch.mask)[0] if static is None else static
    if rows is not None and static is not None and static <= rows:
      return engine(model, loss, batch, request)
    if rows is None:
      chunks, width = count, -(-size // count)
    else:
      chunks, width = tf.maximum(-(-size // rows), 1) if static is None else -(-size // rows), rows
    parts = trees.map(lambda t: protocol.split(t, chunks, width), batch)

    def chunk(index: tf.Tensor) -> interface.Clipped:
      part = trees.map(lambda t: t[index], parts)
      return engine(model, loss, part, request)

    first = chunk(0)  # Outside the loop: it tells the shapes of the outputs.
    per_example = lambda clipped: (
        clipped.losses, clipped.norms, *(
            (clipped.outputs, clipped.masks) if keep_outputs else ((), ())))
    none = trees.map(lambda t: t[:0], first.outputs)
    flat = tf.nest.flatten(per_example(first))
    arrays = [tf.TensorArray(t.dtype, chunks, element_shape=t.shape).write(0, t) for t in flat]

    def body(index: tf.Tensor, sums: Any, arrays: Any) -> Tuple[Any, ...]:
      clipped = chunk(index)
      values = tf.nest.flatten(per_example(clipped))
      return (index + 1, interface.add_sums(sums, clipped.sums),
              [array.write(index, value) for array, value in zip(arrays, values)])

    _, sums, arrays = tf.while_loop(
        lambda index, *_: index < chunks, body, (tf.constant(1), first.sums, arrays),
        parallel_iterations=1, maximum_iterations=chunks - 1)
    losses, norms, outputs, masks = tf.nest.pack_sequence_as(
        per_example(first), [array.concat()[:size] for array in arrays])
    return interface.Clipped(sums, outputs if keep_outputs else none, losses, norms, masks)

  return run
