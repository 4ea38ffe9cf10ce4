# SPDX-License-Identifier: Apache-2.0
"""Diagnostics of a private optimizer for research. They are PRIVATE: never publish them.

The numbers of a step are computed from the records without noise. Use them for experiments on data
that need no privacy. Turn them on with `diagnostics=True` of an optimizer. `fit` then reports them
next to the loss, for the last batch of an epoch, under names that start with `private/`. They are
the quantities of Figures 4 to 6 of Ganesh et al. (2025), arXiv:2507.01129, and of Figures 1 and 3
of Li et al. (2023), arXiv:2212.00309.
"""

from typing import Dict, List, Optional, Sequence

import numpy as np
import tensorflow as tf

from tfdp_adaptive import trees
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.rules import moments

QUANTILES = (0.1, 0.5, 0.9)


def of_step(
    clipped: interface.Clipped, clips: Sequence[tf.Tensor], mask: tf.Tensor, batch_size: float,
    rule_state: trees.Tree) -> Dict[str, tf.Tensor]:
  """Returns the scalars of one step by name. If the rule has several asks, they are of the first.

  Args:
    clipped: `interface.Clipped`.
    clips: Absolute clip norms, one per ask.
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
