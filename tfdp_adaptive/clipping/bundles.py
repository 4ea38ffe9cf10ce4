# SPDX-License-Identifier: Apache-2.0
"""Bundles of small variables, whose gradients are clipped as those of one.

A model has a bias or a scale beside almost every matrix. Norms and sums take some forty operations
a variable, however small; a bundle takes them once.
"""

import collections
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import protocol

SMALL = 2**12  # Numbers of a variable; larger ones would take longer to copy.
FULL = 2**15  # Of a bundle with room for no more: while it is made, its gradients are held twice.
Bundle = Tuple[int, ...]  # Places of variables; most have one.


def of(
    per_variable: Sequence[Optional[protocol.Factor]],
    kinds: Sequence[Any]) -> Tuple[List[Bundle], List[Optional[protocol.Factor]]]:
  """`(bundles, factors)`: small whole gradients of a dtype and a kind together.

  Args:
    per_variable: The factor of every variable, or None.
    kinds: What variables must share to be bundled.
  """
  places: Dict[Any, List[int]] = {}
  numbers: Dict[Any, int] = collections.Counter()
  for i, (factor, kind) in enumerate(zip(per_variable, kinds)):
    key: Any = i
    if isinstance(factor, factors.Explicit) and math.prod(factor.shape) <= SMALL:
      alike = factor.parts[0].dtype, kind
      key = alike, numbers[alike] // FULL
      numbers[alike] += math.prod(factor.shape)
    places.setdefault(key, []).append(i)
  bundles = [tuple(some) for some in places.values()]
  return bundles, [_together([per_variable[i] for i in bundle]) for bundle in bundles]


def _together(several: Any) -> Optional[protocol.Factor]:
  if len(several) == 1:
    return several[0]
  return factors.explicit(tf.concat([
      tf.reshape(factor.gradient(), [-1, math.prod(factor.shape)]) for factor in several], 1))


def flat(scale: Sequence[Any], bundles: Sequence[Bundle]) -> List[Any]:
  """A scale by variable as one by bundle; those of a bundle are all absent, or none is."""
  return [scale[first] if not others or trees.absent(scale[first]) else tf.concat([
      tf.reshape(scale[i], [-1]) for i in (first, *others)], 0) for first, *others in bundles]


def apart(
    totals: Sequence[Any], bundles: Sequence[Bundle],
    variables: Sequence[compat.Variable]) -> List[tf.Tensor]:
  """Totals by bundle as totals by variable; zeros where there is none."""
  result: Dict[int, tf.Tensor] = {}
  for total, bundle in zip(totals, bundles):
    shapes = [variables[i].shape for i in bundle]
    if total is None:
      total = tf.zeros(shapes[0], trees.wide(tf.as_dtype(variables[bundle[0]].dtype)))
    elif len(bundle) > 1:
      total = tf.split(total, [math.prod(shape) for shape in shapes])
    result.update(zip(bundle, [total] if len(bundle) == 1 else map(tf.reshape, total, shapes)))
  return [result[i] for i in range(len(variables))]
