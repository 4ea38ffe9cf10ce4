# SPDX-License-Identifier: Apache-2.0
"""The loss of one example, as Keras computes it on a batch of that example alone.

Keras reduces losses over the batch, and with masks or weights it normalises by
sums over all examples, so that one example's gradient depends on the others.
Here every loss is computed unreduced and then reduced within its example; and one
that is not known to keep examples apart is given one example at a time.
"""

import re
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import mapping

# Keras' losses that no other example can change, if they reduce the last axis. Among the others,
# hinge losses decide by all labels of a batch whether these are zeros and ones.
_named = compat.losses_named
_CLASSES = _named('sparse_categorical_crossentropy', 'SparseCategoricalCrossentropy')
_SPARSE = _CLASSES + _named('ctc', 'CTC')  # Losses of integer targets.
_DENSE = _named(
    'mean_squared_error', 'MeanSquaredError', 'mean_absolute_error', 'MeanAbsoluteError',
    'mean_absolute_percentage_error', 'MeanAbsolutePercentageError',
    'mean_squared_logarithmic_error', 'MeanSquaredLogarithmicError', 'cosine_similarity',
    'CosineSimilarity', 'huber', 'Huber', 'log_cosh', 'LogCosh', 'categorical_hinge',
    'CategoricalHinge', 'kl_divergence', 'KLDivergence', 'poisson', 'Poisson',
    'binary_crossentropy', 'BinaryCrossentropy', 'binary_focal_crossentropy',
    'BinaryFocalCrossentropy', 'categorical_crossentropy', 'CategoricalCrossentropy',
    'categorical_focal_crossentropy', 'CategoricalFocalCrossentropy')


class Part(NamedTuple):
  """The loss of one output."""

  names: Tuple[str, ...]  # Names of the output.
  values: tf.Tensor  # [n].
  weight: Any  # None, or the scalar by which the values are multiplied.
  adds: bool  # Whether the loss of a batch is the sum of its examples' losses, not the mean.


class ExampleLoss:
  """`(y, outputs, sample_weight) -> [n]` for the arguments of `compile`.

  Args:
    loss: Name, function, `keras.losses.Loss`, or a list/dict of them, one per output.
    loss_weights: None, or scalars in the same structure.
    output_names: Names of the outputs, to match dictionaries.
  """

  def __init__(
      self, loss: Any, loss_weights: Any = None,
      output_names: Optional[Sequence[str]] = None) -> None:
    if loss is None:
      raise ValueError('`loss` must be given: a DP model needs the loss of every single example. '
                       'Received: loss=None. Pass `loss=` to `compile`.')
    self._names = list(output_names or [])
    self._loss, self._weights = loss, loss_weights
    if self._names:  # Otherwise they are known when there are outputs.
      _spread(loss, [(name,) for name in self._names], 'loss')
    for one in loss.values() if isinstance(loss, dict) else _listed(loss):
      _check(_only(one))

  def __call__(self, y: Any, outputs: Any, sample_weight: Any = ()) -> tf.Tensor:
    total = 0.0
    for one in self.each(y, outputs, sample_weight):
      total += one.values if one.weight is None else one.weight * one.values
    return total

  @property
  def adds(self) -> bool:
    """Whether the only loss of a batch is the sum of its examples' losses, not the mean."""
    losses = self._loss.values() if isinstance(self._loss, dict) else _listed(self._loss)
    return [_reduction(_only(one)) for one in losses if one is not None] == ['sum']

  def weights(self, outputs: Any, sample_weight: Any) -> List[Any]:
    """Returns the sample weights of each flat output, None where there are none."""
    return _spread(None if _absent(sample_weight) else sample_weight, self._names_of(outputs),
                   'sample_weight')

  def each(self, y: Any, outputs: Any, sample_weight: Any = ()) -> Iterator[Part]:
    """Yields the loss of every output that has one."""
    names = self._names_of(outputs)
    flat = tf.nest.flatten(outputs)
    losses, targets = _spread(self._loss, names, 'loss'), _spread(y, names, 'y', once=True)
    if not len(losses) == len(flat) == len(targets):
      raise ValueError('`loss` and `y` must have one entry per model output. Received: '
                       f'{len(losses)} losses, {len(targets)} targets, {len(flat)} outputs.')
    weights = _spread(self._weights, names, 'loss_weights')
    for name, one, weight, target, output, sw in zip(
        names, losses, weights, targets, flat, self.weights(outputs, sample_weight)):
      if one is not None:
        if target is None:
          raise ValueError(
              'Every example needs a target. Received: none. Feed pairs such as `(x, y)`, or '
              '`(x, x)` for a model that reproduces its input.')
        yield Part(name, _example_values(one, target, output, sw), weight,
                   _reduction(one) == 'sum')

  def _names_of(self, outputs: Any) -> List[Tuple[str, ...]]:
    """Returns the names of each flat output: its key, and the name in the model."""
    count = len(tf.nest.flatten(outputs))
    names: List[Tuple[str, ...]] = [()] * count
    if len(self._names) == count:
      names = [(name,) for name in self._names]
    if isinstance(outputs, dict) and len(outputs) == count:  # Flattened in the order of keys.
      names = [(key, *more) for key, more in zip(sorted(outputs), names)]
    return names


def _example_values(
    loss: Any, target: tf.Tensor, output: tf.Tensor, sample_weight: Any) -> tf.Tensor:
  """[n]: the mean (or sum, as the loss reduces) within every example."""
  mask = getattr(output, '_keras_mask', None)
  output = tf.convert_to_tensor(output)
  if output.dtype.is_floating:
    output = tf.cast(output, trees.wide(output.dtype))
  target = tf.convert_to_tensor(target)
  if output.shape.rank == target.shape.rank + 1 and output.shape[-1] == 1:
    target = target[..., tf.newaxis]  # As Keras does: [n] targets for [n, 1] outputs.
  if isinstance(loss, compat.keras.losses.Loss) and not _keeps_apart(loss, target, output):
    return _by_keras(loss, target, output, mask, sample_weight)
  target, outside = _classes_in_range(loss, target, output)
  values, valid = _unreduced(loss, target, output)
  weights = tf.ones_like(values)
  count = tf.ones_like(values)
  for some in (mask, valid):
    if some is not None:
      count *= _align(tf.cast(some, values.dtype), values)
  weights *= count
  if sample_weight is not None:
    weights *= _align(tf.cast(sample_weight, values.dtype), values)
  axes = list(range(1, values.shape.rank))
  total = tf.reduce_sum(tf.math.multiply_no_nan(values, weights), axes)
  if outside is not None:  # No loss at all, so that the example counts as no record.
    outside = tf.reduce_any(tf.reshape(outside, tf.shape(values)) & (weights != 0), axes)
    total *= tf.where(outside, tf.constant(float('nan'), total.dtype), tf.ones_like(total))
  if _reduction(loss) == 'sum':
    return total
  return tf.math.divide_no_nan(total, tf.reduce_sum(count, axes))


def _by_keras(
    loss: Any, target: tf.Tensor, output: tf.Tensor, mask: Any, sample_weight: Any) -> tf.Tensor:
  """Returns the losses [n] that Keras computes of batches of one example."""
  more = {'mask': mask, 'weight': sample_weight}
  more = {name: tf.convert_to_tensor(one) for name, one in more.items() if one is not None}

  def alone(record: Any) -> tf.Tensor:
    target, output, *rest = [tf.expand_dims(t, 0) for t in record]
    given = dict(zip(more, rest))
    if 'mask' in given:
      output._keras_mask = given['mask']
    value = compat.loss_of_batch(loss, target, output, given.get('weight'))
    return tf.reduce_mean(tf.cast(value, record[1].dtype))

  _refuse_state(loss, alone, target, output, *more.values())
  if not compat.has_own_call(loss):  # An own call may return a scalar.
    _unreduced_shape(loss, loss.call(target, output), output)
  values = _one_by_one(alone, target, output, *more.values(), scalar=True)
  if sample_weight is None:
    return values
  used = tf.not_equal(more['weight'], 0)
  used = tf.reduce_any(used, list(range(1, used.shape.rank)))
  return tf.where(used, values, tf.zeros_like(values))


def _unreduced_shape(loss: Any, values: tf.Tensor, output: tf.Tensor) -> None:
  """Refuses a loss that has reduced the batch."""
  if not values.shape.rank or not values.shape[:1].is_compatible_with(output.shape[:1]):
    raise _not_per_example(loss, values, output)


def _unreduced(loss: Any, target: tf.Tensor, output: tf.Tensor) -> Tuple[tf.Tensor, Any]:
  """Returns the loss [n, ...] of each example by itself, and its mask if it has one."""
  function = getattr(loss, 'call', loss)
  known = _keeps_apart(loss, target, output)
  if not known:
    _refuse_state(loss, lambda record: function(*[t[tf.newaxis] for t in record]), target, output)
  raw = function(target, output)
  values = tf.cast(raw, output.dtype)
  _unreduced_shape(loss, values, output)
  if known or output.shape[0] == 1:
    return values, getattr(raw, '_keras_mask', None)
  # Where sizes are static nothing reads `values`, and graphs leave its computation out.
  sizes = values.shape[1:] if values.shape[1:].is_fully_defined() else tf.shape(values)[1:]

  def alone(record: Any) -> tf.Tensor:
    # The gradient of `t[tf.newaxis]` would write all outputs once more.
    value = function(*[tf.expand_dims(t, 0) for t in record])
    if values.shape[1:].num_elements() not in (None, value.shape.num_elements()):
      raise _not_per_example(loss, value, record[1][tf.newaxis])
    return tf.ensure_shape(
        tf.reshape(tf.cast(value, output.dtype), sizes), values.shape[1:])

  return _one_by_one(alone, target, output, scalar=not values.shape.rank - 1), None


def _one_by_one(
    alone: Callable[..., Any], target: Any, output: Any, *more: Any, scalar: bool) -> Any:
  """`alone` of every record, its gradient taken inside the map as well.

  Outside, TensorFlow would differentiate how the map picks its records, which costs more
  than the loss.
  """
  def value_and_gradient(record: Any, cotangent: Any = None) -> Tuple[Any, Any]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(record[1])
      value = alone(record)
    gradient = tape.gradient(value, record[1], output_gradients=cotangent)
    return value, tf.zeros_like(record[1]) if gradient is None else gradient

  @tf.custom_gradient
  def run(output: Any) -> Any:
    if scalar:
      values, gradients = mapping.vectorized(value_and_gradient, (target, output, *more))
    else:
      values = mapping.vectorized(alone, (target, output))

    def backward(cotangents: Any, variables: Any = ()) -> Any:
      if scalar:
        shape = [-1] + [1] * (output.shape.rank - 1)
        products = tf.math.multiply_no_nan(gradients, tf.reshape(cotangents, shape))
      else:
        products = mapping.vectorized(
            lambda record: value_and_gradient(record[:2], record[2])[1],
            (target, output, cotangents))
      return (products, [None] * len(variables)) if variables else products

    return values, backward

  return run(output)


def _classes_in_range(
    loss: Any, target: tf.Tensor, output: tf.Tensor) -> Tuple[tf.Tensor, Optional[tf.Tensor]]:
  """Returns labels moved into the range of classes, and which ones were outside.

  A label out of range aborts the program on a CPU: one record could stop a training.
  """
  if not any(_kind(loss) is one for one in _CLASSES) or not _keeps_apart(loss, target, output):
    return target, None
  classes = tf.cast(target, tf.int64)
  outside = (classes < 0) | (classes >= tf.cast(tf.shape(output)[-1], tf.int64))
  ignored = getattr(loss, 'ignore_class', getattr(loss, '_fn_kwargs', {}).get('ignore_class'))
  if ignored is not None:
    outside &= classes != ignored
  return tf.where(outside, tf.zeros_like(target), target), outside


def _kind(loss: Any) -> Any:
  return type(loss) if isinstance(loss, compat.keras.losses.Loss) else loss


def _keeps_apart(loss: Any, target: tf.Tensor, output: tf.Tensor) -> bool:
  """Whether a loss is known to look at one example at a time."""
  kind = _kind(loss)
  sparse, dense = (any(kind is one for one in known) for known in (_SPARSE, _DENSE))
  if output.shape.rank < 2 or getattr(loss, '_fn_kwargs', {}).get('axis', -1) != -1:
    return False
  return (sparse or dense) and target.shape.rank == output.shape.rank or (
      sparse and target.shape.rank == output.shape.rank - 1)


def _refuse_state(loss: Any, alone: Callable[..., Any], *records: tf.Tensor) -> None:
  """Refuses a loss that writes variables: data would reach later steps around clip and noise."""
  concrete = mapping.traced(alone, records)
  for operation in mapping.operations(concrete):
    if re.match('Assign|ResourceScatter', operation):
      raise ValueError(
          '`loss` must not write variables: what it keeps of the data is neither clipped nor '
          f'noised. Received: operation {operation} in {loss}. Compute it from labels and outputs '
          'alone.')


def _not_per_example(loss: Any, values: tf.Tensor, output: tf.Tensor) -> ValueError:
  return ValueError(
      f'`loss` must return one value per example. Received: shape {values.shape} from {loss} for '
      f'outputs of shape {output.shape}. Return the unreduced loss; the library reduces it within '
      'each example.')


def _align(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
  """Weights of fewer axes (per example, per time step) against unreduced values."""
  while weights.shape.rank > values.shape.rank and weights.shape[-1] == 1:
    weights = tf.squeeze(weights, -1)
  if weights.shape.rank > values.shape.rank:
    raise ValueError('`sample_weight` or a mask must not have more axes than the unreduced loss. '
                     f'Received: {weights.shape} for values of shape {values.shape}.')
  while weights.shape.rank < values.shape.rank:
    weights = weights[..., tf.newaxis]
  return weights * tf.ones_like(values)


def _reduction(loss: Any) -> str:
  reduction = str(getattr(loss, 'reduction', None) or 'none')
  return reduction.lower().rpartition('.')[2]


def _check(loss: Any) -> None:
  if loss is None or isinstance(loss, str):
    return
  reduction = _reduction(loss)
  if 'mean_with_sample_weight' in reduction:
    raise ValueError(
        '`reduction` must not divide by the sum of sample weights: one example would then change '
        f'the gradients of the others. Received: reduction={reduction!r}. '
        "Use 'sum_over_batch_size'.")
  if type(loss).__name__ == 'Circle' or getattr(loss, '__name__', '') == 'circle':
    raise ValueError('`loss` must be of each example alone. Received: the circle loss, which '
                     'compares the examples of a batch.')
  if not callable(getattr(loss, 'call', loss)):
    raise ValueError(f'`loss` must be a name, a function or a keras Loss. Received: {loss!r}.')


def _spread(
    value: Any, names: Sequence[Tuple[str, ...]], what: str, once: bool = False) -> List[Any]:
  """A list with an entry per output: from a dict by name, a list in order, or one for all.

  Args:
    value: The value passed to `compile` or `fit`.
    names: For each output the names it may be called by.
    what: Name of the argument, for errors.
    once: Whether one entry is for one output only.
  """
  if isinstance(value, dict) and any(names):
    unknown = set(value) - {name for alternatives in names for name in alternatives}
    if unknown:
      known = [alternatives[0] for alternatives in names]
      raise ValueError(f'`{what}` must name model outputs {known}. Received: {sorted(unknown)}.')
    value = [next((value[name] for name in alternatives if name in value), None)
             for alternatives in names]
  elif isinstance(value, dict):
    value = tf.nest.flatten(value)
  else:
    value = _listed(value)
  value = [tf.keras.losses.get(v) if isinstance(v, str) else v for v in map(_only, value)]
  return value * len(names) if len(value) == 1 and not once else value


def _only(value: Any) -> Any:
  """Returns the entry of a list of one, which Keras accepts for an output."""
  return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _listed(value: Any) -> List[Any]:
  return list(value) if isinstance(value, (list, tuple)) else [value]


def _absent(tree: Any) -> bool:
  return tree is None or trees.absent(tree)
