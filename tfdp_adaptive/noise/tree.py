# SPDX-License-Identifier: Apache-2.0
"""Noise of binary trees, computed online (Kairouz et al. 2021; Honaker 2015).

A finished node of level l covers 2^l steps and has the estimate

    e = w_l s n + (1 - w_l) (e_left + e_right)

The noise of a prefix sum is the sum of the estimates of its maximal finished nodes. x_t is its
increase at step t: the estimate of the largest node that ends there, minus the estimates of the
nodes it replaces.
"""

from typing import Tuple

import tensorflow as tf

from tfdp_adaptive.mechanisms import tree
from tfdp_adaptive.noise import keys
from tfdp_adaptive.noise import regenerated
from tfdp_adaptive.noise import streams


@streams.recursion.register(tree.Tree)
def online(mechanism: tree.Tree) -> streams.Recursion:
  """Returns tree noise; its history holds the last finished left node of each lower level."""
  if mechanism.variant == 'full':
    return regenerated.dense_inverse(mechanism)
  scale = float(mechanism.node_scale)
  weights = [float(w) for w in mechanism.level_weights]
  levels = mechanism.levels

  def advance(
      key: tf.Tensor, row: tf.Tensor, lefts: streams.History,
      flat: streams.Specs) -> Tuple[streams.Vectors, streams.History]:
    steps = row % mechanism.block + 1  # Steps done in this tree.
    node_keys = keys.children(key, levels)

    def draw(level: int) -> streams.Vectors:
      return tuple(weights[level] * scale * n for n in streams.vectors(node_keys[level], flat))

    def merge(
        level: int, right: streams.Vectors,
        replaced: streams.Vectors) -> Tuple[streams.Vectors, streams.Vectors]:
      left = lefts[level - 1]
      node = tuple(own + (1 - weights[level]) * (l + r)
                   for own, l, r in zip(draw(level), left, right))
      return node, tuple(map(tf.add, replaced, left))

    node, replaced, finished = draw(0), streams.zeros(flat), []
    for level in range(1, levels):
      phase = steps % 2**level  # `tf.equal`: in TFF's graphs `==` compares identities.
      finished.append(_select(tf.equal(phase, 2**(level - 1)), node, lefts[level - 1]))
      node, replaced = tf.cond(
          tf.equal(phase, 0),
          lambda level=level, node=node, replaced=replaced: merge(level, node, replaced),
          lambda node=node, replaced=replaced: (node, replaced))
    return tuple(map(tf.subtract, node, replaced)), tuple(finished)

  return levels - 1, advance


def _select(
    condition: tf.Tensor, new: streams.Vectors, old: streams.Vectors) -> streams.Vectors:
  """Returns one of two slots, by reference."""
  return tf.cond(condition, lambda: new, lambda: old)
