"""BLT: skeleton."""

from tfdp_adaptive.mechanisms import base


class BLT(base.Mechanism):
  """Skeleton: attributes are fixed, the design follows."""

  def __init__(self, buffers, steps):
    base.check_count(buffers=buffers, steps=steps)
    self.buffers = int(buffers)
    self.steps = int(steps)

  @property
  def output_scale(self):
    """[] c_0."""
    return self.arrays['output_scale']

  @property
  def weights(self):
    """[buffers] omega of C."""
    return self.arrays['weights']

  @property
  def decays(self):
    """[buffers] theta of C, in (0, 1)."""
    return self.arrays['decays']

  @property
  def inverse_weights(self):
    """[buffers] of C^-1."""
    return self.arrays['inverse_weights']

  @property
  def inverse_decays(self):
    """[buffers] of C^-1."""
    return self.arrays['inverse_decays']

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
    return {'buffers': self.buffers, 'steps': self.steps}
