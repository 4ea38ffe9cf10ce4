# SPDX-License-Identifier: Apache-2.0
"""Starting points for long designs, interpolated from designs of fewer steps.

Weights of steps are smooth functions of where in the run a step is, so those of half as many
steps, which take an eighth of the time, are nearly right.
"""

import numpy as np
from scipy import interpolate

from tfdp_adaptive.mechanisms import workload as workload_lib

_LEAST = 1e-30  # Least weight relative to the largest one; zero has no logarithm.


def workload(value: workload_lib.Workload, n: int, m: int) -> workload_lib.Workload:
  """The workload of m steps that is like one of n >= m."""
  rates = ()
  if not value.is_toeplitz:
    where = (np.arange(m) + 0.5) * n / m - 0.5
    rates = tuple(np.interp(where, np.arange(n), value.rates(n)))
    rates = rates if any(rates) else ()
  return workload_lib.Workload(value.momentum ** (n / m), rates)


def refined(weights: np.ndarray, n: int) -> np.ndarray:
  """[n] weights that sum to one, like m of them."""
  m = len(weights)
  # Towards both ends they are like powers of the distance: straight lines in these units.
  logarithm = interpolate.CubicSpline(
      _logits(m), np.log(np.maximum(weights, _LEAST * weights.max())), bc_type='natural')
  value = logarithm(_logits(n))
  result = np.exp(value - value.max())
  return result / result.sum()


def places(n: int) -> np.ndarray:
  """[n] where in the run the steps are."""
  return (np.arange(n) + 0.5) / n


def _logits(n: int) -> np.ndarray:
  return np.log(places(n)) - np.log1p(-places(n))
