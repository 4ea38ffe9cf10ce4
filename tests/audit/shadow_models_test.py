# SPDX-License-Identifier: Apache-2.0
"""LiRA on models whose scores are known: the curve of two normals, and chance without memory."""

import numpy as np
import pytest
from scipy import special
from scipy import stats

from tfdp_adaptive import audit
from tfdp_adaptive import compat


def remembering(gap, seed=0):
  """Scores of unit noise around a place of the record's own, higher by `gap` for members."""
  rng = np.random.default_rng(seed)
  places = 5 * rng.normal(size=400)
  return lambda members: places + gap * members + rng.normal(size=400)


@pytest.mark.parametrize('gap', [0.0, 1.0, 3.0])
def test_the_curve_is_that_of_two_normals(gap):
  """With many models: TPR = Phi(Phi^-1(FPR) + gap), AUC = Phi(gap / sqrt 2), places or none."""
  report = audit.shadow_models(remembering(gap), 400, models=80)
  assert report.auc == pytest.approx(stats.norm.cdf(gap / np.sqrt(2)), abs=0.02)
  for rate in (0.01, 0.1, 0.5):
    expected = special.ndtr(special.ndtri(rate) + gap)
    assert report.true_positives_at(rate) == pytest.approx(expected, abs=0.05)
  assert (report.models, report.records) == (80, 400)


def test_few_models_share_a_variance_and_find_most_of_it():
  report = audit.shadow_models(remembering(3.0), 400, models=8)
  assert report.auc > 0.9 and report.true_positives_at(0.01) > 0.2
  assert audit.shadow_models(remembering(0.0), 400, models=8).auc == pytest.approx(0.5, abs=0.03)
  text = str(report)
  assert 'no bound on epsilon' in text and '8 models' in text


def test_what_is_always_equal_is_chance_and_not_a_number_is_refused():
  report = audit.shadow_models(lambda members: np.zeros(50), 50, models=4)
  assert report.auc == 0.5 and report.true_positives_at(0.5) == 0
  for wrong in (np.full(50, np.nan), np.zeros(49), np.zeros((50, 1))):
    with pytest.raises(ValueError, match='one finite score'):
      audit.shadow_models(lambda members, wrong=wrong: wrong, 50)
  with pytest.raises(ValueError, match='`models`'):
    audit.shadow_models(lambda members: np.zeros(50), 50, models=2)


def test_logits_of_sure_classifiers_are_finite():
  scores = audit.logit_scores([[1.0, 0.0], [0.0, 1.0], [0.25, 0.75]], [0, 0, 1])
  assert np.all(np.isfinite(scores)) and scores[0] > 20 and scores[1] < -20
  assert scores[2] == pytest.approx(np.log(3))


@pytest.mark.thorough
def test_a_keras_model_that_learns_by_heart_is_found():
  """Random labels: whoever is right on a record has seen it."""
  keras, rng = compat.keras, np.random.default_rng(0)
  x = rng.normal(size=(64, 16)).astype('float32')
  y = rng.integers(2, size=64)

  def train(members):
    model = keras.Sequential([
        keras.layers.Input([16]), keras.layers.Dense(64, 'relu'), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.05), keras.losses.SparseCategoricalCrossentropy(True))
    model.fit(x[members], y[members], epochs=30, batch_size=64, verbose=0)
    return audit.logit_scores(special.softmax(model.predict(x, verbose=0), axis=1), y)

  assert audit.shadow_models(train, 64, models=6).auc > 0.75
