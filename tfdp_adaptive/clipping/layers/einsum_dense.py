"""EinsumDense, and with it every attention layer that is made of it."""

import string

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import registry


def labels(equation, rank):
  """`(inputs, kernel, outputs)` with the ellipsis spelled out."""
  left, outputs = equation.replace(' ', '').split('->')
  inputs, kernel = left.split(',')
  if '...' in inputs:
    free = [c for c in string.ascii_letters if c not in equation]
    extra = ''.join(free[:rank - len(inputs) + 3])
    inputs, outputs = inputs.replace('...', extra), outputs.replace('...', extra)
  return inputs, kernel, outputs


def _why(layer):
  if getattr(layer, 'lora_enabled', False):
    return 'LoRA'
  left, outputs = layer.equation.replace(' ', '').split('->')
  inputs, kernel = left.split(',')
  if inputs[0] != outputs[0] or inputs[0] in kernel:
    return 'the first axis is not the batch'
  return ''


@registry.register(compat.keras.layers.EinsumDense, tap=registry.at_activation, why=_why)
def einsum_dense(layer, call, errors):
  inputs, errors = (tf.cast(x, dense.wide(x.dtype)) for x in (call.inputs, errors))
  left, kernel, right = labels(layer.equation, inputs.shape.rank)
  shape = tuple(layer.kernel.shape)
  both = [c for c in left if c in right and c not in kernel]
  rows, columns = ([c for c in kernel if c in side] for side in (left, right))
  if set(rows) & set(columns):  # A matrix of its own for every index they share.
    yield layer.kernel, factors.explicit(
        tf.einsum(f'{left},{right}->{left[0]}{kernel}', inputs, errors))
  else:
    axes = tuple(kernel.index(c) for c in rows + columns)
    yield layer.kernel, factors.Outer(
        _matrix(inputs, left, both, rows), _matrix(errors, right, both, columns), shape,
        axes if axes != tuple(range(len(shape))) else ())
  if layer.bias is not None:
    yield layer.bias, dense.summed_to(errors, tuple(layer.bias.shape))


def _matrix(x, names, steps, features):
  """[n, T, d]: axes `steps` joined, then `features` joined, others summed."""
  wanted = ''.join(steps + features)
  if names != wanted:
    x = tf.einsum(f'{names}->{wanted}', x)
  sizes = [x.shape[i] if x.shape[i] is not None else tf.shape(x)[i] for i in range(x.shape.rank)]
  length, width = 1, 1
  for size in sizes[1:len(steps)]:
    length *= size
  for size in sizes[len(steps):]:
    width *= size
  return tf.reshape(x, [-1, length, width])
