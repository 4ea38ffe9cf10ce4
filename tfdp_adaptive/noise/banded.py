# SPDX-License-Identifier: Apache-2.0
"""Noise of a banded C, from its past outputs: C^-1 itself is not banded.

    x_t = (z_t - sum_{j=1}^{b-1} c_j x_{t-j}) / c_0

The history has b-1 slots, newest first, with one row each. Slots move by reference and are read in
one pass, so outside XLA a step copies no rows.
"""

from typing import Sequence, Tuple, Union

import numpy as np
import tensorflow as tf

from tfdp_adaptive import trees
from tfdp_adaptive.mechanisms import banded
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.noise import streams


@streams.recursion.register(toeplitz.BandedToeplitz)
@streams.recursion.register(banded.Banded)
def from_outputs(mechanism: Union[toeplitz.BandedToeplitz, banded.Banded]) -> streams.Recursion:
  """Returns the noise of a C whose row t is `rows[0]`, except for the last m rows."""
  rows = mechanism.rows if hasattr(mechanism, 'rows') else mechanism.coefficients[np.newaxis]
  slots, head = rows.shape[1] - 1, mechanism.steps - len(rows)
  solve = trees.one_pass(_solve)

  def advance(
      key: tf.Tensor, row: tf.Tensor, history: streams.History,
      flat: streams.Specs) -> Tuple[streams.Vectors, streams.History]:
    index = tf.clip_by_value(row - head, 0, len(rows) - 1)
    outputs = tuple(
        solve(z, tf.gather(tf.constant(rows, z.dtype), index), [slot[i] for slot in history])
        for i, z in enumerate(streams.vectors(key, flat)))
    return outputs, ((outputs,) + tuple(history))[:slots]

  return slots, advance


def _solve(x: tf.Tensor, c: tf.Tensor, slots: Sequence[tf.Tensor]) -> tf.Tensor:
  for c_j, slot in zip(tf.unstack(c)[1:], slots):
    with tf.control_dependencies([x]):  # Otherwise all products could be in memory at once.
      x -= c_j * slot
  return x / c[0]
