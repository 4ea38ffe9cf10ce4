# SPDX-License-Identifier: Apache-2.0
"""Independent Gaussian noise at every step: C is the identity (DP-SGD)."""

import math
from typing import Dict, Mapping, Optional, Tuple

import numpy as np
import numpy.typing as npt

from tfdp_adaptive import checks
from tfdp_adaptive import gate
from tfdp_adaptive.mechanisms import families
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.mechanisms import workload as workload_lib


@registry.register(registry.Design('independent'))
class IndependentGaussian(families.ToeplitzMechanism):
  """C = I. No limit on the number of steps; amplification by sampling applies.

  Args:
    workload: For errors.
    rounding: None: normals in floating point. Else noise that needs no trust in floating point
      nor in a generator that is not cryptographic: releases are rounded to a public grid, so
      fine that this adds at most the share `rounding` (2**-7 is a good one) to what a record
      moves them, which is accounted for; and noise on that grid is drawn exactly from the
      discrete Gaussian, by the operating system's generator. For Keras on one replica,
      without `jit_compile`; about two seconds per million parameters and step. Clipping and
      the sum are computed in floating point as ever. Epsilon is then by Renyi divergences.
  """

  bands = 1

  def __init__(
      self, *, workload: workload_lib.Like = None, rounding: Optional[float] = None) -> None:
    super().__init__(workload=workload)
    if rounding is not None:
      gate.check('discrete noise')
      checks.probability(rounding=rounding)
      rounding = float(rounding)
    self.rounding = rounding

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
