# SPDX-License-Identifier: Apache-2.0
"""Heads that are solved from one private release of second moments, without training."""

import math
from typing import Any, Optional

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.estimates import moments as moments_lib
from tfdp_adaptive.estimates import release


def least_squares(
    x: trees.Tree, y: trees.Tree = None, *, target_epsilon: Optional[float] = None,
    noise_multiplier: Optional[float] = None, target_delta: float = 1e-6, bound: float = 1.0,
    constant: float = 0.3, ridge: float = 0.25, name: Optional[str] = None,
    **more: Any) -> compat.Layer:
  """Returns a Dense layer that fits targets to features by private least squares.

  The sums S of x x' and T of x y' are released once, by `tfdp.estimates.second_moments`. The
  weights are V diag(1 / (max(w, 0) + r)) V' T, where w are the eigenvalues of S and V its
  eigenvectors. The ridge r is a public constant, a share of the largest eigenvalue that noise alone
  would give S. There is no clip norm of gradients, learning rate or number of steps to choose. This
  head is good at small epsilon, and if the number of records is far above the square of the number
  of features. With fewer records, many steps of DP-SGD on the same features are better. A head that
  is trained on a few public records alone may be better, too.

  Args:
    x: Features, as in `tfdp.estimates.second_moments`. Choose `bound` so that few are shortened.
    y: [n] classes, or [n] or [n, k] numbers. None if `x` holds them, as `tfdp.features` may.
    target_epsilon: The epsilon of the head, from which the noise is computed.
    noise_multiplier: Standard deviation of the noise in units of a record's sensitivity, > 0,
      instead of `target_epsilon`.
    target_delta: The delta of `target_epsilon`.
    bound: Largest norm of the features, > 0, from public knowledge.
    constant: The constant feature behind the bias; 0 for a layer without bias. It should be a
      little smaller than `bound`.
    ridge: The share, > 0.
    name: Name of the layer.
    **more: Other arguments of `tfdp.estimates.second_moments`: `target_bound`, `classes`,
      `share`, `adjacency`, `unit`, `population_size`, `seed`.

  Returns:
    A built `keras.layers.Dense` without activation. For classes, its largest output is the
    prediction. The ledger of every model with this layer includes the cost.

  Raises:
    ValueError: For wrong arguments, or features whose targets are missing.

  Examples:
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(0, 2, size=20_000)
    >>> x = 0.2 * rng.normal(size=[20_000, 5]) + 0.2 * y[:, np.newaxis]
    >>> head = least_squares(x, y, target_epsilon=0.5, target_delta=1e-6)
    >>> model = compat.keras.Sequential([compat.keras.layers.Input([5]), head])
    >>> bool(np.mean(np.argmax(model.predict(x, verbose=0), 1) == y) > 0.8)
    True
  """
  checks.positive(ridge=ridge)
  found = moments_lib.second_moments(
      x, y, target_epsilon=target_epsilon, noise_multiplier=noise_multiplier,
      target_delta=target_delta, bound=bound, constant=constant, **more)
  if found.cross is None:
    raise ValueError('`y` must be the targets of the head. Received: y=None, and features without '
                     'targets.')
  weights = solve(found, ridge)
  size = len(weights) - bool(constant)
  layer = compat.keras.layers.Dense(weights.shape[1], use_bias=bool(constant), name=name)
  layer.build((None, size))
  layer.set_weights([weights[:size], *([constant * weights[-1]] if constant else [])])
  release.charge(layer, *found.ledger.entries)
  return layer


def solve(found: moments_lib.SecondMoments, ridge: float) -> np.ndarray:
  """Returns the weights [d, k]; see `least_squares`.

  Raises:
    ValueError: If a matrix is not finite.
  """
  if found.cross is None or not np.isfinite(found.cross).all():
    raise ValueError('`found` must have a finite matrix `cross`. Received: one that has not.')
  values, vectors = moments_lib.eigenvalues(found.covariance)
  least = ridge * 2 * found.stddev * math.sqrt(len(values))
  return (vectors / (np.maximum(values, 0.0) + least)) @ (vectors.T @ found.cross)
