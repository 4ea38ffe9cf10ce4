"""BandedToeplitz: skeleton."""

from tfdp_adaptive.mechanisms import base


class BandedToeplitz(base.Mechanism):
  """Skeleton: attributes are fixed, the design follows."""

  def __init__(self, bands, steps):
    base.check_count(bands=bands, steps=steps)
    self.bands = int(bands)
    self.steps = int(steps)

  @property
  def coefficients(self):
    """[bands] c, the first column of C."""
    return self.arrays['coefficients']

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
    return {'bands': self.bands, 'steps': self.steps}
