"""Independent Gaussian noise at every step: C is the identity (DP-SGD)."""

import math

import numpy as np

from tfdp_adaptive.mechanisms import base


class IndependentGaussian(base.Mechanism):
  """C = I. No limit on the number of steps; amplification by sampling applies."""

  bands = 1

  def design(self):
    return {}

  def strategy(self, n=None):
    del n
    return np.ones(1)

  def noising(self, n=None):
    del n
    return np.ones(1)

  def row_norms(self, n=None):
    return np.ones(n or 1)

  def sensitivity(self, *, min_sep=None, max_participations=1):
    """sqrt(k): disjoint columns, whatever their distance."""
    base.check_participation(min_sep if min_sep is not None else 1, max_participations)
    return math.sqrt(max_participations)

  def get_config(self):
    return {}
