# SPDX-License-Identifier: Apache-2.0
"""Compares a layer's clipping rule with the gradients of single examples.

The layer is called once on a few examples. TensorFlow's gradients, for an error at the output of
one example at a time, must equal the factors of the rule. If the layer can be created from its
config, a copy is called in float64, with random changes to weights and inputs: zeros could hide an
error.
"""

from typing import Dict, Iterator, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import tracing
from tfdp_adaptive.clipping.layers import registry

_MOST = 4  # Number of examples that are compared.
# Largest difference from the gradients of an example, relative to their norm, by dtype.
_TOLERANCE = {'float64': 1e-6, 'float32': 1e-3, 'float16': 5e-2, 'bfloat16': 2e-1}


def check(layer: compat.Layer, *args: trees.Tree, **kwargs: trees.Tree) -> float:
  """Compares the clipping rule of a layer with the gradients of single examples.

  A first step does the same for every layer whose rule you registered.

  Args:
    layer: A layer with a registered rule. The layer is built if it is not built yet.
    *args: Its inputs, with at least two examples along the first axis.
    **kwargs: Further arguments of its call.

  Returns:
    The largest difference, relative to the norm of an example's gradient.

  Raises:
    PrivacyError: If a gradient of the rule is wrong.
    ValueError: If the layer has no usable rule, or no trainable weight.

  Examples:
    >>> check(compat.keras.layers.Dense(2), np.ones([3, 4], np.float32)) < 1e-6
    True
  """
  checks.instance(compat.keras.layers.Layer, 'a Keras layer', layer=layer)
  if any(len(t) < 2 for t in tf.nest.flatten(args) if np.ndim(t)):
    raise ValueError('`layer` must be called on two examples or more. Received: fewer.')
  if not layer.built:
    layer(*args, **kwargs)
  kind = registry.find(layer)
  if kind is None:
    raise ValueError('`layer` must have a clipping rule: without one it is clipped one example at '
                     f'a time, which needs no check. {registry.why_unknown(layer)}.')
  trained = tuple(compat.trained_variables(layer))
  if not trained:
    raise ValueError(f'`layer` must have weights that train. Received: {layer.name!r}, which has '
                     'none.')
  return _check(registry.Owner(layer, kind, trained), args, kwargs)


def registered(model: compat.Model, x: trees.Tree) -> None:
  """Checks every call of layers whose rules a user registered, on examples `x`.

  Raises:
    PrivacyError: If a gradient of a rule is wrong.
  """
  try:
    recorder = tracing.Recorder(tracing.owners(model))
    if any(map(_is_registered, recorder.owners)):
      with recorder.tape:
        recorder.run(model, tf.nest.map_structure(tf.convert_to_tensor, x))
  except registry.Unsupported:
    return  # No rule is used.
  for call in recorder.calls:
    if _is_registered(call.owner) and call.times == 1:
      _check(call.owner, call.args, call.kwargs)


def _is_registered(owner: registry.Owner) -> bool:
  """Returns whether a user registered the rule of a layer."""
  return owner.kind.gradients.__module__.partition('.')[0] != __name__.partition('.')[0]


def _check(owner: registry.Owner, args: trees.Tree, kwargs: trees.Tree) -> float:
  few = lambda t: t[:_MOST] if tf.is_tensor(t) and t.shape.rank else t
  args, kwargs = tf.nest.map_structure(
      lambda t: few(tf.convert_to_tensor(t) if isinstance(t, np.ndarray) else t), (args, kwargs))
  for one, arguments, named in _candidates(owner, args, kwargs):
    try:
      true, found = _gradients(one, arguments, named)
    except errors.PrivacyError:
      raise
    except Exception:  # pylint: disable=broad-except
      if one is owner:
        raise  # The layer itself must run.
      continue
    if all(np.isfinite(g).all() for g in true.values()):
      return _compare(one, true, found)
  return 0.0  # Gradients that are not finite are left out.


def _candidates(
    owner: registry.Owner, args: trees.Tree,
    kwargs: trees.Tree) -> Iterator[Tuple[registry.Owner, trees.Tree, trees.Tree]]:
  """Yields a copy in float64, with random changes and without; then the layer itself."""
  rng = np.random.default_rng(0)
  try:
    wide = compat.in_float64(owner.layer, *args, **kwargs)
    trained = compat.by_key(owner.variables)
    copy = registry.Owner(wide, owner.kind, tuple(
        v for v, own in zip(wide.weights, owner.layer.weights)
        if compat.variable_key(own) in trained))
  except Exception:  # pylint: disable=broad-except
    yield owner, args, kwargs
    return

  def moved(tensor: trees.Leaf, size: float) -> trees.Leaf:
    if not tf.is_tensor(tensor) or not tensor.dtype.is_floating:
      return tensor
    return tf.cast(tensor, tf.float64) + size * rng.normal(size=tensor.shape)

  weights = [tf.convert_to_tensor(v) for v in wide.weights]
  for size in (1.0, 0.0):
    for variable, value in zip(wide.weights, weights):
      variable.assign(tf.cast(moved(value, 0.3 * size), value.dtype))
    yield copy, *tf.nest.map_structure(lambda t, size=size: moved(t, size), (args, kwargs))
  yield owner, args, kwargs


def _gradients(
    owner: registry.Owner, args: trees.Tree,
    kwargs: trees.Tree) -> Tuple[Dict[int, np.ndarray], Dict[int, np.ndarray]]:
  """Returns the gradients [n, ...] of examples by variable: the true ones, and the rule's."""
  rng, layer = np.random.default_rng(1), owner.layer
  raw = {key: compat.raw_variable(v) for key, v in compat.by_key(owner.variables).items()}
  with tf.GradientTape(persistent=True) as tape:
    call = owner.kind.tap(
        layer, getattr(layer, compat.called(layer)), registry.Call(args, kwargs), tape)
    floats = [t for t in registry.tensors(call.outputs) if t.dtype.is_floating]
  size = floats[0].shape[0]
  errors_at = [tf.cast(rng.normal(size=t.shape), t.dtype) for t in floats]
  of_one = lambda e, i: tf.concat([tf.zeros_like(e[:i]), e[i:i + 1], tf.zeros_like(e[i + 1:])], 0)
  by_example = [tape.gradient(floats, list(raw.values()), [of_one(e, i) for e in errors_at],
                              unconnected_gradients='zero') for i in range(size)]
  true = {key: np.stack([np.asarray(tf.convert_to_tensor(g[k]), np.float64) for g in by_example])
          for k, key in enumerate(raw)}
  cotangents = tape.gradient(floats, call.taps, errors_at)
  try:
    rule = {key: np.asarray(factor.gradient(), np.float64) for key, factor in bookkeeping.terms(
        [call.of_rows(size)._replace(owner=owner)], [cotangents]).items()}
  except (ValueError, TypeError, AttributeError, tf.errors.OpError) as error:
    raise errors.PrivacyError(
        f'The clipping rule registered for {type(layer).__name__} must give the gradients of '
        f'single examples. Received: an error, {error!s:.300}') from error
  return true, rule


def _compare(
    owner: registry.Owner, true: Dict[int, np.ndarray], found: Dict[int, np.ndarray]) -> float:
  worst = 0.0
  for key, variable in compat.by_key(owner.variables).items():
    expected, got = true[key], found.get(key)
    if got is None or got.shape != expected.shape:
      how = 'nothing' if got is None else f'gradients of shape {got.shape}'
    else:
      flat = lambda g: g.reshape(len(g), -1)
      norms = np.linalg.norm(flat(expected), axis=1)
      scale = np.maximum(norms, 1e-3 * norms.max(initial=0.0) + 1e-30)
      difference = float(np.max(np.linalg.norm(flat(got - expected), axis=1) / scale))
      worst = max(worst, difference)
      if difference <= _TOLERANCE.get(str(owner.layer.compute_dtype), 1e-3):
        continue
      how = f'gradients that differ from them by {difference:.3g} times their norm'
    raise errors.PrivacyError(
        f'The clipping rule registered for {type(owner.layer).__name__} must give the gradients of '
        f'single examples. Received: {how}, of {compat.describe(variable)}. Examples would be '
        'clipped by a wrong norm. Mend the rule, and compare it by `tfdp.clipping.check(layer, '
        'x)`; without a rule the layer is clipped one example at a time.')
  return worst
