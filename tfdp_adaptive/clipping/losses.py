"""The loss of one example: what Keras computes on a batch of that example alone.

Keras reduces losses over the batch, and with masks or weights it normalises by
sums over all examples, so that one example's gradient depends on the others.
Here every loss is computed unreduced and then reduced within its example.
"""

import tensorflow as tf


class ExampleLoss:
  """`(y, outputs, sample_weight) -> [n]` for the arguments of `compile`.

  Args:
    loss: Name, function, `keras.losses.Loss`, or a list/dict of them, one per output.
    loss_weights: None, or scalars in the same structure.
    output_names: Names of the outputs, to match dictionaries.
  """

  def __init__(self, loss, loss_weights=None, output_names=None):
    if loss is None:
      raise ValueError('`loss` must be given: a DP model needs the loss of every single example. '
                       'Received: loss=None. Pass `loss=` to `compile`.')
    self._names = list(output_names or [])
    self._losses = _per_output(loss, self._names, 'loss')
    self._weights = (None if loss_weights is None
                     else _per_output(loss_weights, self._names, 'loss_weights'))
    for one in self._losses:
      _check(one)

  def __call__(self, y, outputs, sample_weight=()):
    outputs, targets = _flat(outputs, self._names), _flat(y, self._names)
    losses = self._losses * len(outputs) if len(self._losses) == 1 else self._losses
    if not len(losses) == len(outputs) == len(targets):
      raise ValueError('`loss` and `y` must have one entry per model output. Received: '
                       f'{len(losses)} losses, {len(targets)} targets, {len(outputs)} outputs.')
    weights = self._weights or [1.0] * len(outputs)
    weights = weights * len(outputs) if len(weights) == 1 else weights
    sample_weights = _flat(sample_weight, self._names) if not _absent(sample_weight) else []
    if len(sample_weights) <= 1:
      sample_weights = (sample_weights or [None]) * len(outputs)
    total = 0.0
    for one, weight, target, output, sw in zip(losses, weights, targets, outputs, sample_weights):
      if one is not None:
        total += weight * _example_values(one, target, output, sw)
    return total


def _example_values(loss, target, output, sample_weight):
  """[n]: the mean (or sum, as the loss reduces) within every example."""
  mask = getattr(output, '_keras_mask', None)
  output = tf.convert_to_tensor(output)
  if output.dtype in (tf.float16, tf.bfloat16):
    output = tf.cast(output, tf.float32)
  target = tf.convert_to_tensor(target)
  if output.shape.rank == target.shape.rank + 1 and output.shape[-1] == 1:
    target = target[..., tf.newaxis]  # As Keras does: [n] targets for [n, 1] outputs.
  function = getattr(loss, 'call', loss)
  values = tf.cast(function(target, output), output.dtype)
  if values.shape.rank == 0:
    raise ValueError(f'`loss` must return one value per example. Received: a scalar from {loss}. '
                     'Return the unreduced loss; the library reduces it within each example.')
  weights = tf.ones_like(values)
  count = tf.ones_like(values)
  if mask is not None:
    count = _align(tf.cast(mask, values.dtype), values)
    weights *= count
  if sample_weight is not None:
    weights *= _align(tf.cast(sample_weight, values.dtype), values)
  axes = list(range(1, values.shape.rank))
  total = tf.reduce_sum(tf.math.multiply_no_nan(values, weights), axes)
  if _reduction(loss) == 'sum':
    return total
  return tf.math.divide_no_nan(total, tf.reduce_sum(count, axes))


def _align(weights, values):
  """Weights of fewer axes (per example, per time step) against unreduced values."""
  while weights.shape.rank > values.shape.rank and weights.shape[-1] == 1:
    weights = tf.squeeze(weights, -1)
  if weights.shape.rank > values.shape.rank:
    raise ValueError('`sample_weight` or a mask must not have more axes than the unreduced loss. '
                     f'Received: {weights.shape} for values of shape {values.shape}.')
  while weights.shape.rank < values.shape.rank:
    weights = weights[..., tf.newaxis]
  return weights * tf.ones_like(values)


def _reduction(loss):
  reduction = str(getattr(loss, 'reduction', None) or 'none')
  return reduction.lower().rpartition('.')[2]


def _check(loss):
  if loss is None:
    return
  reduction = _reduction(loss)
  if 'mean_with_sample_weight' in reduction:
    raise ValueError(
        '`reduction` must not divide by the sum of sample weights: one example would then change '
        f"the gradients of the others. Received: reduction={reduction!r}. Use 'sum_over_batch_size'.")
  if not callable(getattr(loss, 'call', loss)):
    raise ValueError(f'`loss` must be a name, a function or a keras Loss. Received: {loss!r}.')


def _per_output(value, names, what):
  """Flattens a compile argument to a list, strings turned into functions."""
  if isinstance(value, dict):
    unknown = set(value) - set(names)
    if unknown:
      raise ValueError(f'`{what}` must name model outputs {names}. Received: {sorted(unknown)}.')
    value = [value.get(name) for name in names]
  elif not isinstance(value, (list, tuple)):
    value = [value]
  return [tf.keras.losses.get(v) if isinstance(v, str) else v for v in value]


def _flat(value, names):
  if isinstance(value, dict):
    if names and set(names) == set(value):
      return [value[name] for name in names]
    return tf.nest.flatten(value)
  return list(value) if isinstance(value, (list, tuple)) else [value]


def _absent(tree):
  return tree is None or (isinstance(tree, tuple) and not tree)
