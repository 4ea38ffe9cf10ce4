# SPDX-License-Identifier: Apache-2.0
"""Membership inference on models as they are published: the likelihood-ratio attack (LiRA).

This is the online form of Carlini et al. (2022), arXiv:2112.03570. Some models are trained on
random halves of the records. For every record, a normal distribution is fitted to the scores of the
models that were trained on it, and one to the scores of the others. A model is attacked by their
likelihood ratio.
"""

from typing import Any, Callable, NamedTuple, Sequence

import numpy as np
from scipy import stats

from tfdp_adaptive import checks
from tfdp_adaptive.audit import bounds

_LEAST = 1e-6  # Standard deviation; below it, scores are equal.


class ShadowReport(NamedTuple):
  """The result of the attack on all models. Each model is attacked with the help of the others.

  Attributes:
    false_positive_rates: [n], ascending.
    true_positive_rates: [n], one for each false positive rate.
    auc: Area under this curve; 0.5 is chance.
    models: Number of trained models.
    records: Number of records that each model was attacked with.
  """

  false_positive_rates: np.ndarray
  true_positive_rates: np.ndarray
  auc: float
  models: int
  records: int

  def true_positives_at(self, false_positive_rate: float) -> float:
    """Returns the largest true-positive rate at no more than this false-positive rate."""
    within = self.false_positive_rates <= false_positive_rate
    return float(np.max(self.true_positive_rates[within], initial=0.0))

  def __str__(self) -> str:
    rates = ', '.join(f'{self.true_positives_at(rate):.2%} at {rate:.1%}'
                      for rate in (0.001, 0.01, 0.1))
    return (f'LiRA with {self.models} models and {self.records} records: true positives {rates} '
            f'false positives; AUC {self.auc:.3f}.\nThis is what one attack finds on average over '
            'these records. It is no bound on epsilon: it cannot refute a plan, and a weak attack '
            'does not show that a model is private. `tfdp.audit.white_box` looks for proofs.')


def shadow_models(
    train: Callable[[np.ndarray], Any], records: int, *, models: int = 8,
    seed: int = 0) -> ShadowReport:
  """Attacks models trained on random halves of the records.

  With fewer than 64 models, all records share one variance of the scores, as the paper recommends.
  With 64 or more, each record has its own variance.

  Args:
    train: `members -> scores`. It trains a model from scratch on the records for which `members`,
      [records] bool, is true. It returns a score [records] of every record, which is high if the
      model knows the record. `logit_scores` makes scores that are close to normal. The models are
      for the attack only: their privacy costs add up, and you must not release them.
    records: Number of records.
    models: Number of models to train, at least 4.
    seed: Seed of the random halves.

  Returns:
    A `ShadowReport`.

  Raises:
    ValueError: If scores are not finite or not one per record.

  Examples:
    A model that remembers its records, with noise:

    >>> rng = np.random.default_rng(0)
    >>> report = shadow_models(lambda members: members + rng.normal(size=500), 500, models=8)
    >>> bool(report.auc > 0.6)
    True
  """
  checks.whole(4, models=models)
  checks.whole(2, records=records)
  checks.whole(0, seed=seed)
  # Each record is a member of half of the models.
  members = np.argsort(np.random.default_rng(seed).random((models, records)), axis=0) < models // 2
  scores = np.array([_checked(train(row.copy()), records) for row in members])
  ratios = np.array([_ratios(scores, members, target) for target in range(models)])
  return _report(ratios.ravel(), members.ravel(), models, records)


def logit_scores(probabilities: Sequence[Sequence[float]], labels: Sequence[int]) -> np.ndarray:
  """Returns [n] `log(p / (1 - p))` of the probability that a classifier gives to the true class.

  Args:
    probabilities: [n, classes], each row of sum one.
    labels: [n] integers.

  Examples:
    >>> logit_scores([[0.5, 0.5], [0.1, 0.9]], [0, 1]).round(3).tolist()
    [0.0, 2.197]
  """
  probabilities = np.asarray(probabilities, np.float64)
  right = probabilities[np.arange(len(probabilities)), np.asarray(labels, np.int64)]
  others = np.sum(probabilities, axis=1) - right
  return np.log(np.maximum(right, 1e-12)) - np.log(np.maximum(others, 1e-12))


def _checked(scores: Sequence[float], records: int) -> np.ndarray:
  scores = np.asarray(scores, np.float64)
  if scores.shape != (records,) or not np.all(np.isfinite(scores)):
    raise ValueError('`train` must return one finite score for each record. Received: '
                     f'{scores.ndim} axes, another number of scores, or some that are not finite.')
  return scores


def _ratios(scores: np.ndarray, members: np.ndarray, target: int) -> np.ndarray:
  """Returns [records] log likelihood ratios of one model's scores, fitted to the other models."""
  others = np.arange(len(scores)) != target
  densities = []
  for inside in (True, False):
    mask = others[:, np.newaxis] & (members == inside)
    count = np.maximum(mask.sum(axis=0), 1)
    mean = np.sum(scores * mask, axis=0) / count
    square = np.sum(np.square(scores - mean) * mask, axis=0)
    variance = square / np.maximum(count - 1, 1)
    if len(scores) < 64:
      variance = np.sum(square) / max(1, np.sum(count - 1))
    densities.append(stats.norm.logpdf(scores[target], mean, np.maximum(np.sqrt(variance), _LEAST)))
  return densities[0] - densities[1]


def _report(
    ratios: np.ndarray, members: np.ndarray, models: int, records: int) -> ShadowReport:
  order = np.argsort(-ratios, kind='stable')
  last = np.append(np.diff(ratios[order]) != 0, True)  # Equal scores are guessed on together.
  hits, misses = np.cumsum(members[order])[last], np.cumsum(~members[order])[last]
  right = np.append(0.0, hits / max(1, members.sum()))
  wrong = np.append(0.0, misses / max(1, (~members).sum()))
  return ShadowReport(wrong, right, bounds.auc(ratios, members), models, records)
