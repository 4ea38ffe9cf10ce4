# SPDX-License-Identifier: Apache-2.0
"""What goes through `tf.vectorized_map` has vectorized forms: none of it loops over records."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import rules
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import losses
from tfdp_adaptive.clipping import materialized
from tfdp_adaptive.compat import model

keras = compat.keras
N, T, K = 5, 3, 4
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(N, K)).astype('float32')
SEQUENCES = RNG.normal(size=(N, T, K)).astype('float32')
DENSE = RNG.dirichlet(np.ones(K), N).astype('float32')
CLASSES = RNG.integers(0, K, N)
STEPS = RNG.integers(0, K, (N, T))


@pytest.fixture(autouse=True)
def _nothing_loops(monkeypatch):
  vectorized_map = tf.vectorized_map

  def strict(*args, fallback_to_while_loop=False, **kwargs):
    del fallback_to_while_loop  # Without it, operations that have no vectorized form are errors.
    return vectorized_map(*args, fallback_to_while_loop=False, **kwargs)

  def refused(*unused):
    raise AssertionError('A loop over records.')

  monkeypatch.setattr(tf, 'vectorized_map', strict)
  for module in (compat, model):
    monkeypatch.setattr(module, 'looped', refused)


def _focal(y, logits):
  p = tf.gather(tf.nn.softmax(logits), tf.cast(y, tf.int32), batch_dims=1)
  return -tf.square(1 - p) * tf.math.log(p)


def _weighted(y, logits):
  loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), logits)
  return loss * tf.gather(tf.constant([.1, .2, .3, .4]), tf.cast(y, tf.int32))


def _masked_mean(y, logits):
  loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), logits)
  used = tf.cast(y != 0, loss.dtype)
  return tf.reduce_sum(loss * used, 1) / tf.maximum(tf.reduce_sum(used, 1), 1)


def _contrast(y, outputs):
  left, right = tf.split(tf.math.l2_normalize(outputs, 1), 2, axis=1)
  distance = tf.reduce_sum(tf.square(left - right), 1)
  return tf.where(y[:, 0] > .3, distance, tf.square(tf.nn.relu(1 - distance)))


OWN = {
    'cross-entropy': (lambda y, z: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(y, tf.int32), z), CLASSES, LOGITS),
    'of a sequence': (lambda y, z: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(y, tf.int32), z), 1), STEPS, SEQUENCES),
    'of every step': (lambda y, z: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(y, tf.int32), z), STEPS, SEQUENCES),
    'of a sequence, masked': (_masked_mean, STEPS, SEQUENCES),
    'weighted by class': (_weighted, CLASSES, LOGITS),
    'focal': (_focal, CLASSES, LOGITS),
    "Keras' function": (lambda y, z: keras.losses.sparse_categorical_crossentropy(
        y, z, from_logits=True), CLASSES, LOGITS),
    'smoothed': (lambda y, z: keras.losses.categorical_crossentropy(
        y, z, from_logits=True, label_smoothing=.1), DENSE, LOGITS),
    'softmax': (lambda y, z: tf.nn.softmax_cross_entropy_with_logits(y, z), DENSE, LOGITS),
    'sigmoid': (lambda y, z: tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(y, z), 1), DENSE, LOGITS),
    'squares': (lambda y, z: tf.reduce_mean(tf.square(y - z), -1), DENSE, LOGITS),
    'distances': (lambda y, z: tf.norm(y - z, axis=-1), DENSE, LOGITS),
    'Huber': (lambda y, z: keras.losses.huber(y, z), DENSE, LOGITS),
    'log cosh': (lambda y, z: keras.losses.log_cosh(y, z), DENSE, LOGITS),
    'cosine': (lambda y, z: keras.losses.cosine_similarity(y, z), DENSE, LOGITS),
    'divergence': (lambda y, z: keras.losses.kl_divergence(y, tf.nn.softmax(z)), DENSE, LOGITS),
    'quantile': (lambda y, z: tf.reduce_mean(
        tf.maximum(.9 * (y - z), -.1 * (y - z)), -1), DENSE, LOGITS),
    'contrast': (_contrast, DENSE, LOGITS),
}


@pytest.mark.parametrize('name', sorted(OWN))
def test_losses_of_ones_own(name):
  own, y, outputs = OWN[name]
  loss = losses.ExampleLoss(own)

  @tf.function(input_signature=[tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in (y, outputs)])
  def value_and_gradient(y, outputs):
    with tf.GradientTape() as tape:
      tape.watch(outputs)
      values = loss(y, outputs)
    return values, tape.gradient(values, outputs)

  values, gradients = value_and_gradient(tf.constant(y), tf.constant(outputs))
  for i in range(N):
    z = tf.constant(outputs[i:i + 1])
    with tf.GradientTape() as tape:
      tape.watch(z)
      alone = tf.reduce_mean(tf.cast(own(tf.constant(y[i:i + 1]), z), tf.float32))
    np.testing.assert_allclose(values[i], alone, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradients[i], tape.gradient(alone, z)[0], rtol=1e-4, atol=1e-6)


ASKS = {
    'rescaled': contract.Ask(), 'projected': contract.Ask(projection='euclidean'),
    'in groups': contract.Ask(groups=(0, 1)),
    'squared': contract.Ask(second=contract.Statistic(
        specs=None, init=None, measure=None, stddevs=None, per_record_square=True))}


@pytest.mark.parametrize('name', sorted(ASKS))
@pytest.mark.parametrize('scaled', [False, True])
def test_projections_of_records(name, scaled):
  ask, gradients = ASKS[name], [tf.constant(LOGITS), tf.constant(SEQUENCES)]
  scale = [tf.constant([1., 2, 3, 4]), tf.ones([T, K]) / 3] if scaled else ()
  groups = contract.Groups(tf.ones([2]), tf.fill([2], .5)) if ask.groups else ()
  query = contract.Query(scale, groups=groups)
  request = interface.Request((ask,), (query,), (tf.constant(.7),))
  (sums,), _ = materialized.sum_records(request, gradients, tf.ones([N], tf.bool))
  assert all(np.any(t) for t in tf.nest.flatten(sums))


@pytest.mark.parametrize('rule', [rules.dp_sgd(), rules.dp_adam()], ids=['sgd', 'adam'])
def test_records_of_queries(rule):
  specs = [tf.TensorSpec([K]), tf.TensorSpec([T, K])]
  query = tfdp.queries.RuleQuery(
      rule, specs, l2_norm_clip=.7, noise_multiplier=1.0, batch_size=3.0)
  params = query.derive_sample_params(query.initial_global_state())
  records = [tf.constant(LOGITS), tf.constant(SEQUENCES)]
  together = tf.vectorized_map(lambda r: query.preprocess_record(params, r), records)
  for i in range(N):
    alone = query.preprocess_record(params, [t[i] for t in records])
    for left, right in zip(tf.nest.flatten(together), tf.nest.flatten(alone)):
      np.testing.assert_allclose(left[i], right, rtol=1e-5, atol=1e-6)
