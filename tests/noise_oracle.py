# SPDX-License-Identifier: Apache-2.0
"""Noise rows in float64 NumPy, from the definitions in mechanisms/README.md and the keys alone."""

import numpy as np
import tensorflow as tf

from tfdp_adaptive import mechanisms
from tfdp_adaptive.noise import keys
from tfdp_adaptive.noise import streams

STEPS = 12
MECHANISMS = {
    'independent': mechanisms.IndependentGaussian(),
    'one_band': mechanisms.BandedToeplitz(1, STEPS),
    'toeplitz': mechanisms.BandedToeplitz(4, STEPS),
    'full_toeplitz': mechanisms.BandedToeplitz(STEPS, STEPS),
    'column_normalized': mechanisms.Banded(4, STEPS),
    'banded_optimal': mechanisms.Banded(4, STEPS, method='optimal'),
    'banded_inverse': mechanisms.BandedInverse(3, STEPS),
    'square_root': mechanisms.SquareRoot(STEPS),
    'blt': mechanisms.BLT(2, STEPS),
    'dense': mechanisms.Dense(STEPS),
    'tree': mechanisms.Tree(STEPS),
    'tree_naive': mechanisms.Tree(STEPS, 'naive'),
    'tree_restarted': mechanisms.Tree(STEPS, restart_every=5),
    'tree_full': mechanisms.Tree(STEPS, 'full', restart_every=5),
}


def flat(tree):
  """[n] float64: all elements of a tree, leaf after leaf."""
  return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in tf.nest.flatten(tree)])


def row_keys(seed, count):
  """The keys that a stream started from `seed` uses up, row by row."""
  key, result = keys.from_seed(seed), []
  for _ in range(count):
    row_key, key = keys.split(key)
    result.append(row_key)
  return result


def normals(key, specs):
  """[n] float64 elements of the standard normal tree like `specs`."""
  return flat(streams.unflatten(streams.vectors(key, streams.flat_specs(specs)), specs))


def rows(mechanism, each_key, specs):
  """[t, n] x_0 .. x_{t-1}, from the keys of the rows."""
  mechanism = mechanism.rounded('float32')
  count = len(each_key)
  if isinstance(mechanism, mechanisms.Tree) and mechanism.variant != 'full':
    return _tree(mechanism, each_key, specs)
  z = np.stack([normals(key, specs) for key in each_key])
  return mechanism.materialize_inverse(count) @ z


def _tree(mechanism, each_key, specs):
  """Node by node: the prefix noise of every step, and its differences."""
  scale, weights = float(mechanism.node_scale), mechanism.level_weights
  finished, done, result = {}, 0.0, []
  before = 0.0
  for t, key in enumerate(each_key):
    u = t % mechanism.block
    if u == 0:
      finished, done = {}, before
    node_keys = keys.children(key, mechanism.levels)
    for level in range(mechanism.levels):
      start = u + 1 - 2**level  # The node of this level that would end here.
      if start % 2**level or start < 0:
        break
      own = weights[level] * scale * normals(node_keys[level], specs)
      half = 2**level // 2
      finished[level, start] = own + (
          (1 - weights[level]) * (finished[level - 1, start] + finished[level - 1, start + half])
          if level else 0.0)
    prefix, start = done, 0
    for level in reversed(range(mechanism.levels)):  # The binary digits of u + 1.
      if (u + 1) >> level & 1:
        prefix = prefix + finished[level, start]
        start += 2**level
    result.append(prefix - before)
    before = prefix
  return np.stack(result)
