# SPDX-License-Identifier: Apache-2.0
"""Independent Gaussian noise at every step: C is the identity (DP-SGD)."""

import math

import numpy as np

from tfdp_adaptive.mechanisms import families
from tfdp_adaptive.mechanisms import matrices
from tfdp_adaptive.mechanisms import registry


@registry.register(registry.Design('independent'))
class IndependentGaussian(families.ToeplitzMechanism):
  """C = I. No limit on the number of steps; amplification by sampling applies."""

  bands = 1

  def __init__(self, *, workload=None):
    super().__init__(workload=workload)

  def design(self):
    return {}

  def shapes(self):
    return {}

  def strategy(self, n=None):
    return matrices.resized(np.ones(1), n)

  def noising(self, n=None):
    return matrices.resized(np.ones(1), n)

  def row_norms(self, n=None):
    return np.ones(1 if n is None else n)

  def _sensitivity(self, min_sep, k):
    del min_sep  # Columns are disjoint at any distance.
    return math.sqrt(k)

  def get_config(self):
    return {'workload': self.workload.get_config()}
