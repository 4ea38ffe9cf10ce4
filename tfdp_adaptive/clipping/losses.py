# SPDX-License-Identifier: Apache-2.0
"""Computes the loss of one example, as Keras computes it on a batch of that example alone.

Keras reduces losses over the batch. With masks or weights it divides by sums over all examples, so
one example's gradient depends on the others. Here every loss is computed unreduced and then reduced
within its example. A loss that may compare examples is called with one example at a time.
"""

import re
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees

# Keras' losses that treat examples separately if they reduce the last axis. Hinge losses do not:
# they test whether all labels of a batch are zeros and ones.
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


Names = Tuple[str, ...]  # Names of an output.
Inspect = Callable[[compat.Function], None]


class Part(NamedTuple):
  """The loss of one output."""

  names: Names  # () in a structure of losses.
  values: tf.Tensor  # [n].
  weight: Optional[trees.Scalar]  # Factor of the values, or None.
  adds: bool  # Whether the loss of a batch is the sum of its examples' losses, not the mean.


class ExampleLoss:
  """`(y, outputs, sample_weight) -> [n]` for the arguments of `compile`.

  Args:
    loss: Name, function, `keras.losses.Loss`, or a list/dict of them, one per output.
    loss_weights: None, or scalars in the same structure.
    output_names: Names of the outputs, to match dictionaries.
    inspect: Is called with the graph for one example of every loss that is not known to be
      Keras' own.
  """

  def __init__(
      self, loss: Union[compat.Loss, trees.Tree], loss_weights: trees.Tree = None,
      output_names: Optional[Sequence[str]] = None,
      inspect: Inspect = lambda concrete: None) -> None:
    if loss is None:
      raise ValueError('`loss` must be given: a DP model needs the loss of every single example. '
                       'Received: loss=None. Pass `loss=` to `compile`.')
    self._names = list(output_names or [])
    self._loss, self._weights, self._inspect = loss, loss_weights, inspect
    inside = loss.values() if isinstance(loss, dict) else (
        loss if isinstance(loss, (list, tuple)) else ())
    self._is_nested = any(
        isinstance(one, dict) or isinstance(one, (list, tuple)) and len(one) != 1
        for one in inside)
    if self._names and not self._is_nested:  # Otherwise they are known when there are outputs.
      _spread(loss, [(name,) for name in self._names], 'loss')
    for one in tf.nest.flatten(loss):
      _check(one)

  def __call__(
      self, y: trees.Tree, outputs: trees.Tree, sample_weight: trees.Tree = ()) -> tf.Tensor:
    total = 0.0
    for one in self.each(y, outputs, sample_weight):
      total += one.values if one.weight is None else one.weight * one.values
    return total

  @property
  def adds(self) -> bool:
    """Returns whether the only loss of a batch is the sum of its examples' losses, not the mean."""
    return [_reduction(one) for one in tf.nest.flatten(self._loss) if one is not None] == ['sum']

  def weights(
      self, outputs: trees.Tree, sample_weight: trees.Tree) -> List[Optional[tf.Tensor]]:
    """Returns the sample weights of each flat output, None where there are none."""
    weights = None if trees.absent(sample_weight) else sample_weight
    return _spread(weights, self._names_of(outputs), 'sample_weight')

  def each(
      self, y: trees.Tree, outputs: trees.Tree, sample_weight: trees.Tree = ()) -> Iterator[Part]:
    """Yields the loss of every output that has one."""
    if self._is_nested:
      yield from self._each_nested(y, outputs, sample_weight)
      return
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
        if isinstance(one, str):
          one = compat.named_loss(one, tf.convert_to_tensor(target), output)
        yield Part(name, _example_values(one, target, output, sw, self._inspect), weight,
                   _reduction(one) == 'sum')

  def _each_nested(
      self, y: trees.Tree, outputs: trees.Tree, sample_weight: trees.Tree) -> Iterator[Part]:
    """Yields the parts of a structure of losses, some of which may be of several outputs."""
    given = [] if trees.absent(sample_weight) else [sample_weight]
    if isinstance(y, dict) and not isinstance(outputs, dict):
      y = [y[name] for name in self._names]
    y = tf.nest.pack_sequence_as(outputs, tf.nest.flatten(y))
    for one, weight, pick in compat.nested_losses(
        self._loss, self._weights, self._names, y, outputs):
      target, output = pick(y), pick(outputs)
      more = [pick(some) if tf.nest.is_nested(some) else some for some in given]
      if tf.nest.is_nested(output):
        values = _of_several(one, self._inspect, target, output, *more)
      else:
        one = one.fn if type(one).__name__ == 'LossFunctionWrapper' else one
        values = _example_values(
            one, target, output, more[0] if more else None, self._inspect)
      yield Part((), values, weight, _reduction(one) == 'sum')

  def _names_of(self, outputs: trees.Tree) -> List[Names]:
    """Returns the names of each flat output: its key, and the name in the model."""
    count = len(tf.nest.flatten(outputs))
    names: List[Names] = [()] * count
    if len(self._names) == count:
      names = [(name,) for name in self._names]
    if isinstance(outputs, dict) and len(outputs) == count:  # Flattened in the order of keys.
      names = [(key, *more) for key, more in zip(sorted(outputs), names)]
    return names


def _example_values(
    loss: compat.Loss, target: tf.Tensor, output: tf.Tensor,
    sample_weight: Optional[tf.Tensor], inspect: Inspect) -> tf.Tensor:
  """Returns [n] losses: the mean over an example, or the sum if the loss reduces by sums."""
  mask = getattr(output, '_keras_mask', None)
  output = tf.convert_to_tensor(output)
  if output.dtype.is_floating:
    output = tf.cast(output, trees.wide(output.dtype))
  target = tf.convert_to_tensor(target)
  if output.shape.rank == target.shape.rank + 1 and output.shape[-1] == 1:
    target = target[..., tf.newaxis]  # Keras accepts [n] targets for [n, 1] outputs.
  if _keeps_apart(loss, target, output):
    target, outside = _classes_in_range(loss, target, output)
    raw = _unreduced(loss, target, output)
    return _within(loss, raw, output.dtype, mask, sample_weight, outside)
  return _one_by_one(loss, target, output, mask, sample_weight, inspect)


def _within(
    loss: compat.Loss, raw: tf.Tensor, dtype: tf.DType, mask: Optional[tf.Tensor],
    sample_weight: Optional[tf.Tensor], outside: Optional[tf.Tensor] = None) -> tf.Tensor:
  """Returns unreduced losses [n, ...] reduced within each example."""
  values = tf.cast(raw, dtype)
  count = tf.ones_like(values)
  for some in (mask, getattr(raw, '_keras_mask', None)):
    if some is not None:
      count *= _align(tf.cast(some, dtype), values)
  weights = count
  if sample_weight is not None:
    weights *= _align(tf.cast(sample_weight, dtype), values)
  axes = list(range(1, values.shape.rank))
  total = tf.reduce_sum(tf.math.multiply_no_nan(values, weights), axes)
  if outside is not None:  # A loss of NaN, so that the example is left out.
    outside = tf.reduce_any(tf.reshape(outside, tf.shape(values)) & (weights != 0), axes)
    total *= tf.where(outside, tf.constant(float('nan'), dtype), tf.ones_like(total))
  if _reduction(loss) == 'sum':
    return total
  return tf.math.divide_no_nan(total, tf.reduce_sum(count, axes))


def _of_several(loss: compat.Loss, inspect: Inspect, *record: trees.Tree) -> tf.Tensor:
  """Returns the losses [n] of targets, outputs and perhaps weights that are structures."""
  def alone(record: trees.Tree) -> tf.Tensor:
    batch = tf.nest.map_structure(lambda t: tf.expand_dims(t, 0), record)
    return tf.reduce_mean(compat.loss_of_batch(loss, *batch))

  record = tf.nest.map_structure(tf.convert_to_tensor, record)
  _refuse_state(loss, inspect, alone, *record)
  return compat.vectorized(alone, record)


def _unreduced(loss: compat.Loss, target: tf.Tensor, output: tf.Tensor) -> Any:
  """Returns the losses [n, ...]. Raises for a loss that has reduced the batch."""
  function: Any = getattr(loss, 'call', loss)
  raw = tf.convert_to_tensor(function(target, output))
  if not raw.shape.rank or not raw.shape[:1].is_compatible_with(output.shape[:1]):
    raise _not_per_example(loss, raw, output)
  return raw


def _one_by_one(
    loss: compat.Loss, target: tf.Tensor, output: tf.Tensor, mask: Optional[tf.Tensor],
    sample_weight: Optional[tf.Tensor], inspect: Inspect) -> tf.Tensor:
  """Returns the losses [n] of batches of one example: a loss of Keras reduces them itself.

  The gradient is also taken inside the map. Outside, TensorFlow would differentiate the selection
  of records, which costs more than the loss.
  """
  is_function = not isinstance(loss, compat.keras.losses.Loss)
  more = {'mask': mask, 'weight': sample_weight}
  more = {name: tf.convert_to_tensor(one) for name, one in more.items() if one is not None}
  records = (target, output, *more.values())

  def called(record: trees.Tree) -> Tuple[tf.Tensor, Dict[str, tf.Tensor]]:
    # The gradient of `t[tf.newaxis]` would write all outputs once more.
    target, output, *rest = [tf.expand_dims(t, 0) for t in record]
    given = dict(zip(more, rest))
    if is_function:
      return tf.convert_to_tensor(loss(target, output)), given
    if 'mask' in given:
      output._keras_mask = given['mask']
    return compat.loss_of_batch(loss, target, output, given.get('weight')), given

  _refuse_state(loss, inspect, lambda record: called(record)[0], *records)
  # If its sizes are static, nothing reads it. An own call may return a scalar.
  whole: Any = None if compat.has_own_call(loss) else _unreduced(loss, target, output)
  if is_function and output.shape[0] == 1:
    return _within(loss, whole, output.dtype, mask, sample_weight)

  def alone(record: trees.Tree) -> tf.Tensor:
    value, given = called(record)
    if not is_function:
      return tf.reduce_mean(tf.cast(value, output.dtype))
    sizes = whole.shape[1:]
    if sizes.num_elements() not in (None, value.shape.num_elements()):
      raise _not_per_example(loss, value, record[1][tf.newaxis])
    value = tf.ensure_shape(tf.reshape(value, tf.concat(
        [[1], sizes if sizes.is_fully_defined() else tf.shape(whole)[1:]], 0)), [1, *sizes])
    return tf.squeeze(_within(loss, value, output.dtype, given.get('mask'), given.get('weight')))

  def value_and_gradient(record: trees.Tree) -> Tuple[tf.Tensor, tf.Tensor]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(record[1])
      value = alone(record)
    gradient = tape.gradient(value, record[1])
    return value, tf.zeros_like(record[1]) if gradient is None else gradient

  @tf.custom_gradient
  def run(output: tf.Tensor) -> Any:
    values, gradients = compat.vectorized(value_and_gradient, records)

    def backward(cotangents: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> Any:
      shape = [-1] + [1] * (output.shape.rank - 1)
      products = tf.math.multiply_no_nan(gradients, tf.reshape(cotangents, shape))
      return (products, [None] * len(variables)) if variables else products

    return values, backward

  values = run(output)
  if sample_weight is None:
    return values
  used = tf.not_equal(more['weight'], 0)
  used = tf.reduce_any(used, list(range(1, used.shape.rank)))
  return tf.where(used, values, tf.zeros_like(values))


def _classes_in_range(
    loss: compat.Loss, target: tf.Tensor,
    output: tf.Tensor) -> Tuple[tf.Tensor, Optional[tf.Tensor]]:
  """Returns labels in the range of classes, and which ones were replaced.

  A label out of range aborts the program on a CPU, so that one record could stop a training.
  """
  if _kind(loss) not in _CLASSES or not _keeps_apart(loss, target, output):
    return target, None
  classes = tf.cast(target, tf.int64)
  outside = (classes < 0) | (classes >= tf.cast(tf.shape(output)[-1], tf.int64))
  ignored = getattr(loss, 'ignore_class', getattr(loss, '_fn_kwargs', {}).get('ignore_class'))
  if ignored is not None:
    outside &= classes != ignored
  return tf.where(outside, tf.zeros_like(target), target), outside


def _kind(loss: compat.Loss) -> Union[type, Callable[..., tf.Tensor]]:
  return type(loss) if isinstance(loss, compat.keras.losses.Loss) else loss


def _keeps_apart(loss: compat.Loss, target: tf.Tensor, output: tf.Tensor) -> bool:
  """Returns whether a loss is known to treat examples separately."""
  if output.shape.rank < 2 or getattr(loss, '_fn_kwargs', {}).get('axis', -1) != -1:
    return False
  if target.shape.rank == output.shape.rank:
    return _kind(loss) in _SPARSE + _DENSE
  return _kind(loss) in _SPARSE and target.shape.rank == output.shape.rank - 1


def _refuse_state(
    loss: compat.Loss, inspect: Inspect, alone: Callable[[trees.Tree], tf.Tensor],
    *records: tf.Tensor) -> None:
  """Raises for a loss that writes variables, so that data reach later steps without noise."""
  concrete = compat.traced(alone, records)
  inspect(concrete)
  for operation in compat.operations(concrete):
    if re.match('Assign|ResourceScatter', operation):
      raise ValueError(
          '`loss` must not write variables: what it keeps of the data is neither clipped nor '
          f'noised. Received: operation {operation} in {loss}. Compute it from labels and outputs '
          'alone.')


def _not_per_example(loss: compat.Loss, values: tf.Tensor, output: tf.Tensor) -> ValueError:
  return ValueError(
      f'`loss` must return one value per example. Received: shape {values.shape} from {loss} for '
      f'outputs of shape {output.shape}. Return the unreduced loss; the library reduces it within '
      'each example.')


def _align(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
  """Broadcasts weights of fewer axes (per example, per time step) to unreduced values."""
  while weights.shape.rank > values.shape.rank and weights.shape[-1] == 1:
    weights = tf.squeeze(weights, -1)
  if weights.shape.rank > values.shape.rank:
    raise ValueError('`sample_weight` or a mask must not have more axes than the unreduced loss. '
                     f'Received: {weights.shape} for values of shape {values.shape}.')
  while weights.shape.rank < values.shape.rank:
    weights = weights[..., tf.newaxis]
  return weights * tf.ones_like(values)


def _reduction(loss: compat.Loss) -> str:
  reduction = str(getattr(loss, 'reduction', None) or 'none')
  return reduction.lower().rpartition('.')[2]


def _check(loss: compat.Loss) -> None:
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
    value: trees.Tree, names: Sequence[Names], what: str, once: bool = False) -> List[Any]:
  """Returns an entry per output, from a dict by name, a list in order, or one value for all.

  Args:
    value: The value passed to `compile` or `fit`.
    names: The names of each output.
    what: Name of the argument, for errors.
    once: Whether a single entry is for a single output only.
  """
  if isinstance(value, dict) and any(names):
    unknown = set(value) - {name for alternatives in names for name in alternatives}
    if unknown:
      known = [alternatives[0] for alternatives in names]
      raise ValueError(f'`{what}` must name model outputs {known}. Received: {sorted(unknown)}.')
    value = [next((value[name] for name in alternatives if name in value), None)
             for alternatives in names]
  entries = [compat.named_loss(v) if isinstance(v, str) else v for v in _entries(value)]
  return entries * len(names) if len(entries) == 1 and not once else entries


def _entries(value: trees.Tree) -> List[Any]:
  """Returns the entries of a dict, of a list, or of one value; Keras accepts lists of one."""
  if isinstance(value, dict):
    return tf.nest.flatten(value)
  entries = value if isinstance(value, (list, tuple)) else [value]
  return [one[0] if isinstance(one, (list, tuple)) and len(one) == 1 else one for one in entries]
