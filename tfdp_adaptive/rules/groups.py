# SPDX-License-Identifier: Apache-2.0
"""Clipping by groups of variables, with the split of the noise that adds the least noise."""

import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive.rules import moments
from tfdp_adaptive.rules import wrapping

SPLITS = ('optimal', 'global', 'equal')


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  rule: trees.Tree  # States of the rule, one per copy of it.
  size: tf.Tensor  # [K] d_k, constant.
  length: tf.Tensor  # [K] C_k over zeta, at the start.
  like: trees.Tree  # A zero for every variable, whose tree it keeps in mind, or ().


class Split(NamedTuple):
  """The split of the clip norm at one step."""

  scale: tf.Tensor  # [K] s_k; group k is clipped as s_k g_k.
  clip: tf.Tensor  # [K] sqrt(p_k).
  relative: tf.Tensor  # [] zeta over that of the start.


def fractions(sizes: Any, norms: Any, split: str) -> tf.Tensor:
  """Returns p_k, each group's fraction of the squared clip norm.

  Args:
    sizes: d_k, coordinates of each group, [K].
    norms: [K] C_k, clip norms of each group in gradient units, up to a factor.
    split: See `grouped`.
  """
  norm = tf.convert_to_tensor(norms)
  weight = {'optimal': norm * tf.sqrt(tf.cast(sizes, norm.dtype)), 'global': norm**2,
            'equal': tf.ones_like(norm)}[split]
  return weight / tf.reduce_sum(weight)


def grouped(rule: contract.Rule, groups: Sequence[int], split: str = 'optimal',
            norms: Optional[Sequence[float]] = None) -> contract.Rule:
  """Returns a rule whose gradients are clipped group by group.

  Per-layer clipping as in He et al., arXiv:2212.01539. Let C_k be the clip norm of group k, in
  gradient units, and zeta = ||C|| the clip norm of all groups together:

      r_k = clip(s_k g_k; zeta sqrt(p_k)),  s_k = zeta sqrt(p_k) / C_k,  sum p_k = 1

  so ||r|| <= zeta. The noise on g_k has the standard deviation `sigma C_k / sqrt(p_k)`. For any
  split, the privacy cost is that of one clipped sum. The noise adds to the squared length of the
  sum:

      'global'   p_k = C_k^2 / zeta^2, one noise for all   sigma^2 d sum C_k^2
      'equal'    p_k = 1 / K, as many budgets as groups    sigma^2 K sum d_k C_k^2
      'optimal'  p_k ~ C_k sqrt(d_k)                       sigma^2 (sum C_k sqrt(d_k))^2, the least

  A single group gives the rule itself. Do not expect better models than with one clip norm for all
  variables. Groups save memory if they are processed separately, and tuning if layers differ.

  If the clip norm of `rule` adapts (`quantile_clip`, `slack_clip`), each group has its own
  adaptive clip norm, which determines the split. The statistics of the groups are part of the
  same release. The count of each of K groups has sqrt(K) times the noise of a single count. The
  sum of records has no more noise than with one group. The slack of group k has 1 / sqrt(p_k)
  times the noise.

  Args:
    rule: Any rule that makes one query per step with one clip norm, and rescales gradients.
      If the clip norm adapts, the rule must treat every coordinate separately.
    groups: The group of every variable, counted from 0, in the order of the variables.
    split: 'optimal', 'global' or 'equal'.
    norms: The ratios of the C_k; by default all are equal. `l2_norm_clip` is the norm of the vector
      of all C_k.

  Returns:
    A `contract.Rule` whose direction has the same unit as that of `rule`.
  """
  checks.one_of(SPLITS, split=split)
  groups = tuple(int(group) for group in groups)
  checks.require(groups and sorted(set(groups)) == list(range(max(groups) + 1)),
                 'name a group for every variable, counted from 0 without a gap', groups=groups)
  count = max(groups) + 1
  lengths = np.ones(count) if norms is None else np.asarray(norms, np.float64)
  if lengths.shape != (count,) or not (np.all(np.isfinite(lengths)) and np.all(lengths > 0)):
    raise ValueError('`norms` must be one positive number per group. '
                     f'Received: norms={norms} for {count} groups.')
  wrapping.require(rule, 'query', 'clip norm', 'noise', 'norm', 'step')
  checks.require(rule.asks[0].side_query is None or _apart(rule),
                 'treat every coordinate by itself if the clip norm of every group follows: each '
                 'has a copy of it. Use `quantile_clip(grouped(rule, ...))`, which moves all clip '
                 'norms alike, or fixed ones', rule=rule.name)
  return _around(rule, lengths, groups, split)


def _apart(rule: contract.Rule) -> bool:
  """Whether every group has a copy of the rule, which then knows the noise of its group."""
  return rule.elementwise and rule.project is None


def _of_groups(side: contract.SideQuery, count: int) -> contract.SideQuery:
  """Returns the numbers of every group.

  Of group k, `(||r_k|| / (factor c_k))^2 + (sigma ||f_k|| / std)^2 <= 1`. Numbers times
  c_k / zeta keep that for all groups together, since c_k^2 adds up to zeta^2. Where the second
  term is the same for all records, it may be split evenly instead.
  """

  def of_norm(norm: tf.Tensor, clip: tf.Tensor) -> tf.Tensor:
    numbers = side.of_norm(norm, clip)
    if not side.even:
      numbers *= tf.math.divide_no_nan(clip, tf.norm(clip))[:, tf.newaxis]
    return tf.reshape(numbers, tf.concat([tf.shape(norm)[:-1], [side.size * count]], 0))

  def noise(noise_multiplier: float, batch_size: float) -> Tuple[float, float]:
    factor, std = side.noise(noise_multiplier, batch_size)
    return factor, std * math.sqrt(count) if side.even else std

  return side._replace(
      size=side.size * count, of_norm=of_norm, noise=noise, of_groups=True)


def _unscaled(
    now: Split, groups: Tuple[int, ...], tree: trees.Tree, power: int) -> trees.Tree:
  if trees.absent(tree):
    return tree
  leaves = [leaf / tf.cast(now.scale[group], leaf.dtype)**power
            for leaf, group in zip(tf.nest.flatten(tree), groups)]
  return tf.nest.pack_sequence_as(tree, leaves)


def _side_means(side: Optional[contract.SideQuery], now: Split, mean: Any) -> List[Any]:
  """Returns the thresholds of each copy of a rule, in units of its clip norm."""
  count = now.clip.shape[0]
  if side is None:
    return [()] * count
  numbers = tf.unstack(tf.reshape(mean, [count, side.size]))
  return numbers if side.even else [
      one / tf.cast(now.clip[k], one.dtype) for k, one in enumerate(numbers)]


def _around(rule: contract.Rule, lengths: np.ndarray, groups: Tuple[int, ...],
            split: str) -> contract.Rule:
  apart = _apart(rule)  # Other rules are given the largest noise of a group.
  ask = rule.asks[0]

  def pieces(tree: trees.Tree) -> Tuple[trees.Tree, ...]:
    """Returns a tree cut into what the copies of the rule see of it."""
    if not apart or trees.absent(tree):
      return (tree,) * (len(lengths) if apart else 1)
    return wrapping.cut(tree, groups, len(lengths))

  def whole(parts: Sequence[trees.Tree], like: trees.Tree) -> trees.Tree:
    if not apart or trees.absent(parts[0]):
      return parts[0]
    return tf.nest.pack_sequence_as(like, wrapping.joined(parts, groups))

  def init(specs: trees.Tree) -> State:
    leaves, dtype = tf.nest.flatten(specs), trees.dtype_of(specs)
    if len(leaves) != len(groups):
      raise ValueError('`groups` must name a group for every variable. '
                       f'Received: {len(groups)} groups for {len(leaves)} variables.')
    sizes = [sum(leaf.shape.num_elements() for leaf in part)
             for part in wrapping.cut(specs, groups, len(lengths))]
    return State(
        moments.first_step(), tuple(rule.init(piece) for piece in pieces(specs)),
        tf.constant(sizes, dtype), tf.constant(lengths / np.linalg.norm(lengths), dtype),
        trees.map(lambda spec: tf.zeros([], spec.dtype), specs) if apart else ())

  def split_by(state: State, asked: Sequence[contract.Query]) -> Split:
    """Returns the current clip norms; each group has its own factor if its clip norm adapts."""
    length = state.length * tf.stack([
        tf.cast(one.relative_clip, state.length.dtype) for one in asked])
    root, relative = tf.sqrt(fractions(state.size, length, split)), tf.norm(length)
    return Split(root * relative / length, root, relative)

  def ask_copies(
      state: State, public: trees.Tree) -> Tuple[List[contract.Query], Split]:
    asked = [rule.query(one, piece)[0] for one, piece in zip(state.rule, pieces(public))]
    return asked, split_by(state, asked)

  def query(state: State, public: trees.Tree = ()) -> contract.Queries:
    asked, now = ask_copies(state, public)
    scale = whole([one.scale for one in asked], state.like)
    return (asked[0]._replace(scale=scale, relative_clip=now.relative,
                              groups=contract.Groups(now.scale, now.clip)),)

  def update(
      state: State, release: contract.Release, public: trees.Tree) -> Tuple[trees.Tree, State]:
    now = ask_copies(state, public)[1] if ask.side_query else split_by(state, [contract.Query()])
    means = pieces(_unscaled(now, groups, release.mean, 1))
    seconds = pieces(_unscaled(now, groups, release.second, 2))
    scales = tf.unstack(now.scale) if apart else [tf.reduce_min(now.scale)]
    directions, states = [], []
    for one, mean, second, scale, known, side in zip(
        state.rule, means, seconds, scales, pieces(public),
        _side_means(ask.side_query, now, release.side_mean)):
      given = release._replace(
          mean=mean, variance=release.variance / tf.cast(scale, release.variance.dtype)**2,
          second=second, side_mean=side)
      if not trees.absent(second):
        given = given._replace(second_variance=release.second_variance / tf.cast(
            scale, release.second_variance.dtype)**4)
      direction, after = rule.update(one, (given,), known)
      directions.append(direction)
      states.append(after)
    return whole(directions, release.mean), state._replace(
        step=state.step + 1, rule=tuple(states))

  return rule._replace(
      init=init, query=query, update=contract.of_release(update), public_due=None,
      project=wrapping.of_inner(rule, lambda state: state.rule[0]),
      asks=(ask._replace(
          groups=groups,
          side_query=ask.side_query and _of_groups(ask.side_query, len(lengths))),),
      own_clip=ask.side_query is not None, name=f'grouped({rule.name})')
