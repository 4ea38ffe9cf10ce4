# SPDX-License-Identifier: Apache-2.0
"""Loss and evaluation count every word once, and padding never."""

import numpy as np
import tensorflow as tf

from tfdp_adaptive.examples import language_model

TARGETS = np.array([[2, 3, 0], [1, 0, 0], [0, 0, 0]], np.int32)


def word_losses(logits, targets):
  """Cross-entropy of every word in float64; NaN where there is none."""
  shifted = np.asarray(logits, np.float64)
  log_sum = np.log(np.exp(shifted).sum(-1))
  losses = log_sum - np.take_along_axis(shifted, targets[..., None], -1)[..., 0]
  return np.where(targets > 0, losses, np.nan)


def test_sentence_loss_is_the_mean_over_the_words_of_each_sentence():
  logits = np.random.default_rng(0).normal(size=[3, 3, 5]).astype(np.float32)
  expected = np.nanmean(word_losses(logits, TARGETS)[:2], 1)
  losses = language_model.sentence_loss(TARGETS, tf.constant(logits)).numpy()
  np.testing.assert_allclose(losses[:2], expected, rtol=1e-6)
  assert losses[2] == 0  # A sentence without words, as in padding.


def test_padding_rows_have_no_gradient():
  logits = tf.Variable(tf.ones([3, 3, 5]))
  with tf.GradientTape() as tape:
    loss = tf.reduce_sum(language_model.sentence_loss(TARGETS, logits))
  gradient = tape.gradient(loss, logits).numpy()
  assert np.isfinite(gradient).all() and not gradient[2].any() and gradient[0, 0].any()
  assert not gradient[0, 2].any()


def test_evaluator_is_exact_over_all_batches():
  model = language_model.build(7, length=4)
  for variable in model.trainable_variables:
    variable.assign(tf.random.stateless_normal(variable.shape, [1, 2]))
  rng = np.random.default_rng(1)
  x = rng.integers(0, 7, [1100, 4, 3]).astype(np.int32)  # Three batches, the last one smaller.
  y = rng.integers(0, 7, [1100, 4]).astype(np.int32)
  logits = model(x).numpy()
  loss, accuracy = language_model.Evaluator(model, (x, y))()
  np.testing.assert_allclose(loss, np.nanmean(word_losses(logits, y)), rtol=1e-5)
  np.testing.assert_allclose(accuracy, (logits.argmax(-1) == y)[y > 0].mean(), rtol=1e-6)


def test_every_build_starts_from_the_same_weights():
  first, second = language_model.build(9), language_model.build(9)
  assert first.count_params() > 0
  for a, b in zip(first.get_weights(), second.get_weights()):
    np.testing.assert_array_equal(a, b)
