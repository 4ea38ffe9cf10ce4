# SPDX-License-Identifier: Apache-2.0
"""Compares a layer's clipping rule with the gradients of single examples.

The layer is called once on a few examples. TensorFlow's gradients, for an error at the output of
one example at a time, are what the factors of the rule must hold. Where the layer can be made again
from its config, it is called in float64, with weights and inputs moved at random: a zero could hide
what is wrong.
"""

from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.clipping import tracing
from tfdp_adaptive.clipping.layers import registry

_MOST = 4  # Examples that are compared.
# The largest difference from the gradients of an example, relative to their norm, by dtype.
_TOLERANCE = {'float64': 1e-6, 'float32': 1e-3, 'float16': 5e-2, 'bfloat16': 2e-1}


def check(layer: compat.Layer, *args: Any, **kwargs: Any) -> float:
  """Compares the clipping rule of a layer with the gradients of single examples.

  A first step does the same for every layer whose rule you registered.

  Args:
    layer: A layer with a registered rule. It is built if it is not.
    *args: Its inputs, with at least two examples along the first axis.
    **kwargs: Further arguments of its call.

  Returns:
    The largest difference, relative to the norm of an example's gradient.

  Raises:
    PrivacyError: If a gradient of the rule is wrong.
    ValueError: If the layer has no rule that can be used, or no weight that trains.

  Examples:
    >>> check(compat.keras.layers.Dense(2), np.ones([3, 4], np.float32)) < 1e-6
    True
  """
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
  return _check(tracing.Unit(layer, kind, trained), args, kwargs)


def registered(model: compat.Model, x: Any) -> None:
  """Checks every call of layers whose rules are not of this library, on examples `x`.

  Raises:
    PrivacyError: If a gradient of a rule is wrong.
  """
  try:
    units = tracing.units(model)
  except registry.Unsupported:
    return  # No rule is used.
  if not any(_is_own(unit) for unit in units):
    return
  tape = tf.GradientTape(watch_accessed_variables=False)
  recorder = tracing.Recorder(units, tape)
  try:
    with tape:
      recorder.run(model, tf.nest.map_structure(tf.convert_to_tensor, x))
  except registry.Unsupported:
    return
  for record in recorder.records:
    if _is_own(record.unit) and record.call.times == 1:
      _check(record.unit, record.call.args, record.call.kwargs)


def _is_own(unit: tracing.Unit) -> bool:
  """Whether a rule is none of the library's own."""
  return unit.kind.gradients.__module__.partition('.')[0] != __name__.partition('.')[0]


def _check(unit: tracing.Unit, args: Any, kwargs: Any) -> float:
  few = lambda t: t[:_MOST] if tf.is_tensor(t) and t.shape.rank else t
  args, kwargs = tf.nest.map_structure(
      lambda t: few(tf.convert_to_tensor(t) if isinstance(t, np.ndarray) else t), (args, kwargs))
  for one, arguments, named in _candidates(unit, args, kwargs):
    try:
      true, found = _gradients(one, arguments, named)
    except errors.PrivacyError:
      raise
    except Exception:  # pylint: disable=broad-except
      if one is unit:
        raise  # As it is, the layer must run.
      continue
    if all(np.isfinite(g).all() for g in true.values()):
      return _compare(one, true, found)
  return 0.0  # No gradient is finite, and none counts.


def _candidates(
    unit: tracing.Unit, args: Any, kwargs: Any) -> Iterator[Tuple[tracing.Unit, Any, Any]]:
  """Yields the layer in float64, moved at random and as it is; then the layer itself."""
  rng = np.random.default_rng(0)
  try:
    wide = compat.in_float64(unit.layer, *args, **kwargs)
    keys = [compat.variable_key(v) for v in unit.layer.weights]
    trained = {compat.variable_key(v) for v in unit.variables}
    variables = tuple(v for key, v in zip(keys, wide.weights) if key in trained)
    copy = tracing.Unit(wide, unit.kind, variables)
  except Exception:  # pylint: disable=broad-except
    yield unit, args, kwargs
    return
  cast = lambda t: tf.cast(t, tf.float64) if tf.is_tensor(t) and t.dtype.is_floating else t
  move = lambda t: t + rng.normal(size=t.shape) if tf.is_tensor(t) and t.dtype.is_floating else t
  before = [np.asarray(compat.read(v)) for v in wide.weights]
  args_wide, kwargs_wide = tf.nest.map_structure(cast, (args, kwargs))
  for variable, value in zip(wide.weights, before):
    if np.issubdtype(value.dtype, np.floating):
      variable.assign(value + 0.3 * rng.normal(size=value.shape))
  yield copy, *tf.nest.map_structure(move, (args_wide, kwargs_wide))
  for variable, value in zip(wide.weights, before):
    variable.assign(value)
  yield copy, args_wide, kwargs_wide
  yield unit, args, kwargs


def _gradients(unit: tracing.Unit, args: Any, kwargs: Any) -> Tuple[Dict[Any, Any], Dict[Any, Any]]:
  """Returns the gradients [n, ...] of examples by variable: the true ones, and the rule's."""
  rng, layer = np.random.default_rng(1), unit.layer
  raw = {compat.variable_key(v): compat.raw_variable(v) for v in unit.variables}
  with tf.GradientTape(persistent=True) as tape:
    outputs, taps, saved = unit.kind.tap(
        layer, getattr(layer, compat.called(layer)), tape, args, kwargs)
    floats = [t for t in registry.tensors(outputs) if t.dtype.is_floating]
  size = floats[0].shape[0]
  errors_at = [tf.cast(rng.normal(size=t.shape), t.dtype) for t in floats]
  of_one = lambda e, i: tf.concat([tf.zeros_like(e[:i]), e[i:i + 1], tf.zeros_like(e[i + 1:])], 0)
  by_example = [tape.gradient(floats, list(raw.values()), [of_one(e, i) for e in errors_at],
                              unconnected_gradients='zero') for i in range(size)]
  true = {key: np.stack([np.asarray(tf.convert_to_tensor(g[k]), np.float64) for g in by_example])
          for k, key in enumerate(raw)}
  flat = tf.nest.flatten(taps)
  cotangents = tf.nest.pack_sequence_as(taps, [
      tf.zeros_like(t) if g is None else tf.convert_to_tensor(g)
      for t, g in zip(flat, tape.gradient(floats, flat, errors_at))])
  batched = tuple(bool(tf.is_tensor(t) and t.shape.rank and t.shape[0] == size)
                  for t in tf.nest.flatten((args, kwargs)))
  call = registry.Call(args, kwargs, outputs, saved, batched)
  found: Dict[Any, List[np.ndarray]] = {}
  try:
    for variable, factor in unit.kind.gradients(layer, call, cotangents):
      found.setdefault(compat.variable_key(variable), []).append(
          np.asarray(factor.explicit().gradient(), np.float64))
    rule = {key: np.sum(parts, 0) for key, parts in found.items()}
  except (ValueError, TypeError, AttributeError, tf.errors.OpError) as error:
    raise errors.PrivacyError(
        f'The clipping rule registered for {type(layer).__name__} must give the gradients of '
        f'single examples. Received: an error, {error!s:.300}') from error
  return true, rule


def _compare(unit: tracing.Unit, true: Dict[Any, Any], found: Dict[Any, Any]) -> float:
  worst = 0.0
  for variable in unit.variables:
    key = compat.variable_key(variable)
    expected, got = true[key], found.get(key)
    if got is None or got.shape != expected.shape:
      how = 'nothing' if got is None else f'gradients of shape {got.shape}'
    else:
      flat = lambda g: g.reshape(len(g), -1)
      norms = np.linalg.norm(flat(expected), axis=1)
      scale = np.maximum(norms, 1e-3 * norms.max(initial=0.0) + 1e-30)
      difference = float(np.max(np.linalg.norm(flat(got - expected), axis=1) / scale))
      worst = max(worst, difference)
      if difference <= _TOLERANCE.get(str(unit.layer.compute_dtype), 1e-3):
        continue
      how = f'gradients that differ from them by {difference:.3g} times their norm'
    raise errors.PrivacyError(
        f'The clipping rule registered for {type(unit.layer).__name__} must give the gradients of '
        f'single examples. Received: {how}, of {compat.describe(variable)}. Examples would be '
        'clipped by a wrong norm. Mend the rule, and compare it by `tfdp.clipping.check(layer, '
        'x)`; without a rule the layer is clipped one example at a time.')
  return worst
