"""What clipping one variable takes beside its plain gradient, from static shapes.

Estimates for comparing routes, per batch of n examples: floating-point operations
of norms and sums, where a product and its addition are two, and bytes of what is
formed on the way, at four per number. Sizes known only at run time count as one.
"""

import functools
from typing import NamedTuple

import numpy as np

from tfdp_adaptive.clipping import blocks
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import rows
from tfdp_adaptive.clipping import tied
from tfdp_adaptive.clipping.layers import convolution


class Cost(NamedTuple):
  plain: float  # Operations of the plain gradient.
  private: float  # Operations of norms and weighted sum.
  formed: float  # Bytes formed by them.


def _numbers(shape):
  return int(np.prod([size or 1 for size in shape]))


@functools.singledispatch
def of(factor, n, scaled):
  """The `Cost` of a factor for n examples, records scaled by a geometry or not."""
  raise TypeError(f'`factor` must be a factor of `clipping`. Received: {factor!r}.')


@of.register
def _(factor: factors.Explicit, n, scaled):
  size = n * _numbers(factor.shape)
  plain = 2 * size * factor.terms
  return Cost(plain, plain + (4 + scaled) * size, 4 * size)


@of.register
def _(factor: factors.Outer, n, scaled):
  sizes = factor.inputs.shape[1:].as_list() + [factor.errors.shape[2]]
  length, d, p = (size or 1 for size in sizes)
  plain = 2 * n * length * d * p
  weighting = n * length * min(d, p)
  route = factor.route(scaled)
  if route == 'rank one':
    norms = 2 * n * (d * p + p) + d * p if scaled else 2 * n * (d + p)
    formed = n * (d + 2 * p) + d * p if scaled else 0
  elif route == 'gram':
    norms, formed = n * length**2 * (2 * d + 2 * p + 2), 2 * n * length**2
  else:
    norms, formed = plain + (2 + scaled) * n * d * p, _block(n, d * p)
  return Cost(plain, plain + weighting + norms, 4 * (formed + weighting))


@of.register
def _(factor: convolution.Convolution, n, scaled):
  points, size = _numbers(factor.errors.shape[1:-1]), _numbers(factor.shape)
  filters = factor.shape[-1]
  patch = size // filters
  plain, weighting = 2 * n * points * size, n * points * filters
  if factor.route(scaled) == 'gram':
    norms = n * points**2 * (2 * patch + 2 * filters + 2)
    formed = _block(n, points * (patch + 2 * points))
  else:
    norms, formed = plain + (2 + scaled) * n * size, _block(n, size)
  return Cost(plain, plain + weighting + norms, 4 * (formed + weighting))


@of.register
def _(factor: rows.Rows, n, scaled):
  length, d = factor.ids.shape[1] or 1, factor.shape[1]
  touched = n * length * d
  norms, formed = (2 + scaled) * touched, 0
  if factor.route(scaled) == 'gram':
    norms, formed = norms + 2 * n * length**2 * (d + 1), 2 * n * length**2
  elif factor.route(scaled) == 'merge':
    norms, formed = norms + n * length**2 + touched, n * length**2 + touched
  plain = touched + _numbers(factor.shape)  # Rows no example touches are filled with zeros.
  return Cost(plain, plain + touched + norms, 4 * (formed + touched))


@of.register
def _(factor: tied.Mixed, n, scaled):
  costs = [of(part, n, scaled) for part in factor.parts]
  plain, private, formed = (sum(column) for column in zip(*costs))
  if factor.route(scaled) == 'tied':
    table, outer = factor.parts
    pairs = n * (table.ids.shape[1] or 1) * (outer.inputs.shape[1] or 1)
    return Cost(plain, private + pairs * (2 * factor.shape[1] + 2), formed + 8 * pairs)
  size = _numbers(factor.shape)
  return Cost(plain, 2 * plain + (2 + scaled) * n * size, formed + 4 * _block(n, size))


def _block(n, numbers):
  """Numbers formed at once where `numbers` per example are worked through in blocks."""
  return min(n, max(1, blocks.BLOCK_BYTES // (4 * numbers))) * numbers
