# SPDX-License-Identifier: Apache-2.0
"""Compares the first step's loss and gradients with Keras' own, on two examples made up for it.

The compiled loss of Keras and a plain tape are asked for each example by itself. What the engine
and `ExampleLoss` make of the same examples must be the same: a gradient inside `call` or a loss
with its own reduction may say otherwise. No record is read.
"""

from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.independence import validation

_COUNT = 2
_ROUNDING, _COARSE = 2e-3, 0.1  # Largest relative differences, in float32 and in 16 bits.
_UNCLIPPED = 1e18  # Its square is a number.
_CANNOT = (ValueError, TypeError, LookupError, AttributeError, NotImplementedError,
           tf.errors.OpError)
State = List[Tuple[Any, tf.Tensor]]  # Variables and their values.
Results = List[Tuple[float, np.ndarray]]  # Loss and gradient of each example.


def check(model: compat.Model, loss: interface.Loss, compiled: Tuple[Any, Any], specs: trees.Tree,
          asks: Tuple[contract.Ask, ...], engine: str = 'auto') -> None:
  """Raises `PrivacyError` where a step would not compute what Keras computes.

  If the default engine's book-keeping is wrong and the gradient of a whole model is right, the
  model goes to the slower engine from now on.

  Args:
    model: A built and validated model.
    loss: Its `ExampleLoss`.
    compiled: Loss and loss weights, as given to `compile`.
    specs: `(x, y, sample_weight)` of a batch.
    asks: The rule's asks.
    engine: The engine of the steps, as in `Performance`.
  """
  state = [(v, tf.convert_to_tensor(v)) for v in model.non_trainable_variables
           if hasattr(v, 'assign') and not tf.as_dtype(v.dtype).is_floating]
  rounding = _COARSE if any(getattr(layer, 'compute_dtype', '') in ('float16', 'bfloat16')
                            for layer in model._flatten_layers()) else _ROUNDING
  try:
    batch = _made_up(model, specs)
    for _ in range(2):
      decided, _ = engines.decide(engine, model, asks, batch.x)
      together = decided in ('bookkeeping', 'layered')
      expected = _of_keras(model, compiled, batch, together, state)
      again = _of_keras(model, compiled, batch, together, state)
      if not all(_near(*pair, rounding) for pair in zip(expected, again)) or not all(
          np.isfinite(gradient).all() for _, gradient in expected):
        return  # It draws what cannot be held fixed, or these examples have no gradient.
      got = _of_engine(model, loss, batch, decided, state)
      if all(_near(*pair, rounding) for pair in zip(got, expected)):
        return
      if engine == 'auto' and together:
        bookkeeping.distrust(model, 'Its gradients are not those of a tape, as where `call` takes '
                             'gradients itself.')
        continue
      raise _differs(got, expected, decided)
  except _CANNOT:
    return  # Nothing to compare with; the step says itself what it cannot do.
  finally:
    trees.assign(state)


def _of_keras(model: compat.Model, compiled: Tuple[Any, Any], batch: interface.Batch,
              together: bool, state: State) -> Results:
  """Returns `(loss, gradient)` of each example, from a forward pass of all or of each alone."""
  trees.assign(state)
  variables = model.trainable_variables
  with tf.GradientTape(persistent=True) as tape:
    outputs = model(batch.x, training=True) if together else None
    values = [_loss_of(model, compiled, _row(i, batch), _row(i, outputs) if together else None)
              for i in range(_COUNT)]
  return [(float(tf.reduce_sum(value)), _joined(tape.gradient(value, [
      compat.raw_variable(v) for v in variables]), variables)) for value in values]


def _loss_of(model: compat.Model, compiled: Tuple[Any, Any], one: interface.Batch,
             outputs: trees.Tree) -> tf.Tensor:
  """Returns Keras' loss of a batch of one example."""
  outputs = model(one.x, training=True) if outputs is None else outputs
  weight = None if trees.absent(one.sample_weight) else one.sample_weight
  return compat.compiled_loss(*compiled, compat.output_names(model))(one.y, outputs, weight)


def _row(i: int, tree: trees.Tree) -> Any:
  """Returns a batch of example i alone, with its masks and the logits that Keras remembers."""

  def row(tensor: tf.Tensor) -> tf.Tensor:
    one = tensor[i:i + 1]
    for name in ('_keras_mask', '_keras_logits'):
      if getattr(tensor, name, None) is not None:
        setattr(one, name, getattr(tensor, name)[i:i + 1])
    return one

  return trees.map(row, tree)


def _joined(gradients: trees.Tree, variables: Sequence[compat.Variable]) -> np.ndarray:
  return np.concatenate([np.zeros(0)] + [
      np.zeros(int(np.prod(v.shape))) if g is None else np.ravel(
          np.asarray(tf.cast(tf.convert_to_tensor(g), tf.float64)))
      for g, v in zip(gradients, variables)])


def _of_engine(model: compat.Model, loss: interface.Loss, batch: interface.Batch, decided: str,
               state: State) -> Results:
  """Returns the same, from an engine that clips at infinity and one unmasked example at a time."""
  results = []
  request = interface.Request(
      (contract.Ask(),), (contract.Query(),), (tf.constant(_UNCLIPPED, tf.float32),))
  for i in range(_COUNT):
    trees.assign(state)
    clipped = engines.ENGINE[decided](
        model, loss, batch._replace(mask=tf.range(_COUNT) == i), request)
    total = _joined(clipped.sums[0].total, model.trainable_variables)
    results.append((float(clipped.losses[i]), total))
  return results


def _near(one: Tuple[float, np.ndarray], other: Tuple[float, np.ndarray],
          rounding: float) -> bool:
  return abs(one[0] - other[0]) <= rounding * max(abs(other[0]), 1e-3) and bool(
      np.linalg.norm(one[1] - other[1]) <= rounding * np.linalg.norm(other[1]) + 1e-6)


def _differs(got: Results, expected: Results, decided: str) -> errors.PrivacyError:
  say = lambda results: [
      (float(f'{value:.4g}'), float(f'{np.linalg.norm(gradient):.4g}'))
      for value, gradient in results]
  return errors.PrivacyError(
      'A private step must compute what Keras computes for an example by itself. Received, for two '
      f'examples that were made up: losses and norms of gradients {say(got)} by engine '
      f'{decided!r}, {say(expected)} by the compiled loss and a plain tape. Check what '
      'the loss does to a batch of one, or '
      "use performance=tfdp.Performance('materialized'). "
      '`model.compile(..., compare_first_step=False)` leaves this out, and the statement says so.')


def _made_up(model: compat.Model, specs: trees.Tree) -> interface.Batch:
  """Returns two examples with labels that are classes, zeros or ones, and weights near one."""
  x, y, weights = specs
  x = trees.map(lambda t: t[:_COUNT], validation.accepted(model, x))
  outputs = tf.nest.flatten(model(trees.map(tf.convert_to_tensor, x), training=False))
  rng = np.random.default_rng(0)

  def shape(spec: tf.TensorSpec) -> List[int]:
    like: Optional[Any] = next((t.shape for t in outputs if t.shape.rank >= len(spec.shape)), None)
    sizes = [2 if like is None else like[i] for i in range(len(spec.shape))]
    return [_COUNT] + [size if d is None else d for d, size in zip(spec.shape[1:], sizes[1:])]

  label = lambda spec: tf.cast(rng.integers(0, 2, shape(spec)), spec.dtype)

  weight = lambda spec: tf.constant(rng.uniform(0.5, 1.5, shape(spec)), tf.float32)
  return interface.Batch(
      trees.map(tf.convert_to_tensor, x), trees.map(label, y),
      weights if trees.absent(weights) else trees.map(weight, weights), tf.ones([_COUNT], tf.bool))
