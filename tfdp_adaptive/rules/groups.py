# SPDX-License-Identifier: Apache-2.0
"""Clipping by groups of variables, with the split of the noise that adds the least of it."""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import arithmetic

SPLITS = ('optimal', 'global', 'equal')


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  rule: trees.Tree  # States of the rule, one per copy of it.
  scale: tf.Tensor  # [K] s_k, constant.
  clip: tf.Tensor  # [K] sqrt(p_k), constant.
  like: trees.Tree  # A zero for every variable, whose tree it keeps in mind, or ().


def shares(sizes: npt.ArrayLike, norms: npt.ArrayLike, split: str) -> np.ndarray:
  """p_k: how much of the squared clip norm a group has; they add up to one.

  Args:
    sizes: d_k, coordinates of each group.
    norms: C_k, clip norms of each group in gradient units, up to a factor.
    split: See `grouped`.
  """
  checks.one_of(SPLITS, split=split)
  size, norm = np.asarray(sizes, np.float64), np.asarray(norms, np.float64)
  weight = {'optimal': norm * np.sqrt(size), 'global': norm**2,
            'equal': np.ones_like(norm)}[split]
  return weight / weight.sum()


def grouped(rule: contract.Rule, groups: Sequence[int], split: str = 'optimal',
            norms: Optional[Sequence[float]] = None) -> contract.Rule:
  """Any rule on gradients that are clipped group by group.

  Per-layer clipping as in He et al., arXiv:2212.01539. With C_k the clip norm of group k, in
  gradient units, and zeta = ||C|| that of all of them together:

      r_k = clip(s_k g_k; zeta sqrt(p_k)),  s_k = zeta sqrt(p_k) / C_k,  sum p_k = 1

  so that ||r|| <= zeta: one scale per group is the whole split of the noise, which on g_k
  has standard deviation `sigma C_k / sqrt(p_k)`. The cost is that of one clipped sum, whatever
  the split. In total it adds to the squared length of the sum:

      'global'   p_k = C_k^2 / zeta^2, one noise for all   sigma^2 d sum C_k^2
      'equal'    p_k = 1 / K, as many budgets as groups    sigma^2 K sum d_k C_k^2
      'optimal'  p_k ~ C_k sqrt(d_k)                       sigma^2 (sum C_k sqrt(d_k))^2, the least

  One group is the rule itself. Do not expect better models than from one norm for all;
  what it saves is memory where groups are worked on apart, and tuning where layers differ.

  Args:
    rule: Any rule with one query per step, in one unit, that rescales its records.
    groups: The group of every variable, counted from 0, in the order of the variables.
    split: 'optimal', 'global' or 'equal'.
    norms: C_k up to a common factor (`l2_norm_clip` is their joint length); by default all
      equal.

  Returns:
    A `contract.Rule` whose direction has the unit of that of `rule`.
  """
  checks.one_of(SPLITS, split=split)
  groups = tuple(int(group) for group in groups)
  members = _members(groups)
  lengths = np.ones(len(members)) if norms is None else np.asarray(norms, np.float64)
  if lengths.shape != (len(members),) or not (np.all(np.isfinite(lengths)) and np.all(lengths > 0)):
    raise ValueError('`norms` must be one positive number per group. '
                     f'Received: norms={norms} for {len(members)} groups.')
  if len(rule.asks) != 1 or not rule.steady or rule.independent_noise:
    raise ValueError('`rule` must ask one question per step, in one unit, with one noise for all '
                     f'coordinates. Received: rule={rule.name}.')
  ask = rule.asks[0]
  if ask.groups or ask.projection != 'rescale' or ask.rider is not None or (
      ask.second is not None and not ask.second.amplifiable):
    raise ValueError('`rule` must rescale its records by one norm that is fixed, and release '
                     f'statistics of one step. Received: rule={rule.name}.')
  return contract.wrapped(rule, lambda inner: _around(inner, members, lengths, groups, split))


def _members(groups: Tuple[int, ...]) -> Tuple[Tuple[int, ...], ...]:
  if not groups or sorted(set(groups)) != list(range(max(groups) + 1)):
    raise ValueError('`groups` must name a group for every variable, counted from 0 without a gap. '
                     f'Received: groups={groups}.')
  return tuple(tuple(i for i, group in enumerate(groups) if group == k)
               for k in range(max(groups) + 1))


def _around(rule: contract.Rule, members: Tuple[Tuple[int, ...], ...], lengths: np.ndarray,
            groups: Tuple[int, ...], split: str) -> contract.Rule:
  # A rule of its own for every group knows its group's noise; others are given the largest.
  apart = rule.elementwise and rule.project is None

  def pieces(tree: trees.Tree) -> Tuple[trees.Tree, ...]:
    """A tree cut into what the copies of the rule see of it."""
    if not apart or trees.absent(tree):
      return (tree,) * (len(members) if apart else 1)
    leaves = tf.nest.flatten(tree)
    return tuple(tuple(leaves[i] for i in group) for group in members)

  def whole(parts: Sequence[trees.Tree], like: trees.Tree) -> trees.Tree:
    if not apart or trees.absent(parts[0]):
      return parts[0]
    leaves: List[Any] = [None] * len(groups)
    for group, part in zip(members, parts):
      for i, leaf in zip(group, part):
        leaves[i] = leaf
    return tf.nest.pack_sequence_as(like, leaves)

  def init(specs: trees.Tree) -> State:
    leaves, dtype = tf.nest.flatten(specs), trees.dtype_of(specs)
    if len(leaves) != len(groups):
      raise ValueError('`groups` must name a group for every variable. '
                       f'Received: {len(groups)} groups for {len(leaves)} variables.')
    sizes = [sum(leaves[i].shape.num_elements() for i in group) for group in members]
    share = shares(sizes, lengths, split)
    scale = np.sqrt(share) * np.linalg.norm(lengths) / lengths
    return State(
        arithmetic.first_step(), tuple(rule.init(piece) for piece in pieces(specs)),
        tf.constant(scale, dtype), tf.constant(np.sqrt(share), dtype),
        trees.map(lambda spec: tf.zeros([], spec.dtype), specs) if apart else ())

  def query(state: State, public: trees.Tree = ()) -> contract.Queries:
    asked = [rule.query(one, piece)[0] for one, piece in zip(state.rule, pieces(public))]
    scale = whole([one.scale for one in asked], state.like)
    return (asked[0]._replace(scale=scale, groups=contract.Groups(state.scale, state.clip)),)

  def unscaled(state: State, tree: trees.Tree, power: int) -> trees.Tree:
    if trees.absent(tree):
      return tree
    leaves = [leaf / tf.cast(state.scale[group], leaf.dtype)**power
              for leaf, group in zip(tf.nest.flatten(tree), groups)]
    return tf.nest.pack_sequence_as(tree, leaves)

  def update(
      state: State, releases: contract.Releases,
      public: trees.Tree = ()) -> Tuple[trees.Tree, State]:
    (release,) = releases
    means = pieces(unscaled(state, release.mean, 1))
    seconds = pieces(unscaled(state, release.second, 2))
    scales = tf.unstack(state.scale) if apart else [tf.reduce_min(state.scale)]
    directions, states = [], []
    for one, mean, second, scale, known in zip(
        state.rule, means, seconds, scales, pieces(public)):
      given = release._replace(
          mean=mean, variance=release.variance / tf.cast(scale, release.variance.dtype)**2,
          second=second)
      if not trees.absent(second):
        given = given._replace(second_variance=release.second_variance / tf.cast(
            scale, release.second_variance.dtype)**4)
      direction, after = rule.update(one, (given,), known)
      directions.append(direction)
      states.append(after)
    return whole(directions, release.mean), state._replace(
        step=state.step + 1, rule=tuple(states))

  def project(state: State, params: trees.Tree) -> trees.Tree:
    assert rule.project is not None  # Else this is not used.
    return rule.project(state.rule[0], params)

  return rule._replace(
      init=init, query=query, update=update, project=rule.project and project,
      asks=(rule.asks[0]._replace(groups=groups),), name=f'grouped({rule.name})')
