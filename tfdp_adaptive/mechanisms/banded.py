"""Banded: skeleton."""

from tfdp_adaptive.mechanisms import base


class Banded(base.Mechanism):
  """Skeleton: attributes are fixed, the design follows."""

  def __init__(self, bands, steps):
    base.check_count(bands=bands, steps=steps)
    self.bands = int(bands)
    self.steps = int(steps)

  @property
  def rows(self):
    """[m, bands] the last m rows of C: `C[t, t-j] = rows[max(0, t - (steps - m)), j]`."""
    return self.arrays['rows']

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
