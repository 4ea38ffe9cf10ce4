# SPDX-License-Identifier: Apache-2.0
"""The square-root factorization B = C = A^(1/2) (arXiv:2202.11205).

Fichtenberger, Henzinger, Upadhyay 2022.
"""

from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np
import numpy.typing as npt

from tfdp_adaptive.mechanisms import families
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.mechanisms import workload as workload_lib


@registry.register(registry.Design('square-root'))
class SquareRoot(families.ToeplitzMechanism):
  """C proportional to the Toeplitz square root of the workload; least maximal error of all
  Toeplitz strategies.

  A stream draws t + 1 rows at step t, so it is a reference for small T rather
  than a mechanism to train with; truncated it is
  `BandedToeplitz(method='square_root')`.

  Args:
    steps: T.
    workload: A `Workload` with a constant learning rate, or its config.
  """

  steps: int

  def __init__(self, steps: int, *, workload: workload_lib.Like = None) -> None:
    super().__init__(steps=steps, workload=workload, objective='max')
    toeplitz.require_toeplitz(self.workload, 'SquareRoot')

  @property
  def inverse_coefficients(self) -> np.ndarray:
    """[steps] first column of C^-1: `x_t = sum_{k<=t} inverse_coefficients[k] z_{t-k}`."""
    return self.arrays['inverse_coefficients']

  def shapes(self) -> Dict[str, Tuple[int, ...]]:
    return {'inverse_coefficients': (self.steps,)}

  def design(self) -> Mapping[str, npt.ArrayLike]:
    c = toeplitz.square_root(self.workload, self.steps)
    # A^-1 = (1 - x)(1 - beta x), times A^(1/2), is A^(-1/2).
    inverse = np.convolve(c, [1.0, -1.0])[:self.steps]
    inverse = np.convolve(inverse, [1.0, -self.workload.momentum])[:self.steps]
    return {'inverse_coefficients': np.linalg.norm(c) * inverse}

  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    return toeplitz.reciprocal(self.inverse_coefficients, self._rows(n))

  def noising(self, n: Optional[int] = None) -> np.ndarray:
    return self.inverse_coefficients[:self._rows(n)]

  def passes(self) -> int:
    return self.steps

  def get_config(self) -> Dict[str, Any]:
    return {'steps': self.steps, 'workload': self.workload.get_config()}
