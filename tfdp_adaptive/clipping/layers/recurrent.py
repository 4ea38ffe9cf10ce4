# SPDX-License-Identifier: Apache-2.0
"""Layers along time: LSTM, GRU and SimpleRNN; and TimeDistributed.

The layer's own loop gives the result; a second one, with the products by the
input kernel taken out of it, gives the derivatives: it is what the tape sees, and
its tap is the sequence of pre-activations. The recurrent kernel's factors are the
states before each step and the same cotangents.
"""

import contextlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry

layers = compat.keras.layers


class _Weights:
  """A cell's variables in its compute dtype, and its dropout masks of this call."""

  def __init__(self, cell: compat.Layer, x: tf.Tensor, state: Any, training: Any) -> None:
    cast = lambda v: tf.cast(tf.convert_to_tensor(v), x.dtype)
    self.kernel, self.recurrent = cast(cell.kernel), cast(cell.recurrent_kernel)
    self.bias = None if cell.bias is None else cast(cell.bias)
    self.units = cell.units
    self.gates = self.kernel.shape[1] // cell.units
    self.inputs = self.states = None
    if training:
      self.inputs = _masks(cell, x[:, 0], cell.dropout, self.gates, training)
      self.states = _masks(cell, state, cell.recurrent_dropout, self.gates, training)


def _masks(
    cell: compat.Layer, like: tf.Tensor, rate: float, gates: int,
    training: Any) -> Optional[List[tf.Tensor]]:
  """[n, width] dropout masks: one for all gates, or one for each; None without dropout."""
  if not 0 < rate < 1:
    return None
  per_gate = getattr(cell, 'implementation', 2) == 1 and gates > 1
  return [compat.recurrent_dropout_mask(cell, like, rate, training)
          for _ in range(gates if per_gate else 1)]


def _product(x: tf.Tensor, matrix: tf.Tensor, masks: Any) -> tf.Tensor:
  """`x @ matrix`, the columns of each gate with a mask of their own."""
  if masks is None:
    return dense.times(x, matrix)
  if len(masks) == 1:
    return dense.times(x * masks[0], matrix)
  return tf.concat([dense.times(x * mask, part)
                    for mask, part in zip(masks, tf.split(matrix, len(masks), 1))], -1)


def _lstm(cell: compat.Layer, weights: _Weights, x: tf.Tensor, states: Any) -> Tuple[Any, Any]:
  h, c = states
  i, f, g, o = tf.split(x + _product(h, weights.recurrent, weights.states), 4, -1)
  gate = cell.recurrent_activation
  c = gate(f) * c + gate(i) * cell.activation(g)
  h = gate(o) * cell.activation(c)
  return (h, c), ()


def _gru(cell: compat.Layer, weights: _Weights, x: tf.Tensor, states: Any) -> Tuple[Any, Any]:
  h, = states
  gate, units = cell.recurrent_activation, weights.units
  x_z, x_r, x_h = tf.split(x, 3, -1)
  if cell.reset_after:
    inner = _product(h, weights.recurrent, weights.states)
    if weights.bias is not None:
      inner += weights.bias[1]
    h_z, h_r, h_h = tf.split(inner, 3, -1)
    z, r = gate(x_z + h_z), gate(x_r + h_r)
    h_h = r * h_h
  else:
    masks = weights.states
    first = masks[:2] if masks and len(masks) > 1 else masks
    h_z, h_r = tf.split(_product(h, weights.recurrent[:, :2 * units], first), 2, -1)
    z, r = gate(x_z + h_z), gate(x_r + h_r)
    h_h = tf.matmul(r * (h * masks[-1] if masks else h), weights.recurrent[:, 2 * units:])
  h = z * h + (1 - z) * cell.activation(x_h + h_h)
  return (h,), (r,)


def _simple(cell: compat.Layer, weights: _Weights, x: tf.Tensor, states: Any) -> Tuple[Any, Any]:
  h, = states
  z = x + _product(h, weights.recurrent, weights.states)
  return (z if cell.activation is None else cell.activation(z),), ()


_STEPS = {layers.LSTMCell: _lstm, layers.GRUCell: _gru, layers.SimpleRNNCell: _simple}


def _scan(
    step: Callable[..., Any], x: tf.Tensor, states: Any,
    mask: Optional[tf.Tensor]) -> Tuple[Any, ...]:
  """Runs `step` along the first axis of x [T, n, p].

  Returns:
    Outputs [T, n, units] as Keras masks them, states [T, n, units] of the first
    kind after each step, what else the step yields, and the last states.
  """
  length = x.shape[0] if x.shape[0] is not None else tf.shape(x)[0]
  array = lambda t: tf.TensorArray(t.dtype, length, element_shape=t.shape)
  x_array = array(x[0]).unstack(x)
  mask_array = None if mask is None else array(mask[0]).unstack(mask)
  output = tf.zeros_like(states[0])
  extras = step(x[0], states)[1]
  arrays = tuple(array(t) for t in (output, states[0]) + tuple(extras))

  def body(t: tf.Tensor, states: Any, output: tf.Tensor, arrays: Any) -> Tuple[Any, ...]:
    new, extras = step(x_array.read(t), states)
    if mask_array is None:
      output = new[0]
    else:
      keep = mask_array.read(t)
      output = tf.where(keep, new[0], output)
      new = tuple(tf.where(keep, a, b) for a, b in zip(new, states))
    values = (output, new[0]) + tuple(extras)
    return t + 1, new, output, tuple(a.write(t, v) for a, v in zip(arrays, values))

  _, states, _, arrays = tf.while_loop(
      lambda t, *_: t < length, body, (tf.constant(0), tuple(states), output, arrays),
      maximum_iterations=length)
  outputs, after, *extras = [a.stack() for a in arrays]
  return outputs, after, extras, states


def _arguments(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[Any, Any, Any, Any]:
  """`(x, mask, training, initial state or None)` of a call."""
  inputs = args[0] if args else kwargs.get('sequences', kwargs.get('inputs'))
  names = compat.RECURRENT_ARGUMENTS
  given = dict(zip(names, args[1:]), **{k: v for k, v in kwargs.items() if k in names})
  state, mask = given.get('initial_state'), given.get('mask')
  if isinstance(inputs, (list, tuple)):
    inputs, state = inputs[0], list(inputs[1:]) or state
  if isinstance(mask, (list, tuple)):
    mask = mask[0]
  if state is not None and not isinstance(state, (list, tuple)):
    state = [state]
  return inputs, mask, given.get('training'), state


def tap(
    layer: compat.Layer, function: Callable[..., Any], tape: tf.GradientTape, args: Tuple[Any, ...],
    kwargs: Dict[str, Any]) -> Tuple[Any, Any, Any]:
  """Runs the layer unseen and its shadow, whose derivatives stand for the layer's."""
  cell = layer.cell
  x, mask, training, states = _arguments(args, kwargs)
  if tf.is_tensor(training):
    raise registry.Unsupported(f'`training` of layer {layer.name!r} must be a Python bool. '
                               f'Received: training={training}.')
  x = tf.cast(x, layer.compute_dtype)
  if states is None:
    sizes = tf.nest.flatten(cell.state_size)
    states = [tf.zeros([tf.shape(x)[0], size], x.dtype) for size in sizes]
    for state in states:
      state.set_shape([x.shape[0], None])
  weights = _Weights(cell, x, states[0], training)
  unseen = tf.nest.map_structure(
      lambda t: tf.stop_gradient(t) if tf.is_tensor(t) and t.dtype.is_floating else t,
      (args, kwargs))
  with _with_masks(layer, weights):
    outputs = function(*unseen[0], **unseen[1])

  flow = tf.transpose(x, [1, 0, 2])
  if mask is not None:
    mask = tf.transpose(tf.cast(mask, tf.bool))[..., tf.newaxis]
  if layer.go_backwards:
    flow, mask = tf.reverse(flow, [0]), None if mask is None else tf.reverse(mask, [0])
  before = _product(flow, weights.kernel, weights.inputs)
  if weights.bias is not None:
    before += weights.bias[0] if weights.bias.shape.rank == 2 else weights.bias
  tape.watch(before)
  step = lambda x, s: _STEPS[type(cell)](cell, weights, x, s)
  start = tuple(tf.cast(s, x.dtype) for s in states)
  shadow, after, extras, last = _scan(step, before, start, mask)
  final = shadow[-1]
  if mask is not None and getattr(layer, 'zero_output_for_mask', False):
    shadow = tf.where(mask, shadow, tf.zeros_like(shadow))
    final = shadow[-1]
  shadows = [tf.transpose(shadow, [1, 0, 2]) if layer.return_sequences else final]
  if layer.return_state:
    shadows += list(last)
  flat = [_graft(own, shadow) for own, shadow in zip(tf.nest.flatten(outputs), shadows)]
  previous = tf.concat([tf.cast(states[0], x.dtype)[tf.newaxis], after[:-1]], 0)
  return tf.nest.pack_sequence_as(outputs, flat), before, (flow, previous, extras, weights)


@tf.custom_gradient
def _graft(value: tf.Tensor, shadow: tf.Tensor) -> Any:
  """`value`, differentiated as `shadow`."""
  return tf.identity(value), lambda e: (None, tf.cast(e, shadow.dtype))


@contextlib.contextmanager
def _with_masks(layer: compat.Layer, weights: _Weights) -> Iterator[None]:
  """Gives the layer the dropout masks of its shadow."""
  with contextlib.ExitStack() as stack:
    for owner in (layer, layer.cell):
      stack.enter_context(registry.swapped(owner, **dict(
          compat.recurrent_mask_getter(name, masks, owner is layer)
          for name, masks in (('dropout', weights.inputs), ('recurrent_dropout', weights.states))
          if masks is not None)))
    yield


def _why(layer: compat.Layer) -> str:
  cell = layer.cell
  if type(cell) not in _STEPS:
    return 'an unknown cell'
  if layer.stateful or getattr(layer, 'time_major', False):
    return 'stateful or time-major'
  return ''


@registry.register(layers.LSTM, layers.GRU, layers.SimpleRNN, layers.RNN,
                   tap=tap, whole=True, why=_why)
def recurrent(layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> registry.Factors:
  flow, previous, extras, weights = call.saved
  wide = lambda t: tf.transpose(tf.cast(t, trees.wide(t.dtype)), [1, 0, 2])
  cotangents, cell = wide(cotangents), layer.cell
  yield cell.kernel, _outer([wide(flow)], cotangents, weights.inputs, cell.kernel)
  inner, before = cotangents, [wide(previous)]
  if extras and cell.reset_after:
    # The reset gate lies between the product and its cotangent.
    z, r, h = tf.split(cotangents, 3, -1)
    inner = tf.concat([z, r, h * wide(extras[0])], -1)
  elif extras:  # The candidate's product takes `reset * state`.
    before = [*before, *before, wide(extras[0]) * before[0]]
  yield cell.recurrent_kernel, _outer(before, inner, weights.states, cell.recurrent_kernel)
  if cell.bias is not None:
    bias = tf.reduce_sum(cotangents, 1)
    if cell.bias.shape[0] == 2 and len(cell.bias.shape) == 2:
      bias = tf.stack([bias, tf.reduce_sum(inner, 1)], 1)
    yield cell.bias, factors.explicit(bias)


def _outer(
    inputs: Sequence[tf.Tensor], cotangents: tf.Tensor, masks: Any,
    variable: compat.Variable) -> factors.Outer:
  """The factor of a product whose inputs were masked; both are of all gates, or one for each."""
  if masks:
    masks = [tf.cast(mask, cotangents.dtype)[:, tf.newaxis] for mask in masks]
    gates = max(len(inputs), len(masks))
    inputs = [x * mask for x, mask in zip(
        [*inputs] * (gates // len(inputs)), masks * (gates // len(masks)))]
  if len(inputs) == 1:
    return factors.Outer(inputs[0], cotangents, tuple(variable.shape))
  return _by_gate(inputs, cotangents, variable)


def _by_gate(
    inputs: Sequence[tf.Tensor], cotangents: Any, variable: compat.Variable) -> factors.Outer:
  """The factor of one product per gate, as steps that reach that gate alone."""
  parts = tf.split(cotangents, len(inputs), -1)
  cotangents = [
      tf.concat([part if i == j else tf.zeros_like(part) for j, part in enumerate(parts)], -1)
      for i in range(len(inputs))]
  return factors.Outer(tf.concat(inputs, 1), tf.concat(cotangents, 1), tuple(variable.shape))


if compat.TIME_DISTRIBUTED_FOLDS:  # Keras 2 joins steps with the batch; Keras 3 has a call a step.

  @registry.register(layers.TimeDistributed, folds=True)
  def time_distributed(
      layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> Iterable[Any]:
    """Has no variables but those of the layer inside."""
    del layer, call, cotangents
    return ()
