"""SquareRoot: skeleton."""

from tfdp_adaptive.mechanisms import base


class SquareRoot(base.Mechanism):
  """Skeleton: attributes are fixed, the design follows."""

  def __init__(self, steps):
    base.check_count(steps=steps)
    self.steps = int(steps)

  @property
  def inverse_coefficients(self):
    """[steps] the first column of C^-1."""
    return self.arrays['inverse_coefficients']

  def design(self):
    raise NotImplementedError

  def strategy(self, n=None):
    raise NotImplementedError

  def noising(self, n=None):
    raise NotImplementedError

  def row_norms(self, n=None):
    raise NotImplementedError

  def sensitivity(self, *, min_sep=None, max_participations=1):
    raise NotImplementedError

  def get_config(self):
    return {'steps': self.steps}
