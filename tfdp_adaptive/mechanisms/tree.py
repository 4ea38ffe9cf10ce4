"""Tree aggregation: skeleton."""

import math

import numpy as np

from tfdp_adaptive.mechanisms import base

VARIANTS = ('online', 'full', 'naive')


class Tree(base.Mechanism):
  """Skeleton: attributes are fixed, the design follows."""

  def __init__(self, steps, variant='online', restart_every=None):
    base.check_count(steps=steps, restart_every=restart_every or 1)
    if variant not in VARIANTS:
      raise ValueError(f'`variant` must be one of {VARIANTS}. Received: variant={variant!r}.')
    self.steps = int(steps)
    self.variant = variant
    self.restart_every = None if restart_every is None else int(restart_every)

  @property
  def block(self):
    """Steps per tree."""
    return min(self.restart_every or self.steps, self.steps)

  @property
  def levels(self):
    """Levels of complete dyadic nodes, leaves included."""
    return int(self.block).bit_length()

  @property
  def level_weights(self):
    """[levels] weight of a node's own noise in its estimate."""
    return self.arrays['level_weights']

  @property
  def node_scale(self):
    """[] standard deviation of a node."""
    return self.arrays['node_scale']

  @property
  def inverse_rows(self):
    """[block, block] C^-1 of one tree; variant 'full' only."""
    return self.arrays['inverse_rows']

  def design(self):
    if self.variant == 'full':
      raise NotImplementedError
    level = np.arange(self.levels)
    weights = np.ones(self.levels) if self.variant == 'naive' else 1 / (2 - 0.5**level)
    return {'level_weights': weights, 'node_scale': math.sqrt(self.levels)}

  def strategy(self, n=None):
    raise NotImplementedError

  def noising(self, n=None):
    raise NotImplementedError

  def row_norms(self, n=None):
    raise NotImplementedError

  def sensitivity(self, *, min_sep=None, max_participations=1):
    raise NotImplementedError

  def get_config(self):
    return {'steps': self.steps, 'variant': self.variant, 'restart_every': self.restart_every}
