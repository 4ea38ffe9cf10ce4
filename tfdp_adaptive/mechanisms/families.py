# SPDX-License-Identifier: Apache-2.0
"""Toeplitz strategies, the simplest of which is independent noise."""

import math
from typing import Dict, Mapping, Optional, Tuple

import numpy as np
import numpy.typing as npt

from tfdp_adaptive.mechanisms import interface
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.mechanisms import sensitivity as sensitivity_lib
from tfdp_adaptive.mechanisms import workload as workload_lib


class ToeplitzMechanism(interface.Mechanism):
  """C is a lower-triangular Toeplitz matrix: everything follows from its first column."""

  def row_norms(self, n: Optional[int] = None) -> np.ndarray:
    return np.sqrt(np.cumsum(self.noising(self._rows(n))**2))

  def squared_errors(self, n: Optional[int] = None) -> np.ndarray:
    inverse = self.noising(self._rows(n))
    if self.workload.is_toeplitz:
      return np.cumsum(self.workload.apply(inverse)**2)
    return workload_lib.squared_errors(self.workload, inverse)

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


@registry.register(registry.Design('independent'))
class IndependentGaussian(ToeplitzMechanism):
  """C = I. No limit on the number of steps; amplification by sampling applies.

  Args:
    workload: For errors.
  """

  bands = 1

  def __init__(self, *, workload: workload_lib.Like = None) -> None:
    super().__init__(workload=workload)

  def design(self) -> Mapping[str, npt.ArrayLike]:
    return {}

  def shapes(self) -> Dict[str, Tuple[int, ...]]:
    return {}

  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    return matrices.resized(np.ones(1), n)

  def noising(self, n: Optional[int] = None) -> np.ndarray:
    return matrices.resized(np.ones(1), n)

  def row_norms(self, n: Optional[int] = None) -> np.ndarray:
    return np.ones(1 if n is None else n)

  def _sensitivity(self, min_sep: int, k: int) -> float:
    del min_sep  # Columns are disjoint at any distance.
    return math.sqrt(k)
