# SPDX-License-Identifier: Apache-2.0
"""Ellipsoids for PASAN and PAGAN from standard deviations of gradients (NumPy)."""

import math
from typing import Any, Optional

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import trees


def pagan_ellipsoid(stddevs: trees.Tree, bound: Optional[float] = None) -> Any:
  """The ellipsoid that suits `rules.pagan`: a = C / bound^2 with C = stddevs^(-4/3).

  Minimizes the error bound of Asi et al. (2021) for sub-Gaussian coordinates.

  Args:
    stddevs: [d] root mean squares of the gradient's coordinates, > 0, known or
      estimated from public data or by `tfdp.estimates.private_stddevs`; or a list of arrays,
      one per variable.
    bound: Of the gradient's norm in the metric C, at which records are clipped
      by `l2_norm_clip=1`. Its root mean square by default.

  Returns:
    `ellipsoid`, in the structure of `stddevs`.
  """
  return _ellipsoid(stddevs, -4 / 3, bound)


def pasan_ellipsoid(stddevs: trees.Tree, bound: Optional[float] = None) -> Any:
  """Returns the ellipsoid for `rules.pasan`, as `pagan_ellipsoid` does: C = 1 / stddevs."""
  return _ellipsoid(stddevs, -1.0, bound)


def _ellipsoid(stddevs: trees.Tree, power: float, bound: Optional[float]) -> Any:
  arrays = [np.asarray(s, np.float64) for s in (
      stddevs if isinstance(stddevs, (list, tuple)) else [stddevs])]
  for s in arrays:
    if not np.all((s > 0) & np.isfinite(s)):
      raise ValueError(f'`stddevs` must be positive and finite. Received: {s}.')
  if bound is None:
    bound = math.sqrt(sum(np.sum(s**(2 + power)) for s in arrays))
  checks.positive(bound=bound)
  ellipsoid = [s**power / bound**2 for s in arrays]
  return ellipsoid if isinstance(stddevs, (list, tuple)) else ellipsoid[0]
