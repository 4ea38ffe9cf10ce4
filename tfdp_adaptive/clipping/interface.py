# SPDX-License-Identifier: Apache-2.0
"""What every engine is given and what it returns.

    engine(model, loss, batch, request) -> Clipped

An engine answers every ask of a step at once. Whatever the engine, the sums it
returns change by at most one clip norm (L2, scaled space) when a record is added or
removed: `projection.project_record` is the definition, and engines are faster ways
to the same numbers.
"""

from typing import Any, NamedTuple, Tuple

import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import trees


class Batch(NamedTuple):
  """Examples along the leading axis of every tensor.

  Attributes:
    x: Nest of model inputs.
    y: Nest of targets.
    sample_weight: [n] or [n, ...] weights of the losses, or `()`.
    mask: [n] bool; False for padding, which counts as no record at all.
  """

  x: Any
  y: Any
  sample_weight: Any
  mask: tf.Tensor


class Request(NamedTuple):
  """What one step asks of the records; public, being made of past releases.

  Attributes:
    asks: The rule's asks.
    queries: The geometry of each; scales like the trainable variables.
    clips: [] absolute clip norm of each, in that geometry.
  """

  asks: Tuple[contract.Ask, ...]
  queries: Tuple[contract.Query, ...]
  clips: Tuple[Any, ...]


class Clipped(NamedTuple):
  """What an engine returns. `sums` is SECRET; so are outputs and losses."""

  sums: Tuple[contract.Sums, ...]  # One per ask, trees like `model.trainable_variables`.
  outputs: Any  # Nest of predictions for the whole batch, for metrics.
  losses: tf.Tensor  # [n] loss of every example, before masking.
  norms: Any = ()  # One [n] per ask: scaled gradient norms before clipping, for diagnostics.


def add_sums(left, right):
  return trees.map(tf.add, left, right)


def zero_sums(ask, specs):
  """The sums of an empty batch."""
  square = trees.zeros(specs) if ask.second is not None and ask.second.per_record_square else ()
  return contract.Sums(trees.zeros(specs), square)
