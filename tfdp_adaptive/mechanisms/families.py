# SPDX-License-Identifier: Apache-2.0
"""The two shapes most strategies have: Toeplitz, and any lower-triangular matrix."""

import functools
import math
from typing import Dict, Mapping, Optional, Tuple

import numpy as np

from tfdp_adaptive.mechanisms import interface
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import scheduled
from tfdp_adaptive.mechanisms import sensitivity as sensitivity_lib


class ToeplitzMechanism(interface.Mechanism):
  """C is a lower-triangular Toeplitz matrix: everything follows from its first column."""

  def row_norms(self, n: Optional[int] = None) -> np.ndarray:
    return np.sqrt(np.cumsum(self.noising(self._rows(n))**2))

  def squared_errors(self, n: Optional[int] = None) -> np.ndarray:
    inverse = self.noising(self._rows(n))
    if self.workload.is_toeplitz:
      return np.cumsum(self.workload.apply(inverse)**2)
    return scheduled.squared_errors(self.workload, inverse)

  def _sensitivity(self, min_sep: int, k: int) -> float:
    coefficients = self.strategy()
    return sensitivity_lib.toeplitz(coefficients, self.steps or len(coefficients), min_sep, k)

  def _fixed_order_sensitivity(self, epoch: int, k: int) -> float:
    """Returns an upper bound, exact for coefficients >= 0; inf unless k is all epochs.

    The first place is the worst one: columns of later places are cut short.
    """
    if self.steps is None or k * epoch < self.steps:
      return math.inf
    return float(np.linalg.norm(sensitivity_lib.equal_spacing_column(
        np.abs(self.strategy()), self.steps, epoch, k)))


class MatrixMechanism(interface.Mechanism):
  """C is any invertible lower-triangular matrix, held as `inverse_rows`, [steps, steps] C^-1."""

  steps: int

  @property
  def inverse_rows(self) -> np.ndarray:
    """[steps, steps] C^-1: `x_t = sum_{i<=t} inverse_rows[t, i] z_i`."""
    return self.arrays['inverse_rows']

  def shapes(self) -> Dict[str, Tuple[int, ...]]:
    return {'inverse_rows': (self.steps, self.steps)}

  def check_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
    super().check_arrays(arrays)
    matrices.check_lower(arrays['inverse_rows'])

  @functools.cached_property
  def _matrix(self) -> np.ndarray:
    return matrices.invert_lower(self.inverse_rows)

  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    return self._matrix[:n, :n]

  def noising(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    return self.inverse_rows[:n, :n]

  def _sensitivity(self, min_sep: int, k: int) -> float:
    return sensitivity_lib.general(self._matrix, min_sep, k)
