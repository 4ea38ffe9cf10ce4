# SPDX-License-Identifier: Apache-2.0
"""The numbers that `fit` reports for a private step: exact, and NOT private. Never publish them.

Keras updates its own metrics here, with the weights and masks that it would use without padding.
Metrics count each example once, and weighted metrics count it by its weight.

Diagnostics are for research. The numbers of a step are computed from the records without noise. Use
them for experiments on data that need no privacy. Turn them on with `diagnostics=True` of an
optimizer. `fit` then reports them next to the loss, for the last batch of an epoch, under names
that start with `private/`. They are the quantities of Figures 4 to 6 of Ganesh et al. (2025),
arXiv:2507.01129, and of Figures 1 and 3 of Li et al. (2023), arXiv:2212.00309.
"""

import contextlib
import functools
import os
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import choices
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import losses as losses_lib
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.rules import moments

QUANTILES = (0.1, 0.5, 0.9)
_BINS = 30  # Bars of a histogram.


def of_step(
    clipped: interface.Clipped, clips: Sequence[tf.Tensor], mask: tf.Tensor, batch_size: float,
    rule_state: trees.Tree) -> Dict[str, tf.Tensor]:
  """Returns the scalars of one step by name, for the rule's first query.

  Args:
    clipped: `interface.Clipped`.
    clips: Absolute clip norms, one per query.
    mask: [n] bool, False for padding.
    batch_size: The divisor B.
    rule_state: State of the rule after the step.
  """
  norms = tf.cast(clipped.norms[0], tf.float32)
  clip = tf.cast(clips[0], tf.float32)
  finite = mask & tf.math.is_finite(norms)
  count = tf.reduce_sum(tf.cast(mask, tf.float32))
  # Records without a finite gradient, ids and labels out of range among them, were clipped to
  # zero, so they count as clipped.
  clipped_count = tf.reduce_sum(tf.cast(mask & ~(finite & (norms <= clip)), tf.float32))
  ratio, peak = projection.norm_and_peak(clipped.sums[0].total)
  values = {
      'private/records_left_out': tf.reduce_sum(tf.cast(mask & ~finite, tf.float32)),
      'private/fraction_clipped': tf.math.divide_no_nan(clipped_count, count),
      'private/mean_norm_over_clip_norm': tf.cast(ratio * peak, tf.float32) / batch_size / clip,
  }
  for quantile, value in zip(QUANTILES, _quantiles(norms, mask, count)):
    values[f'private/gradient_norm_{round(100 * quantile)}%'] = value
  if hasattr(rule_state, 'second'):
    values['private/fraction_negative'] = moments.negative_fraction(
        rule_state.second, getattr(rule_state, 'bias', 0.0))
  return values


def second_moment(optimizer: optimizer_lib.DPOptimizer) -> Optional[List[np.ndarray]]:
  """Returns the rule's second moments minus the noise, by variable; None if there are none."""
  state = optimizer.rule_state
  if not hasattr(state, 'second'):
    return None
  bias = np.asarray(getattr(state, 'bias', 0.0))
  return [np.asarray(v) - bias for v in tf.nest.flatten(state.second)]


def _quantiles(norms: tf.Tensor, mask: tf.Tensor, count: tf.Tensor) -> List[tf.Tensor]:
  """Returns lower sample quantiles of the real examples; padding is sorted to the end."""
  ordered = tf.sort(tf.where(mask, norms, tf.fill(tf.shape(norms), np.float32(np.inf))))
  last = tf.maximum(tf.cast(count, tf.int32) - 1, 0)
  return [ordered[tf.cast(q * tf.cast(last, tf.float32), tf.int32)] for q in QUANTILES]


def observe(model: compat.Model, loss: losses_lib.ExampleLoss, batch: interface.Batch,
            clipped: interface.Clipped, request: interface.Request,
            penalty: trees.Scalar) -> Dict[str, tf.Tensor]:
  """Returns loss, metrics and diagnostics of a step.

  Args:
    model: A compiled `DPModel`.
    loss: The loss of each example.
    batch: The batch that was clipped.
    clipped: What the clipping engine returned for the step.
    request: The queries of the rule in this step.
    penalty: The losses on the weights before the step, a scalar.
  """
  used = batch.mask
  batch = _with_unweighted(batch)
  outputs, masks, present = clipped.outputs, clipped.masks, batch.mask
  examples, _ = interface.joined(batch)
  if not trees.absent(batch.examples):
    outputs, masks = interface.joined(batch._replace(x=(outputs, masks)))[0].x
    present = tf.reshape(batch.examples & batch.mask[:, tf.newaxis], [-1])
  if model.reads_outputs():
    outputs = trees.map(lambda t: _blank(t, present), outputs)
  _report_losses(model, loss, examples, batch.mask, present, clipped, outputs, masks, penalty)
  padded = None if trees.absent(batch.sample_weight) else tf.cast(present, tf.float32)
  y = _targets(examples.y, outputs)
  with _kept(model), compat.counting(
      model, y, outputs, _nest(outputs, _times_masks([padded] * len(masks), masks))):
    logs = dict(model.compute_metrics(examples.x, y, outputs, _nest(outputs, _times_masks(
        loss.weights(outputs, examples.sample_weight), masks))) or {})
  optimizer = model.optimizer
  if isinstance(optimizer.clipping, choices.Automatic):  # The noisy fraction, which is released.
    within = optimizer.rule_state.estimate[0]
    logs['clipped'] = tf.clip_by_value(1 - within, 0, 1)
  if optimizer.diagnostics:
    logs.update(of_step(
        clipped, request.clips, used, optimizer.batch_size, optimizer.rule_state))
  return logs


def _with_unweighted(batch: interface.Batch) -> interface.Batch:
  """Returns the batch with all its examples in the masks; Keras counts those of weight zero."""
  if trees.absent(batch.sample_weight):
    return batch
  axes = 1 if trees.absent(batch.examples) else 2
  weights = [tf.cast(one, tf.float32) for one in tf.nest.flatten(batch.sample_weight)]
  empty = functools.reduce(tf.logical_and, [  # `padding.EMPTY` has a sign.
      tf.reduce_all((one == 0) & (tf.bitcast(one, tf.int32) < 0), list(range(axes, one.shape.rank)))
      for one in weights])
  if axes == 1:
    return batch._replace(mask=batch.mask | ~empty)
  examples = batch.examples | ~empty
  return batch._replace(mask=tf.reduce_any(examples, 1), examples=examples)


def _report_losses(
    model: compat.Model, loss: losses_lib.ExampleLoss, examples: interface.Batch, used: tf.Tensor,
    present: tf.Tensor, clipped: interface.Clipped, outputs: trees.Tree, masks: trees.Tree,
    penalty: trees.Scalar) -> None:
  """Updates the metrics of the loss, and of the losses of several outputs, as Keras does."""
  count = tf.reduce_sum(tf.cast(used, clipped.losses.dtype))
  of_batch = lambda values, adds: tf.math.divide_no_nan(
      tf.reduce_sum(values), tf.ones_like(count) if adds else count)
  if len(tf.nest.flatten(outputs)) == 1 or not model.reads_outputs():
    total = of_batch(clipped.losses, loss.adds)
  else:
    total, trackers = tf.zeros_like(count), compat.output_loss_trackers(model, examples.y, outputs)
    flat = [tf.identity(t) for t in tf.nest.flatten(outputs)]
    for output, mask in zip(flat, masks):
      if not trees.absent(mask):
        output._keras_mask = mask
    for part in loss.each(examples.y, tf.nest.pack_sequence_as(outputs, flat),
                          examples.sample_weight):
      values = tf.cast(tf.where(present, part.values, tf.zeros_like(part.values)), count.dtype)
      value = of_batch(values, part.adds)
      total += value if part.weight is None else tf.cast(part.weight, value.dtype) * value
      for name in part.names or list(trackers)[:1]:
        if name in trackers:
          trackers.pop(name).update_state(value, sample_weight=count)
  # Keras would compare the lengths of losses and weights in every step.
  compat.loss_tracker(model, outputs).update_state(
      total + tf.cast(penalty, total.dtype), sample_weight=count)


def _times_masks(weights: Sequence[Any], masks: Sequence[Any]) -> List[Any]:
  """Returns float32 weights of each output times its mask, or None where there is neither."""
  products: List[Any] = []
  for weight, mask in zip(weights, masks):
    factors = sorted((tf.cast(one, tf.float32) for one in (weight, mask)
                      if one is not None and not trees.absent(one)), key=lambda t: t.shape.rank)
    products.append(functools.reduce(trees.scaled, factors) if factors else None)
  return products


def _nest(outputs: trees.Tree, weights: List[Any]) -> Any:
  """Returns weights in the structure of the outputs, or None for none at all."""
  if all(weight is None for weight in weights):
    return None
  size = tf.shape(tf.nest.flatten(outputs)[0])[:1]
  return tf.nest.pack_sequence_as(outputs, [
      tf.ones(size) if weight is None else weight for weight in weights])


@contextlib.contextmanager
def _kept(model: compat.Model) -> Iterator[None]:
  """Undoes whatever metrics that are not of Keras write into weights."""
  metrics = {id(v) for metric in model.metrics for v in metric.variables}
  own = compat.overrides(model, 'compute_metrics') or model.has_own_metrics
  weights = [v for v in model.variables if id(v) not in metrics] if own else []
  before = [tf.identity(v) for v in weights]
  yield
  trees.assign(zip(weights, before))


def _targets(y: trees.Tree, outputs: trees.Tree) -> Any:
  """Adds an entry for outputs without a loss, because Keras 3 expects targets for all outputs."""
  if not isinstance(y, dict) or not isinstance(outputs, dict):
    return y
  return {**{name: output for name, output in outputs.items() if name not in y}, **y}


def _blank(tensor: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
  """Zeros for padding: whatever it holds, even NaN, reaches no metric."""
  mask = tf.reshape(mask, [-1] + [1] * (tensor.shape.rank - 1))
  return tf.where(mask, tensor, tf.zeros_like(tensor))


class TensorBoardHistograms(compat.keras.callbacks.Callback):
  """Writes histograms of the results of private training to TensorBoard, every epoch.

  For each trainable variable it writes `weights/...`, `update/...` (the change in the epoch) and,
  if the rule has second moments, `preconditioner/...` (log10 of the positive ones). It also writes
  the norms of all weights and of all updates. All of these are computed from noisy gradients, so
  they are as public as the weights. It writes no exact numbers, such as `diagnostics=True` or the
  losses that Keras' own TensorBoard callback writes.

  Args:
    log_dir: Folder of the event files, as for `keras.callbacks.TensorBoard`.
    every: Number of epochs between two histograms.
  """

  def __init__(self, log_dir: Union[str, 'os.PathLike[str]'], every: int = 1) -> None:
    super().__init__()
    checks.whole(every=every)
    self._log_dir, self._every = str(log_dir), every
    self._writer: Any = None
    self._before: Optional[List[np.ndarray]] = None

  def on_train_begin(self, logs: Optional[Dict[str, Any]] = None) -> None:
    optimizer = self.model.optimizer
    if any(ask.second is not None and not ask.second.private for ask in optimizer.rule.asks):
      raise errors.PrivacyError(
          f'The rule {optimizer.rule.name} keeps statistics of the data without noise, which must '
          'not be shown. Leave `TensorBoardHistograms` out.')
    self._writer = tf.summary.create_file_writer(self._log_dir)
    self._before = self._weights() if self.model.built else None

  def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
    if (epoch + 1) % self._every:
      return
    now, before = self._weights(), self._before
    names = [getattr(v, 'path', None) or v.name for v in self.model.trainable_variables]
    summaries = _summaries('weights', names, now)
    if before is not None:
      summaries += _summaries('update', names, [a - b for a, b in zip(now, before)])
    second = second_moment(self.model.optimizer)
    if second is not None:
      summaries += [_histogram(f'preconditioner/{name}', np.log10(value[value > 0]))
                    for name, value in zip(names, second) if np.any(value > 0)]
    with self._writer.as_default():
      tf.summary.experimental.write_raw_pb(
          tf.compat.v1.Summary(value=summaries).SerializeToString(), step=epoch)
    self._before = now
    self._writer.flush()

  def on_train_end(self, logs: Optional[Dict[str, Any]] = None) -> None:
    if self._writer is not None:
      self._writer.close()

  def _weights(self) -> List[np.ndarray]:
    return [compat.read(v).astype(np.float32) for v in self.model.trainable_variables]


def _summaries(kind: str, names: List[str], values: List[np.ndarray]) -> List[Any]:
  """Returns a histogram of each variable, and the norm of all."""
  norm = float(np.sqrt(sum(np.sum(np.square(value, dtype=np.float64)) for value in values)))
  return [_histogram(f'{kind}/{name}', value) for name, value in zip(names, values)] + [
      tf.compat.v1.Summary.Value(tag=f'{kind}_norm', simple_value=norm)]


def _histogram(tag: str, values: np.ndarray) -> Any:
  """Writes a histogram without the package tensorboard, which `tf.summary.histogram` needs."""
  values = np.asarray(values[np.isfinite(values)], np.float64)
  counts, edges = np.histogram(values, _BINS)
  return tf.compat.v1.Summary.Value(tag=tag, histo=tf.compat.v1.HistogramProto(
      min=values.min(initial=0.0), max=values.max(initial=0.0), num=values.size,
      sum=values.sum(), sum_squares=np.sum(values**2), bucket_limit=edges[1:], bucket=counts))
