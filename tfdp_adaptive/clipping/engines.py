# SPDX-License-Identifier: Apache-2.0
"""Chooses the engine that clips a model's gradients, and replaces token ids out of range.

An example with token ids out of range is left out, like an example whose gradient is not finite. On
a CPU such an id would abort the program, so that one example could stop a training.
"""

from typing import Dict, List, MutableMapping, Optional, Tuple
import warnings
import weakref

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.clipping import tracing
from tfdp_adaptive.clipping.layers import registry
from tfdp_adaptive.rules import kfc
from tfdp_adaptive.rules import kronecker

ENGINES = ('auto', 'bookkeeping', 'layered', 'materialized', 'loop')
ENGINE: Dict[str, interface.Engine] = {
    'bookkeeping': bookkeeping.engine, 'layered': materialized.layered,
    'materialized': materialized.vectorized, 'loop': materialized.looped}


def decide(
    name: str, model: compat.Model, asks: Tuple[contract.Ask, ...],
    x: trees.Tree = None) -> Tuple[str, str]:
  """Returns `(name, reason)`: an engine, and why no faster one can be used.

  Args:
    name: One of `ENGINES`; 'auto' for the fastest one that is possible.
    model: A built Keras model.
    asks: The rule's asks; projections other than rescaling need whole gradients.
    x: Nest of inputs or their specs; without it only the structure is checked.

  Raises:
    ValueError: If the engine is unknown.
  """
  checks.one_of(ENGINES, engine=name)
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
    name: str, model: compat.Model, asks: Tuple[contract.Ask, ...],
    x: trees.Tree) -> interface.Engine:
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


def record_gradients(
    model: compat.Model, loss: interface.Loss, x: trees.Tree, y: trees.Tree) -> List[tf.Tensor]:
  """Returns [n, ...] gradients of every example, a list like the trainable variables."""
  if bookkeeping.supports(model, x)[0]:
    return materialized.layered_gradients(model, loss, x, y)
  return materialized.record_gradients(model, loss, x, y, vectorize=not _must_loop(model))


def _must_loop(model: compat.Model) -> bool:
  """Returns whether `tf.vectorized_map` over examples fails for a model.

  Recurrent layers have no vectorized gradient, and CPUs no convolution of volumes in groups.
  """
  return any(
      isinstance(layer, compat.keras.layers.RNN) or compat.vectorizes_wrongly(layer)
      or getattr(layer, 'groups', 1) > 1 and len(getattr(layer, 'kernel_size', ())) == 3
      for layer in model._flatten_layers())


def guarded(engine: interface.Engine) -> interface.Engine:
  """Returns an engine that replaces ids out of range."""

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

  return run


def in_range(model: compat.Model, x: trees.Tree) -> Tuple[trees.Tree, Optional[tf.Tensor]]:
  """Returns `(x, inside)`: ids out of range replaced by zero, and [n] which examples had none.

  `inside` is None if no input is known to be the ids of an embedding.
  """
  try:
    rows = bookkeeping.prove(model, x).limits
  except registry.Unsupported:
    rows = tracing.traced_limits(model, x)
  flat = tf.nest.flatten(x)
  inside: Optional[tf.Tensor] = None
  for i, limit in rows.items():
    above = flat[i] >= 0 if flat[i].dtype.is_integer else flat[i] > -1  # An embedding truncates it.
    good = above & (flat[i] < tf.cast(limit, flat[i].dtype))
    flat[i] = tf.where(good, flat[i], tf.zeros_like(flat[i]))
    good = tf.reduce_all(good, list(range(1, good.shape.rank)))
    inside = good if inside is None else inside & good
  return tf.nest.pack_sequence_as(x, flat), inside


# Specs of the inputs that models trained on.
SEEN: MutableMapping[compat.Model, trees.Tree] = weakref.WeakKeyDictionary()


def remember(model: compat.Model, x: trees.Tree) -> None:
  """Stores the specs of training inputs, for models without declared inputs."""
  SEEN[model] = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), x)


# Gradients of public data at the current parameters: no clipping, no noise, no privacy.

def public_gradients(
    kind: str, model: compat.Model, loss: interface.Loss, x: trees.Tree,
    y: trees.Tree) -> List[trees.Tree]:
  """Computes the public gradients that `rule.public` requests.

  Args:
    kind: 'mean' for the gradient of the mean loss, a list like the trainable
      variables; 'records' for [n, ...] gradients of every public record; 'factors' for
      second moments, see `second_moments`.
    model: A built Keras model.
    loss: `(y, outputs, sample_weight) -> [n]`.
    x: Nest of public inputs.
    y: Nest of public targets.
  """
  if kind == 'records':
    return record_gradients(model, loss, x, y)
  if kind == 'factors':
    return public_second_moments(model, loss, x, y)
  with tf.GradientTape() as tape:
    value = tf.reduce_mean(loss(y, model(x, training=True), ()))
  return materialized.dense_gradients(tape, value, model.trainable_variables)


def public_gradients_when_due(
    rule: contract.Rule, model: compat.Model, loss: interface.Loss, x: trees.Tree, y: trees.Tree,
    state: trees.Tree) -> List[trees.Tree]:
  """Returns the public gradients for this state; zeros in a step that needs none."""
  assert rule.public is not None
  if rule.public_due is None:
    return public_gradients(rule.public, model, loss, x, y)
  assert rule.public == 'factors'
  specs = [tuple(tf.TensorSpec(shape, trees.wide(tf.as_dtype(variable.dtype)))
                 for shape in kfc.sides(variable.shape)) for variable in model.trainable_variables]

  def computed() -> List[trees.Tree]:
    return trees.map(lambda found, spec: tf.ensure_shape(tf.cast(found, spec.dtype), spec.shape),
                     public_second_moments(model, loss, x, y), specs)

  return tf.cond(rule.public_due(state), computed, lambda: trees.zeros(specs))


def public_second_moments(
    model: compat.Model, loss: interface.Loss, x: trees.Tree,
    y: trees.Tree) -> List[Tuple[tf.Tensor, ...]]:
  """Averages the factors of the trainable variables' gradients over public records.

  Returns:
    For variables that `rules.kronecker` treats as matrices, the averages of `a a'` and `e e'`
    over all products `a e'` that add up to a gradient, or their diagonals for sides of more
    than `rules.kfc.MAX_SIDE`. For other variables `(square,)`, the average of squared gradients.

  Raises:
    ValueError: If the book-keeping engine does not support the model.
  """
  seen, reason = bookkeeping.supports(model, x)
  if not seen:
    raise ValueError('The model must be one whose layers the book-keeping engine can see: the '
                     f'factors of its gradients are asked for. Received: {model.name!r}. {reason}')
  n = tf.shape(tf.nest.flatten(x)[0])[0]
  batch = interface.Batch(x, y, (), tf.ones([n], tf.bool))
  factors, _, _ = bookkeeping.factors_of(model, loss, batch, formed=False)
  found: List[Tuple[tf.Tensor, ...]] = []
  for variable, factor in zip(model.trainable_variables, factors):
    view = kronecker.matrices(variable.shape, kfc.MAX_SIDE)
    if factor is None:
      dtype = tf.as_dtype(variable.dtype)
      found.append(tuple(tf.zeros(shape, dtype) for shape in kfc.sides(variable.shape)))
    elif view is None:
      weights = tf.fill([n], tf.math.rsqrt(tf.cast(n, tf.float64)))
      found.append((factor.squared_sum(weights),))
    else:
      found.append(factor.second_moments(view, kfc.MAX_SIDE))
  return found
