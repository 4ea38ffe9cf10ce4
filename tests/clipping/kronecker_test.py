# SPDX-License-Identifier: Apache-2.0
"""Matrices on either side of a variable: what a record is measured in, in every engine."""

import bookkeeping_layers_test as tables
import bookkeeping_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import factors
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import projection
from tfdp_adaptive.clipping import rows
from tfdp_adaptive.clipping.layers import convolution
from tfdp_adaptive.clipping.layers import dense as dense_lib

keras = compat.keras
layers = keras.layers


@pytest.fixture(autouse=True)
def seeded():
  keras.utils.set_random_seed(0)


def normal(*shape, seed=0):
  return tf.constant(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.slow
@pytest.mark.parametrize('name', tables.MODELS)
def test_every_kind_of_layer_in_the_engine(name):
  model, x = tables.MODELS[name]()
  oracle.check_kronecker(model, tf.constant(x, model.inputs[0].dtype))


@pytest.mark.parametrize('name', [
    'images', 'sequences', pytest.param('recurrent', marks=pytest.mark.slow)])
def test_every_kind_of_layer(name):
  """The factors of every layer, themselves tested elsewhere, in the space of a scale."""
  model, x = tables.MODELS[name]()
  x = tf.constant(x, model.inputs[0].dtype)
  batch = oracle.batch_of(x, model(x))
  plain, _, _ = bookkeeping.factors_of(model, oracle.squared_error, batch)
  for scale, factor in zip(oracle.kronecker(model), plain):
    if isinstance(scale, contract.Kronecker):
      expected = geometry.times(scale, factor.explicit().gradient())
      into = factor.transformed(scale).simplified()
      size = float(tf.reduce_max(tf.abs(expected)))
      np.testing.assert_allclose(
          into.explicit().gradient(), expected, rtol=1e-4, atol=1e-5 * size)
      norms = into.squared_norm()
      np.testing.assert_allclose(norms, tf.reduce_sum(
          tf.square(tf.reshape(expected, [x.shape[0], -1])), 1), rtol=1e-4, atol=1e-30)


def tied():
  """A table that is the last matrix, too, where the stack has one; low-rank updates."""
  inputs = keras.Input((3,), dtype='int32')
  if not compat.KERAS_3:
    table = layers.Embedding(7, 4)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(table(inputs) + table(inputs))))
  table, dense = layers.ReversibleEmbedding(7, 4), layers.Dense(4)
  outputs = table(dense(table(inputs)), reverse=True)
  dense.enable_lora(2)
  return keras.Model(inputs, outputs)


def test_tied_tables_and_low_rank_updates():
  x = tf.constant(np.random.default_rng(0).integers(0, 7, (4, 3)), tf.int32)
  before_last = lambda shape: len(shape) - 1
  oracle.check_kronecker(oracle.randomized(tied()), x, splits=(before_last, before_last))


def dense(vectors=('left', 'right')):
  """`A` [4, 4] and `G` [3, 3], those not in `vectors` diagonal."""
  of = {'left': normal(4, 4, seed=1), 'right': normal(3, 3, seed=2)}
  return contract.Kronecker(*[
      side if name in vectors else tf.linalg.diag_part(side) for name, side in of.items()])


def full(side):
  return side if side.shape.rank == 2 else tf.linalg.diag(side)


@pytest.mark.parametrize('vectors', [('left', 'right'), ('left',), ('right',), ()])
def test_it_is_the_product(vectors):
  scale, w = dense(vectors), normal(2, 4, 3)
  expected = tf.stack([full(scale.left) @ one @ tf.transpose(full(scale.right)) for one in w])
  np.testing.assert_allclose(geometry.times(scale, w), expected)
  np.testing.assert_allclose(geometry.over(expected, scale), w, rtol=1e-9)
  kernel = tf.reshape(w, [2, 2, 2, 3])  # Axes in front may be joined.
  np.testing.assert_allclose(
      geometry.times(scale, kernel), tf.reshape(expected, kernel.shape))


@pytest.mark.parametrize('vectors', [('left', 'right'), ('left',), ('right',), ()])
def test_factors_stay_what_they_are(vectors):
  """Products of vectors, rows and patches are measured without forming any gradient."""
  scale = dense(vectors)
  outer = factors.Outer(normal(5, 2, 4), normal(5, 2, 3), (4, 3))
  turned = dense_lib._factor(normal(5, 2, 3), 'nta', normal(5, 2, 4), 'ntb', 'ba', (4, 3))
  table = rows.Rows(tf.constant([[0, 0], [1, 3]]), normal(2, 2, 3), (4, 3))
  kernel = convolution.Convolution(
      normal(5, 3, 3, 4), normal(5, 2, 2, 3), (2, 2, 4, 3), (1, 1), (1, 1))
  for factor in (outer, turned, table, kernel):
    into = factor.transformed(scale)
    tall = isinstance(factor, rows.Rows) and scale.left.shape.rank == 2
    assert isinstance(into, factors.Outer if tall else type(factor))
    expected = geometry.times(
        contract.Kronecker(scale.left, scale.right), factor.explicit().gradient())
    np.testing.assert_allclose(into.explicit().gradient(), expected, rtol=1e-9, atol=1e-12)


def test_whole_patches():
  """Where points are few, patches take less room than gradients."""
  scale = contract.Kronecker(normal(16, 16, seed=1), normal(3, 3, seed=2))
  for strides in ((1, 1), (2, 1)):
    kernel = convolution.Convolution(
        normal(5, 2 + strides[0] - 1, 2, 4), normal(5, 1, 1, 3), (2, 2, 4, 3), strides, (1, 1))
    into = kernel.transformed(scale)
    assert isinstance(into, factors.Outer)
    np.testing.assert_allclose(
        into.explicit().gradient(), geometry.times(scale, kernel.explicit().gradient()), rtol=1e-9)


def small():
  model = keras.Sequential([layers.Input((4,), dtype='float64'),
                            layers.Dense(3, activation='tanh', dtype='float64'),
                            layers.Dense(2, dtype='float64')])
  return oracle.built(model, normal(6, 4))


def pairs(model, make):
  return [make(*v.shape) if len(v.shape) == 2 else tf.ones(v.shape, tf.float64)
          for v in model.trainable_variables]


def sums(model, scale, engine=bookkeeping.engine):
  x = normal(6, 4, seed=3)
  batch = oracle.batch_of(x, model(x))
  clip = tf.constant(0.7, tf.float64)
  return engine(model, oracle.squared_error, batch, oracle.request(clip, scale))


def test_every_engine():
  """The definition itself is the materialized one: see the other tests of this page."""
  model = small()
  scale = oracle.kronecker(model)
  expected = sums(model, scale)
  for name in ('layered', 'materialized'):
    got = sums(model, scale, engines.ENGINE[name])
    oracle.assert_close(got.sums, expected.sums, 1e-9)
    np.testing.assert_allclose(got.norms[0], expected.norms[0])


def test_identities_are_isotropic():
  model = small()
  for eye in (tf.eye, lambda size, dtype: tf.ones([size], dtype)):
    got = sums(model, pairs(model, lambda d, p, eye=eye: contract.Kronecker(
        eye(d, dtype=tf.float64), eye(p, dtype=tf.float64))))
    oracle.assert_close(got.sums, sums(model, ()).sums, 1e-12)


def test_diagonals_are_a_scale():
  model = small()
  alpha, beta = (lambda size, s=s: tf.exp(normal(size, seed=s)) for s in (4, 5))
  expected = sums(model, pairs(model, lambda d, p: alpha(d)[:, None] * beta(p)))
  for form in (tf.identity, tf.linalg.diag):
    got = sums(model, pairs(
        model, lambda d, p, form=form: contract.Kronecker(form(alpha(d)), form(beta(p)))))
    oracle.assert_close(got.sums, expected.sums, 1e-12)


def test_a_rotation_from_the_left_changes_neither_norms_nor_releases():
  """Nor the law of the noise behind it: A'^-1 A'^-T is A^-1 A^-T for A' = Q A."""
  model = small()
  scale = oracle.kronecker(model)
  turn = lambda side, seed: tf.linalg.qr(normal(*side.shape, seed=seed))[0] @ side
  turned = [one if not isinstance(one, contract.Kronecker) else contract.Kronecker(
      turn(one.left, 6), turn(one.right, 7)) for one in scale]
  before, after = sums(model, scale), sums(model, turned)
  np.testing.assert_allclose(before.norms[0], after.norms[0])
  for left, right in zip(geometry.unscale(before.sums[0].total, scale),
                         geometry.unscale(after.sums[0].total, turned)):
    np.testing.assert_allclose(left, right, atol=1e-12)
  noise = lambda a: tf.linalg.inv(tf.matmul(a, a, transpose_a=True))
  for one, other in zip(scale, turned):
    if isinstance(one, contract.Kronecker):
      np.testing.assert_allclose(noise(one.left), noise(other.left), rtol=1e-8)
      np.testing.assert_allclose(noise(one.right), noise(other.right), rtol=1e-8)


def test_no_record_moves_a_sum_by_more_than_the_clip_norm():
  """Records from tiny to enormous, broken ones among them, in float32."""
  model = oracle.built(keras.Sequential([
      layers.Input((5, 4)), layers.Dense(3, activation='tanh'), layers.Flatten(),
      layers.Dense(2)]), tf.ones([1, 5, 4]))
  scale, n = oracle.kronecker(model), 6
  size = 10.0 ** np.array([-30, -3, 0, 4, 15, 30.0])
  x = tf.constant(np.random.default_rng(0).normal(size=(n, 5, 4)) * size[:, None, None], tf.float32)
  x = tf.concat([x, x[:1] * np.nan], 0)
  y = tf.constant(np.random.default_rng(1).normal(size=(n + 1, 2)), tf.float32)
  clip = 1e-2
  run = lambda mask: bookkeeping.engine(
      model, oracle.squared_error, interface.Batch(x, y, (), mask),
      oracle.request(clip, scale)).sums[0].total
  whole = run(tf.ones([n + 1], tf.bool))
  for i in range(n + 1):
    moved = [a - b for a, b in zip(whole, run(tf.range(n + 1) != i))]
    assert float(tf.linalg.global_norm(moved)) <= clip * (1 + 1e-5)
  assert all(np.all(np.isfinite(t)) for t in whole)


@pytest.mark.parametrize('scale, message', [
    (contract.Kronecker(tf.eye(3), tf.eye(3)), 'left of size 3, right of size 3'),
    (contract.Kronecker(tf.eye(4), tf.eye(2)), 'right of size 2'),
    (contract.Kronecker(tf.ones([4, 3]), tf.eye(3)), 'square'),
])
def test_sides_that_do_not_fit_are_refused(scale, message):
  with pytest.raises(ValueError, match=message):
    geometry.times(scale, tf.ones([4, 3]))


def test_exact_projections_are_refused():
  query = contract.Query([contract.Kronecker(tf.eye(4), tf.eye(3))])
  with pytest.raises(ValueError, match='diagonal'):
    projection.project_record(
        contract.Ask('euclidean'), query, tf.constant(1.0), [tf.ones([4, 3])])
