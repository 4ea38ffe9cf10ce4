# SPDX-License-Identifier: Apache-2.0
"""Gradients of kernels, example by example: a product per place and one per row of places."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive.clipping.layers import convolution

# Kernel, strides, dilations, size of the output.
CASES = {
    'one axis': ((3, 4, 2), (1,), (1,), (5,)),
    'plain': ((2, 3, 3, 2), (1, 1), (1, 1), (3, 4)),
    'one place': ((1, 1, 3, 2), (2, 2), (1, 1), (2, 3)),
    'in tiles': ((4, 6, 2, 3), (2, 3), (1, 1), (3, 2)),
    'strided unevenly': ((3, 2, 2, 3), (2, 1), (1, 1), (2, 4)),
    'dilated': ((2, 3, 2, 3), (1, 1), (2, 1), (3, 3)),
    'three axes': ((2, 2, 2, 2, 3), (2, 2, 2), (1, 1, 1), (2, 1, 2)),
    'three axes in order': ((2, 1, 3, 2, 3), (1, 1, 1), (1, 1, 1), (2, 3, 2)),
}


def made(shape, strides, dilations, output):
  """A factor of four examples."""
  generator = np.random.default_rng(0)
  floats = lambda *sizes: tf.constant(generator.normal(size=sizes), tf.float64)
  reach = [(out - 1) * stride + (k - 1) * dilation + 1
           for out, stride, k, dilation in zip(output, strides, shape, dilations)]
  return convolution.Convolution(
      floats(4, *reach, shape[-2]), floats(4, *output, shape[-1]), shape, strides, dilations)


def truth(factor):
  """[4, *kernel] from the definition: what lies under each place, times the errors."""
  x, errors = factor.inputs.numpy(), factor.cotangents.numpy()
  result = np.zeros((4,) + factor.shape)
  for place in np.ndindex(*factor.shape[:-2]):
    for out in np.ndindex(*errors.shape[1:-1]):
      at = tuple(o * stride + k * dilation for o, stride, k, dilation in zip(
          out, factor.strides, place, factor.dilations))
      result[(slice(None), *place)] += np.einsum(
          'nc,nf->ncf', x[(slice(None), *at)], errors[(slice(None), *out)])
  return result


@pytest.mark.parametrize('wide', [1, 10**6], ids=['by place', 'by row'])
@pytest.mark.parametrize('name', CASES)
def test_gradients_norms_and_sums(name, wide, monkeypatch):
  monkeypatch.setattr(convolution, 'WIDE', wide)
  factor = made(*CASES[name])
  assert factor._by_place() == (wide == 1)
  right, formed = truth(factor), factor.explicit()
  np.testing.assert_allclose(formed.gradient(), right, atol=1e-12)

  scale = np.random.default_rng(1).uniform(1, 2, factor.shape)
  weights = np.random.default_rng(2).uniform(size=4)
  flat = lambda t: t.reshape(4, -1)
  norms = [formed.squared_norm(one) for one in ((), tf.constant(scale))]
  np.testing.assert_allclose(norms[0], np.sum(flat(right)**2, 1), rtol=1e-12)
  np.testing.assert_allclose(norms[1], np.sum(flat(scale * right)**2, 1), rtol=1e-12)
  total = formed.weighted_sum(tf.constant(weights))
  np.testing.assert_allclose(total, np.tensordot(weights, right, 1), atol=1e-12)
  square = formed.squared_sum(tf.constant(weights), tf.constant(scale))
  weighted = np.reshape(weights, [-1] + [1] * scale.ndim)
  np.testing.assert_allclose(square, np.sum((weighted * scale * right)**2, 0), atol=1e-12)

  gram = factor.patches().squared_norm()
  np.testing.assert_allclose(gram, np.sum(flat(right)**2, 1), rtol=1e-9)


def test_large_kernels_have_a_product_per_row():
  few, many = (made((size, 4, 8, 2), (1, 1), (1, 1), (2, 2)) for size in (16, 17))
  assert not few._by_place()  # Too few channels.
  wide = lambda size: made((size, 4, convolution.WIDE, 2), (1, 1), (1, 1), (2, 2))
  assert wide(16)._by_place() and not wide(17)._by_place()
  assert len(few.explicit().parts) == 16 and len(many.explicit().parts) == 17
  assert len(wide(16).explicit().parts) == 64 and len(wide(17).explicit().parts) == 17
  assert not made((16, 4, 1, 2), (1, 1), (1, 1), (2, 2))._by_place()
