# SPDX-License-Identifier: Apache-2.0
"""Variables that are clipped in groups: each group of a record by itself.

Group k of a record has at most the norm c_k, and the squares of these add up to that of
the clip norm, so that the whole record has at most the clip norm: noise and cost are
those of one group.
"""

from typing import Any, Callable, NamedTuple, Tuple

import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import groups as rules_groups


class Part(NamedTuple):
  """The variables that are clipped by one norm: a group of an ask, or all of them."""

  ask: int
  leaves: Tuple[int, ...]
  scale: Any  # [] that the group is multiplied by, or () for one.
  clip: Any  # [] its clip norm.


def bounds(query: contract.Query, clip_norm: trees.Scalar) -> Tuple[Any, Any]:
  """`(scale, absolute clip norm)`, [K] each.

  Whatever a rule asks for, the squares of the clip norms add up to that of `clip_norm` at most.
  """
  relative = tf.convert_to_tensor(query.groups.clip)
  relative = tf.maximum(relative, tf.zeros_like(relative))
  whole = tf.maximum(tf.norm(relative), tf.ones([], relative.dtype))
  return tf.convert_to_tensor(query.groups.scale), tf.cast(clip_norm, relative.dtype) * (
      relative / whole)


def parts(asks: Tuple[contract.Ask, ...], queries: contract.Queries, clips: Tuple[Any, ...],
          count: int) -> Tuple[Part, ...]:
  """All that is clipped by one norm, of records of `count` leaves."""
  result = []
  for i, (ask, query, clip) in enumerate(zip(asks, queries, clips)):
    if not ask.groups:
      result.append(Part(i, tuple(range(count)), (), clip))
      continue
    members = of_leaves(ask.groups, count)
    scale, absolute = bounds(query, clip)
    result += [Part(i, leaves, scale[k], absolute[k]) for k, leaves in enumerate(members)]
  return tuple(result)


def of_leaves(groups: Tuple[int, ...], count: int) -> Tuple[Tuple[int, ...], ...]:
  """The leaves of every group; raises unless each leaf has one, counted from zero."""
  if len(groups) != count:
    raise ValueError('`groups` must name a group for every variable. '
                     f'Received: groups={groups} for {count} variables.')
  return rules_groups.members_of(groups)


def scaled(ask: contract.Ask, query: contract.Query,
           tree: trees.Tree) -> Tuple[Tuple[Any, ...], ...]:
  """The leaves of every group of one scaled record, multiplied by the group's scale."""
  leaves = tf.nest.flatten(tree)
  scale = tf.convert_to_tensor(query.groups.scale)
  return tuple(tuple(tf.cast(scale[k], leaves[i].dtype) * leaves[i] for i in group)
               for k, group in enumerate(of_leaves(ask.groups, len(leaves))))


def clipped(ask: contract.Ask, query: contract.Query, clip_norm: trees.Scalar, tree: trees.Tree,
            clip: Callable[..., Any]) -> trees.Tree:
  """One scaled record, its groups multiplied by their scale and clipped by `clip(leaves, norm)`.

  It is nothing where any of it is not finite, even if other groups are.
  """
  result = list(tf.nest.flatten(tree))
  _, absolute = bounds(query, clip_norm)
  groups = scaled(ask, query, tree)
  for k, (group, leaves) in enumerate(zip(of_leaves(ask.groups, len(result)), groups)):
    for i, leaf in zip(group, clip(list(leaves), tf.cast(absolute[k], leaves[0].dtype))):
      result[i] = leaf
  finite = tf.reduce_all(tf.stack([
      tf.reduce_all(tf.math.is_finite(leaf)) for leaves in groups for leaf in leaves]))
  return trees.map(lambda t: tf.where(finite, t, tf.zeros_like(t)),
                   tf.nest.pack_sequence_as(tree, result))
