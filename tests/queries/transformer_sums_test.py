# SPDX-License-Identifier: Apache-2.0
"""The clipped sums that `abstracts_model.py` makes by hand, against single gradients."""

import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import contract

sys.path.append(str(pathlib.Path(__file__).parents[2] / 'benchmarks' / 'evidence'))
import abstracts_model as model_lib

SIZES = model_lib.Sizes(read=9, predicted=5, length=4, width=6, hidden=3, layers=1, heads=2)
UNIT = .7
# A word that repeats, one that is not predicted, padding, and nothing but padding.
WORDS = np.array([[2, 3, 2, 2, 10], [1, 10, 4, 5, 0], [6, 0, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32)


@pytest.mark.parametrize('scaled', [False, True])
@pytest.mark.parametrize('clip', [.4, 1e9])
def test_sums_are_those_of_single_records(scaled: bool, clip: float) -> None:
  rng = np.random.default_rng(0)
  weights = [tf.constant(rng.normal(size=w.shape), tf.float32)
             for w in model_lib.start(SIZES, 0)]
  bias = np.log(rng.dirichlet(np.ones(SIZES.predicted + model_lib.FIRST))).astype(np.float32)
  scales = [rng.uniform(.5, 2, w.shape).astype(np.float32) for w in weights] if scaled else None
  expected, lengths = [np.zeros(w.shape) for w in weights], []
  for words in WORDS:
    with tf.GradientTape() as tape:
      tape.watch(weights)
      loss = model_lib.forward(SIZES, weights, tf.constant(words[None]), bias)[0]
    gradients = [tf.convert_to_tensor(g).numpy() / UNIT for g in tape.gradient(loss, weights)]
    if scales is not None:
      gradients = [g * s for g, s in zip(gradients, scales)]
    lengths.append(np.sqrt(sum(np.sum(g**2) for g in gradients)))
    factor = min(1, clip / lengths[-1]) if lengths[-1] else 0
    expected = [e + factor * g for e, g in zip(expected, gradients)]
  query = contract.Query() if scales is None else contract.Query([tf.constant(s) for s in scales])
  sums, norms = model_lib.clipped(
      SIZES, weights, tf.constant(WORDS), bias, UNIT, query, tf.constant(clip, tf.float32))
  np.testing.assert_allclose(norms, lengths, rtol=1e-4, atol=1e-5)
  for total, sum_ in zip(sums.total, expected):
    np.testing.assert_allclose(total, sum_, rtol=1e-3, atol=1e-4)


def test_words_that_are_not_predicted_are_unknown() -> None:
  weights = [tf.constant(w) for w in model_lib.start(SIZES, 0)]  # Frequencies alone predict.
  bias = np.log(np.arange(1, SIZES.predicted + model_lib.FIRST + 1) / 28).astype(np.float32)
  losses = model_lib.forward(SIZES, weights, tf.constant(WORDS), bias)[0]
  expected = [[bias[3], bias[2], bias[2], bias[1]], [bias[1], bias[4], bias[5]], [0.0], [0.0]]
  np.testing.assert_allclose(losses, [-np.mean(one) for one in expected], rtol=1e-5)
