# SPDX-License-Identifier: Apache-2.0
"""Independent Gaussian noise at every step: C is the identity (DP-SGD)."""

import math
from typing import Dict, Mapping, Optional, Tuple

import numpy as np
import numpy.typing as npt

from tfdp_adaptive.mechanisms import families
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.mechanisms import workload as workload_lib


@registry.register(registry.Design('independent'))
class IndependentGaussian(families.ToeplitzMechanism):
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
