# SPDX-License-Identifier: Apache-2.0
"""The batches of a plan as a `tf.data.Dataset`, padded and masked for Keras."""

import math

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive.privacy import marks


def dataset(plan, data, *, start_step=0, pad_to=None):
  """The remaining batches of a run, in one pass.

  Batches are padded with empty rows of weight zero to a multiple of `pad_to`;
  a row of weight zero must not contribute to the sum of clipped gradients. No
  record is ever dropped to fit: that would not be what was accounted for. An
  empty batch is a normal batch of empty rows.

  Args:
    plan: A `PrivacyPlan` with unit 'example'.
    data: `(x, y)`, `(x, y, sample_weight)` or `x` alone, of arrays or nested
      tuples and dicts of arrays whose leading axis is the example; or a finite,
      unbatched `tf.data.Dataset` of such elements, which is read into memory
      once (twice its size for a moment).
    start_step: Steps that the optimizer has done already, or a function that tells when
      a pass begins; the number of batches is then not known before.
    pad_to: Default: two standard deviations of the batch size, so that a
      handful of shapes occurs; for a single one under XLA choose a few standard
      deviations (square roots of `batch_size`) above `batch_size`. Fixed-order
      batches are padded to `batch_size`, truncated ones to `max_batch_size`.

  Returns:
    A data set of `(x, y, sample_weight)` with `plan.steps - start_step`
    elements; its attributes `tfdp_plan` and `tfdp_start_step` say what it is
    for. Every batch is marked for its step (see `marks`), which takes no other:
    use them in their order, in `fit`, `train_on_batch` or a loop of your own.
    Every iteration draws new coins, so use one pass: `fit(batches,
    steps_per_epoch=..., epochs=...)` continues through it. A later pass needs
    a new call with `start_step=optimizer.steps_done`.

  Raises:
    ValueError: If the number of examples is not the plan's population size, if
      the leading axes differ, or if the plan is not example-level.
  """
  if plan.unit != 'example':
    raise ValueError(
        'Batches of examples can only serve a plan with unit="example". For user-level privacy '
        'use `plan.index_batches()` to choose users and train with `tfdp.federated`. '
        f'Received: unit={plan.unit!r}.')
  if isinstance(data, tf.data.Dataset):
    data = _read(data)
  arrays = _map(_array, data)
  size = _common_length(arrays)
  multiple = _default_multiple(plan) if pad_to is None else pad_to
  checks.whole(pad_to=multiple)
  later = callable(start_step)  # Known when a pass begins: a run may be restored before.
  now = start_step() if later else start_step
  first = plan.index_batches(size, now)  # Fails here, not in a tf.data thread.
  passes = _passes(first, lambda: plan.index_batches(size, now))

  def generate():
    start = start_step() if later else now
    indices_of_steps = plan.index_batches(size, start) if later else next(passes)
    for step, indices in enumerate(indices_of_steps, start):
      yield _marked(_batch(arrays, indices, multiple), plan, step)

  signature = _map(
      lambda a: tf.TensorSpec((None,) + a.shape[1:], tf.as_dtype(a.dtype)),
      _marked(_batch(arrays, np.zeros([0], np.int64), 1), plan, now))
  result = tf.data.Dataset.from_generator(generate, output_signature=signature)
  if not later:
    result = result.apply(tf.data.experimental.assert_cardinality(plan.steps - now))
  if not _is_pair(arrays):
    result = result.map(lambda x, weight: (x, None, weight))
  result = result.prefetch(2)
  result.tfdp_plan = plan
  result.tfdp_start_step = now
  result.tfdp_from = lambda step: dataset(plan, arrays, start_step=step, pad_to=pad_to)
  return result


def _passes(first, again):
  yield first
  while True:
    yield again()


def _batch(arrays, indices, multiple):
  """`(x, y, weight)`, or `(x, weight)`, padded to a positive multiple of rows."""
  rows = multiple * max(1, math.ceil(len(indices) / multiple))
  weight = np.zeros(rows, np.float32)
  weight[:len(indices)] = 1

  def padded(array):
    shape = (rows,) + array.shape[1:]
    value = np.full(shape, b'', object) if array.dtype == object else np.zeros(shape, array.dtype)
    value[:len(indices)] = array[indices]
    return value

  batch = _map(padded, arrays)
  if not _is_pair(arrays):
    return batch, weight
  if len(batch) == 3:
    weight = _map(lambda w: w.astype(np.float32) * weight.reshape((-1,) + (1,) * (w.ndim - 1)),
                  batch[2])
  return batch[0], batch[1], weight


def _marked(batch, plan, step):
  *rest, weight = batch
  return (*rest, _map(lambda w: marks.write(w, plan, step), weight))


def _is_pair(data):
  return isinstance(data, tuple) and len(data) in (2, 3)


def _default_multiple(plan):
  size = getattr(plan.sampling, 'max_batch_size', None)
  if size is None and not plan.sampling.amplified and hasattr(
      plan.sampling, 'batches_per_epoch'):
    size = plan.batch_size
  return int(size or math.ceil(2 * math.sqrt(plan.batch_size)))


def _map(function, data):
  """Over tuples and dicts only: a list is an array here."""
  if isinstance(data, tuple):
    return tuple(_map(function, value) for value in data)
  if isinstance(data, dict):
    return {name: _map(function, value) for name, value in data.items()}
  return function(data)


def _leaves(data):
  if isinstance(data, (tuple, dict)):
    values = data.values() if isinstance(data, dict) else data
    return [leaf for value in values for leaf in _leaves(value)]
  return [data]


def _array(value):
  if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
    raise ValueError('`data` must be dense arrays with the example as leading axis; pad or '
                     f'densify it first. Received: {type(value).__name__}.')
  try:
    array = np.asarray(value)
  except ValueError as error:
    raise ValueError('`data` must be rectangular arrays with the example as leading axis; pad '
                     'examples of different lengths first.') from error
  if array.dtype.kind in 'US':
    array = array.astype(object)
  if array.ndim < 1 or (array.dtype == object and not all(
      isinstance(item, (str, bytes)) for item in array.ravel())):
    raise ValueError('`data` must be numeric or string arrays with the example as leading axis. '
                     f'Received: shape={array.shape}, dtype={array.dtype}.')
  return array


def _common_length(arrays):
  lengths = sorted({len(leaf) for leaf in _leaves(arrays)})
  if len(lengths) != 1:
    raise ValueError('All arrays of `data` must have the same number of examples. '
                     f'Received: lengths={lengths}.')
  return lengths[0]


def _read(data):
  if int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
    raise ValueError('`data` must be finite: the plan draws its own batches. Remove `.repeat()`.')
  elements = list(data.as_numpy_iterator())
  if not elements:
    raise ValueError('`data` has no examples.')

  def stack(*values):
    if isinstance(values[0], tuple):
      return tuple(stack(*parts) for parts in zip(*values))
    if isinstance(values[0], dict):
      return {name: stack(*(value[name] for value in values)) for name in values[0]}
    if len({np.shape(value) for value in values}) > 1:
      raise ValueError('`data` must have elements of one shape; pad them with `.map`, and unbatch '
                       'a batched data set with `.unbatch()`.')
    return np.stack(values)

  return stack(*elements)
