# SPDX-License-Identifier: Apache-2.0
"""Layers along time: LSTM, GRU and SimpleRNN; and TimeDistributed.

The tap is the sequence of the products by the input kernel, which the layer's own loop takes step
by step. So a loop of the same steps runs in place of it, on all products at once. The recurrent
kernel's factors are the states before each step and the same cotangents.
"""

from typing import Any, Callable, Iterable, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry

layers = compat.keras.layers
States = Tuple[tf.Tensor, ...]
Masks = Optional[List[tf.Tensor]]  # Dropout masks: one for all gates, one for each, or none.
_Step = Callable[[tf.Tensor, States], Tuple[States, States]]  # (x, states) -> (states, others).


class _Weights:
  """A cell's variables in its compute dtype, and its dropout masks of this call."""

  def __init__(self, cell: compat.Layer, x: tf.Tensor, state: tf.Tensor, training: bool) -> None:
    cast = lambda v: tf.cast(tf.convert_to_tensor(v), x.dtype)
    self.kernel, self.recurrent = cast(cell.kernel), cast(cell.recurrent_kernel)
    self.bias = None if cell.bias is None else cast(cell.bias)
    self.units = cell.units
    self.gates = self.kernel.shape[1] // cell.units
    self.inputs: Masks = None
    self.states: Masks = None
    if training:
      self.inputs = _masks(cell, x[:, 0], cell.dropout, self.gates)
      self.states = _masks(cell, state, cell.recurrent_dropout, self.gates)


def _masks(
    cell: compat.Layer, like: tf.Tensor, rate: float, gates: int) -> Masks:
  """Returns [n, width] dropout masks."""
  if not 0 < rate < 1:
    return None
  per_gate = getattr(cell, 'implementation', 2) == 1 and gates > 1
  return [compat.recurrent_dropout_mask(cell, like, rate)
          for _ in range(gates if per_gate else 1)]


def _product(x: tf.Tensor, matrix: tf.Tensor, masks: Masks) -> tf.Tensor:
  """Returns `x @ matrix`, the columns of each gate with a mask of their own."""
  if masks is None:
    return dense.times(x, matrix)
  if len(masks) == 1:
    return dense.times(x * masks[0], matrix)
  return tf.concat([dense.times(x * mask, part)
                    for mask, part in zip(masks, tf.split(matrix, len(masks), 1))], -1)


def _lstm(
    cell: compat.Layer, weights: _Weights, x: tf.Tensor, states: States) -> Tuple[States, States]:
  h, c = states
  z = x + _product(h, weights.recurrent, weights.states)
  z = z if weights.bias is None else z + weights.bias  # Keras adds it last.
  i, f, g, o = tf.split(z, 4, -1)
  gate = cell.recurrent_activation
  c = gate(f) * c + gate(i) * cell.activation(g)
  h = gate(o) * cell.activation(c)
  return (h, c), ()


def _gru(
    cell: compat.Layer, weights: _Weights, x: tf.Tensor, states: States) -> Tuple[States, States]:
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


def _simple(
    cell: compat.Layer, weights: _Weights, x: tf.Tensor, states: States) -> Tuple[States, States]:
  h, = states
  z = x + _product(h, weights.recurrent, weights.states)
  return (z if cell.activation is None else cell.activation(z),), ()


_STEPS = {layers.LSTMCell: _lstm, layers.GRUCell: _gru, layers.SimpleRNNCell: _simple}


def _scan(
    step: _Step, x: tf.Tensor, states: States,
    mask: Optional[tf.Tensor]) -> Tuple[tf.Tensor, States, States]:
  """Runs `step` along the first axis of x [T, n, p].

  Returns:
    Outputs [T, n, units] as Keras masks them; states [T, n, units] after each step; and other
    results of the steps.
  """
  def advance(before: Tuple[States, tf.Tensor, States], inputs: States) -> Any:
    states, output, _ = before
    new, extras = step(inputs[0], states)
    if mask is None:
      return new, new[0], extras
    keep = inputs[1]
    output = tf.where(keep, new[0], output)
    return tuple(tf.where(keep, a, b) for a, b in zip(new, states)), output, extras

  start = states, tf.zeros_like(states[0]), step(x[0], states)[1]
  after, outputs, extras = tf.scan(advance, (x,) if mask is None else (x, mask), start)
  return outputs, after, extras


def _arguments(call: registry.Call) -> Tuple[Any, Any, Any, Any]:
  """Returns `(x, mask, training, initial state or None)`."""
  inputs = call.argument(0, 'sequences', call.kwargs.get('inputs'))
  given = {**dict(zip(compat.RECURRENT_ARGUMENTS, call.args[1:])), **call.kwargs}
  state, mask = given.get('initial_state'), given.get('mask')
  if isinstance(inputs, (list, tuple)):
    inputs, state = inputs[0], list(inputs[1:]) or state
  if isinstance(mask, (list, tuple)):
    mask = mask[0]
  if state is not None and not isinstance(state, (list, tuple)):
    state = [state]
  return inputs, mask, given.get('training'), state


def tap(
    layer: compat.Layer, function: Callable[..., trees.Tree], call: registry.Call,
    tape: tf.GradientTape) -> registry.Call:
  """Runs the layer's cell over the sequence, in place of the layer's own loop."""
  del function
  cell = layer.cell
  x, mask, training, states = _arguments(call)
  if tf.is_tensor(training):
    raise registry.Unsupported(f'`training` of layer {layer.name!r} must be a Python bool. '
                               f'Received: training={training}.')
  x = tf.cast(x, layer.compute_dtype)
  if states is None:
    n, *_ = protocol.sizes(x)
    states = [tf.zeros([n, size], x.dtype) for size in tf.nest.flatten(cell.state_size)]
  weights = _Weights(cell, x, states[0], training)
  flow = tf.transpose(x, [1, 0, 2])
  if mask is not None:
    mask = tf.transpose(tf.cast(mask, tf.bool))[..., tf.newaxis]
  if layer.go_backwards:
    flow, mask = tf.reverse(flow, [0]), None if mask is None else tf.reverse(mask, [0])
  before = _product(flow, weights.kernel, weights.inputs)
  if weights.bias is not None and not isinstance(cell, layers.LSTMCell):
    before += weights.bias[0] if weights.bias.shape.rank == 2 else weights.bias
  tape.watch(before)
  step = lambda x, s: _STEPS[type(cell)](cell, weights, x, s)
  start = tuple(tf.cast(s, x.dtype) for s in states)
  outputs, after, extras = _scan(step, before, start, mask)
  if mask is not None and getattr(layer, 'zero_output_for_mask', False):
    outputs = tf.where(mask, outputs, tf.zeros_like(outputs))
  results = [tf.transpose(outputs, [1, 0, 2]) if layer.return_sequences else outputs[-1],
             *(states[-1] for states in after)]
  previous = tf.concat([start[0][tf.newaxis], after[0][:-1]], 0)
  return call._replace(
      outputs=compat.RECURRENT_RESULTS(results) if layer.return_state else results[0], taps=before,
      saved=(flow, previous, extras, weights))


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
    # The reset gate multiplies the product, so it also multiplies the cotangent.
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
    inputs: Sequence[tf.Tensor], cotangents: tf.Tensor, masks: Masks,
    variable: compat.Variable) -> factors.Outer:
  """Returns the factor of a product with masked inputs: for all gates at once, or one each."""
  if masks:
    masks = [tf.cast(mask, cotangents.dtype)[:, tf.newaxis] for mask in masks]
    count = max(len(inputs), len(masks))
    inputs = [x * mask for x, mask in zip(
        [*inputs] * (count // len(inputs)), masks * (count // len(masks)))]
  if len(inputs) > 1:  # Each gate's product becomes more steps, whose other cotangents are zero.
    gates = np.repeat(np.eye(len(inputs)), cotangents.shape[2] // len(inputs), 1)
    cotangents = tf.concat([cotangents * tf.constant(gate, cotangents.dtype) for gate in gates], 1)
  return factors.Outer(tf.concat(inputs, 1), cotangents, tuple(variable.shape))


if compat.TIME_DISTRIBUTED_FOLDS:  # Keras 2 joins steps with the batch. Keras 3 calls every step.

  @registry.register(layers.TimeDistributed, folds=True)
  def time_distributed(
      layer: compat.Layer, call: registry.Call, cotangents: tf.Tensor) -> Iterable[Any]:
    """Yields no factors, because the layer inside has all variables."""
    del layer, call, cotangents
    return ()
