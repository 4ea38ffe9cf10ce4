# SPDX-License-Identifier: Apache-2.0
"""Steps of one record that cancel: what rounding leaves of them moves the sum by a clip norm at
most, and so does what they swallow of the other records on the way.
"""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import protocol
from tfdp_adaptive.clipping import rows
from tfdp_adaptive.clipping.layers import convolution

N, T = 6, 4


def outer(size, rng, shape=(40, 30)):
  inputs = rng.normal(size=(N, T, shape[0]))
  cotangents = rng.normal(size=(N, T, shape[1])) / 50
  inputs[2], inputs[2, 1:] = size * inputs[2], size * inputs[2, :1]
  cotangents[2] *= size
  cotangents[2, 1], cotangents[2, 3] = -cotangents[2, 0], -cotangents[2, 2]
  return factors.Outer(tf.constant(inputs, tf.float32), tf.constant(cotangents, tf.float32), shape)


def unknown_length(size, rng):
  """Of a route without a Gram matrix, in no geometry either."""
  class Open(factors.Outer):
    def route(self, scaled):
      return 'blocks'
  made = outer(size, rng)
  return Open(made.inputs, made.cotangents, made.shape)


def table(size, rng):
  length = rows.SHORT + 2
  cotangents = rng.normal(size=(N, length, 3)) / 50
  cotangents[2] = 0
  cotangents[2, ::2], cotangents[2, 1::2] = size**2, -size**2
  return rows.Rows(tf.constant(rng.integers(0, 2, (N, length)) * (np.arange(N) != 2)[:, None]),
                   tf.constant(cotangents, tf.float32), (2, 3))


def convolved(size, rng):
  inputs, cotangents = rng.normal(size=(N, 5, 30)), rng.normal(size=(N, 4, 40)) / 50
  inputs[2] = size * inputs[2, :1]
  cotangents[2] = size * cotangents[2, :1] * np.array([1, -1, 1, -1])[:, None]
  made = convolution.Convolution(
      tf.constant(inputs, tf.float32), tf.constant(cotangents, tf.float32), (2, 30, 40), (1,), (1,))
  assert made.route(True) == 'blocks'
  return made


def mixed(size, rng):
  one, other = convolved(size, rng), convolved(size, rng)
  return rows.add([one, other])


@pytest.mark.pitfall(
    'Parts of one enormous gradient cancel in its norm but, through rounding, not in the sum.',
    severity='critical', stops='the norm includes a bound on rounding errors')
@pytest.mark.parametrize('make', [outer, unknown_length, table, convolved, mixed])
@pytest.mark.parametrize('size', [1.0, 1e3, 1e5, 1e8])
@pytest.mark.parametrize('scaled', [False, True])
def test_a_record_moves_the_sum_by_its_clip_norm(make, size, scaled):
  rng = np.random.default_rng(1)
  factor = make(size, rng)
  scale = tf.constant(10**rng.uniform(-2, 0, size=factor.shape), tf.float32) if scaled else ()
  norm = np.sqrt(factor.squared_norm(scale))
  weights = np.where(norm > 1, 1 / norm, 1.0)
  without = weights * (np.arange(N) != 2)
  sums = [factor.weighted_sum(tf.constant(one)) for one in (weights, without)]
  moved = (np.asarray(sums[0], np.float64) - sums[1]) * (np.asarray(scale) if scaled else 1)
  assert np.linalg.norm(moved) <= 1 + 1e-4
  honest = np.delete(np.asarray(factor.explicit().gradient(), np.float64), 2, 0)
  truth = np.sqrt(np.sum(np.square(honest * (np.asarray(scale) if scaled else 1)),
                         tuple(range(1, honest.ndim))))
  np.testing.assert_allclose(np.delete(norm, 2), truth, rtol=1e-5)  # Not paid for by the others.


def test_products_in_tf32_are_charged_as_such(monkeypatch):
  """Ten binary digits are left of a float32 factor where a GPU multiplies in TF32."""
  assert protocol.eps(tf.float32) == np.finfo(np.float32).eps
  monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: [kind])
  assert protocol.eps(tf.float32) == 2**-10 and protocol.eps(tf.float64) == 2**-52
  factor = factors.Outer(tf.ones([1, 2, 3]), tf.constant([[[1.0], [-1.0]]]), (3, 1))
  norm = factor.squared_norm()
  assert norm.numpy()[0] >= 3 * 2**-22  # Remainder of three sums 1 - 1 in TF32.
  monkeypatch.setattr(
      tf.config.experimental, 'tensor_float_32_execution_enabled', lambda: False)
  assert protocol.eps(tf.float32) == np.finfo(np.float32).eps
