# SPDX-License-Identifier: Apache-2.0
"""Tree aggregation: one noise for every dyadic interval of steps.

Dwork et al. 2010; Honaker 2015 for the estimates from the whole subtree; as
used in DP-FTRL by Kairouz et al. 2021 (arXiv:2103.00039). Only complete nodes
exist: a record is in at most floor(log2 T) + 1 of them.
"""

import functools
import math
from typing import Dict, Mapping, Optional, Tuple

import numpy as np
import numpy.typing as npt

from tfdp_adaptive import checks
from tfdp_adaptive.mechanisms import interface
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.mechanisms import sensitivity as sensitivity_lib
from tfdp_adaptive.mechanisms import workload as workload_lib

VARIANTS = ('online', 'full', 'naive')


@registry.register(
    registry.Design('tree'),
    registry.Design('tree-full', arguments=(('variant', 'full'),)))
class Tree(interface.Mechanism):
  """C maps steps to the nodes of a binary tree, so its rows stand for nodes.

  `strategy(n)` is [nodes, n], `noising(n)` the left inverse [n, nodes] that is
  run (for the variant 'full', both are [n, n]). A node is the sum of the
  gradients of its interval, divided by `node_scale`.

  Args:
    steps: T.
    variant: 'naive' estimates a node from its own noise, and 'online' from its own and its
      children's noise. 'full' is the least-squares estimate of every prefix sum from all nodes of
      the tree. It runs as the lower-triangular C with the same C^T C (t + 1 draws at step t).
    restart_every: Steps after which a new tree begins; None for one tree.
    workload: The workload whose error is measured; a `Workload` or its config.
  """

  steps: int

  def __init__(
      self, steps: int, variant: str = 'online', restart_every: Optional[int] = None, *,
      workload: workload_lib.Like = None) -> None:
    super().__init__(steps=steps, workload=workload)
    checks.one_of(VARIANTS, variant=variant)
    if restart_every is not None:
      checks.whole(restart_every=restart_every)
    self.variant = variant
    self.restart_every = None if restart_every is None else int(restart_every)
    if variant == 'full':
      matrices.check_dense(self.block)

  @property
  def block(self) -> int:
    """Steps per tree."""
    return min(self.restart_every or self.steps, self.steps)

  @property
  def levels(self) -> int:
    """The number of levels of complete dyadic nodes, leaves included."""
    return self.block.bit_length()

  @property
  def node_scale(self) -> np.ndarray:
    """[] standard deviation of a node's noise; not for the variant 'full'."""
    return self.arrays['node_scale']

  @property
  def level_weights(self) -> np.ndarray:
    """[levels] weight w_l of a node's own noise n in its estimate.

    `e = w_l node_scale n + (1 - w_l) (e_left + e_right)`.
    """
    return self.arrays['level_weights']

  @property
  def inverse_rows(self) -> np.ndarray:
    """[block, block] C^-1 of one tree; variant 'full' only."""
    return self.arrays['inverse_rows']

  def shapes(self) -> Dict[str, Tuple[int, ...]]:
    if self.variant == 'full':
      return {'inverse_rows': (self.block, self.block)}
    return {'level_weights': (self.levels,), 'node_scale': ()}

  def check_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
    super().check_arrays(arrays)
    if self.variant == 'full':
      matrices.check_lower(arrays['inverse_rows'])

  def design(self) -> Mapping[str, npt.ArrayLike]:
    if self.variant == 'full':
      nodes = _nodes(self.block) / math.sqrt(self.levels)
      return {'inverse_rows': np.tril(matrices.invert_lower(matrices.factor_gram(nodes.T @ nodes)))}
    weights = np.ones(self.levels)
    if self.variant == 'online':
      weights = 1 / (2 - 0.5**np.arange(self.levels))
    return {'level_weights': weights, 'node_scale': math.sqrt(self.levels)}

  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    whole = self._diagonal(n, self._block_strategy())
    return whole[:n, :n] if self.variant == 'full' else whole[:, :n]

  def noising(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    if self.variant == 'full':
      return self._diagonal(n, self.inverse_rows)[:n, :n]
    return self._diagonal(n, np.diff(self._prefix_noise, axis=0, prepend=0.0))[:n]

  def row_norms(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    place = np.arange(n) % self.block
    if self.variant == 'full':
      return np.linalg.norm(self.inverse_rows, axis=1)[place]
    # The new node of level l, the trailing ones of t, replaces the left halves below it.
    w, variance = self.level_weights, self._node_variances
    norms = np.empty(self.levels)
    for level in range(self.levels):
      kept = np.append(np.cumprod((1 - w[1:level + 1])[::-1])[::-1], 1.0)
      norms[level] = np.sum((kept * w[:level + 1])**2) + np.sum(
          (kept[:-1] - 1)**2 * variance[:level])
    trailing = np.log2((place + 1) & -(place + 1)).astype(int)
    return self.node_scale * np.sqrt(norms)[trailing]

  def squared_errors(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    if self.workload != workload_lib.Workload():
      return super().squared_errors(n)
    if self.variant == 'full':
      block = np.sum(np.cumsum(self.inverse_rows, axis=0)**2, axis=1)
    else:
      bits = (np.arange(1, self.block + 1)[:, None] >> np.arange(self.levels)) & 1
      block = self.node_scale**2 * (bits @ self._node_variances)
    return block[np.arange(n) % self.block] + block[-1] * (np.arange(n) // self.block)

  def memory(self) -> int:
    return 0 if self.variant == 'full' else self.levels - 1

  def passes(self) -> int:
    return self.block if self.variant == 'full' else 2

  def _sensitivity(self, min_sep: int, k: int) -> float:
    if k == 1 and self.variant == 'full':
      return float(np.linalg.norm(self._block_strategy(), axis=0).max())
    bound = self._level_bound(min_sep, k)
    if k == 1:
      return bound
    if self.steps <= sensitivity_lib.GRAM_LIMIT:
      bound = min(bound, sensitivity_lib.overlapping(self.strategy(), min_sep, k))
    elif self.block <= sensitivity_lib.GRAM_LIMIT:
      through = sensitivity_lib.through_each(self._block_strategy(), min_sep, k)
      through = np.resize(through, self.steps)
      bound = min(bound, math.sqrt(sensitivity_lib.best_pattern(through, min_sep, k)))
    return bound

  def _level_bound(self, min_sep: int, k: int) -> float:
    """Places, on each level, as many participations in one node as fit, until all are placed."""
    total = 0
    for level in range(self.levels):
      most = min(k, -(-2**level // min_sep))
      total += (k // most) * most**2 + (k % most)**2
    if self.variant != 'full':
      return math.sqrt(total) / float(self.node_scale)
    exact = matrices.factor_gram(_nodes(self.block).T @ _nodes(self.block)) / math.sqrt(self.levels)
    moved = np.linalg.norm(matrices.invert_lower(self.inverse_rows) - exact, axis=0).max()
    return math.sqrt(total / self.levels) + k * moved

  @functools.cached_property
  def _node_variances(self) -> np.ndarray:
    """[levels] variance of a node's estimate in units of `node_scale**2`."""
    w, result = self.level_weights, np.empty(self.levels)
    for level in range(self.levels):
      below = 2 * result[level - 1] if level else 0.0
      result[level] = w[level]**2 + (1 - w[level])**2 * below
    return result

  @property
  def _prefix_noise(self) -> np.ndarray:
    """[block, nodes] noise in the prefix sums of one tree, of unit node noises."""
    start, count, places = 0, len(_nodes(self.block)), np.arange(1, self.block + 1)
    result, estimates = np.zeros((self.block, count)), np.zeros((2 * self.block, count))
    for level, w in enumerate(self.level_weights):
      size = self.block >> level
      estimates = w * self.node_scale * np.eye(count)[start:start + size] + (1 - w) * (
          estimates[0:2 * size:2] + estimates[1:2 * size:2])
      ends = places >> level  # Numbers of the nodes that have ended.
      used = ends % 2 == 1
      result[used] += estimates[ends[used] - 1]
      start += size
    return result

  def _block_strategy(self) -> np.ndarray:
    if self.variant == 'full':
      return matrices.invert_lower(self.inverse_rows)
    return _nodes(self.block) / self.node_scale

  def _diagonal(self, n: int, block: np.ndarray) -> np.ndarray:
    matrices.check_dense(n)
    return np.kron(np.eye(-(-n // self.block)), block)


def _nodes(n: int) -> np.ndarray:
  """Returns [nodes, n] membership of steps in complete dyadic intervals, leaves first."""
  matrices.check_dense(n)
  step = np.arange(n)
  return np.concatenate([
      (step >> level) == np.arange(n >> level)[:, None] for level in range(n.bit_length())
  ]).astype(np.float64)
