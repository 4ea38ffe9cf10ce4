# SPDX-License-Identifier: Apache-2.0
"""Audits: how much privacy a training run can be PROVEN to have lost.

Canaries are records that a coin includes or leaves out. An attack that tells from
the model which ones were in measures a lower bound on epsilon. A bound above the
plan's epsilon proves an error in the training code. A bound below it proves
nothing: stronger canaries or more of them may find more.

`run` trains once, with all canaries at the same time (Steinke, Nasr, Jagielski
2023, arXiv:2305.08846, Theorem 5.2). It inspects the final model only, and so proves
little. `white_box` inspects every step.
"""

import dataclasses
import logging
from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

import numpy as np

from tfdp_adaptive import compat
from tfdp_adaptive import privacy
from tfdp_adaptive.audit import bounds
from tfdp_adaptive.batches import sources

_Indices = Union[Sequence[int], np.ndarray]


class Canaries(NamedTuple):
  """Training data with canaries among it.

  Attributes:
    data: `(x, y, sample_weight)`; a canary that is left out has weight zero. Under zero-out
      adjacency, this is the empty record.
    indices: [count] where the canaries are.
    included: [count] bool, SECRET until the model is released.
  """

  data: Any
  indices: np.ndarray
  included: np.ndarray


@dataclasses.dataclass(frozen=True)
class Report(bounds.Guesses):
  """The result of an audit. `str(report)` is readable text.

  Attributes:
    epsilon_lower: Lower bound on epsilon at `delta`, at level `confidence`. The other attributes of
      `bounds.Guesses` are there as well.
    delta: The plan's.
    claimed: The plan's epsilon.
    auc: Probability that an included canary scores above one left out; 0.5 is
      chance.
    scores: [canaries]; high where the model seems to know the canary.
    included: [canaries] bool.
  """

  delta: float
  claimed: float
  auc: float
  scores: np.ndarray = dataclasses.field(repr=False)
  included: np.ndarray = dataclasses.field(repr=False)

  @property
  def violated(self) -> bool:
    """Whether the claim is refuted, at level `confidence`."""
    return self.epsilon_lower > self.claimed

  def __str__(self) -> str:
    verdict = (
        'THE CLAIM IS REFUTED: the training code leaks more than the plan accounts for.'
        if self.violated else
        'Consistent with the claim; an audit cannot prove it, only refute it.')
    if self.provable <= self.claimed:
      verdict += ' ' + foresight(self.canaries, self.claimed, self.delta, self.confidence)
    return (f'Audit with {self.canaries} canaries in one run: of {self.guesses} guesses '
            f'{self.correct} were right (AUC {self.auc:.3f}).\n'
            f'epsilon >= {self.epsilon_lower:.3g} at delta = {self.delta:g}, with confidence '
            f'{self.confidence:g}; claimed: epsilon <= {self.claimed:.4g}.\n{verdict}')


def foresight(canaries: int, claimed: float, delta: float, confidence: float = 0.95) -> str:
  """Returns the bound that perfect guesses would prove, as text. It is known before training.

  Args:
    canaries: The number of canaries.
    claimed: Epsilon.
    delta: The delta of the claim.
    confidence: The confidence of the bound.
  """
  most = bounds.provable_epsilon(canaries, delta, confidence)
  if most > claimed:
    return f'Perfect guesses at {canaries} canaries would prove epsilon >= {most:.3g}.'
  return (f'This audit can prove NOTHING: even perfect guesses at {canaries} canaries prove '
          f'epsilon >= {most:.3g} only, and {claimed:.3g} is claimed. It would take '
          f'{bounds.demand(canaries, claimed, delta, confidence)}. `tfdp.audit.white_box` sees '
          'every step.')


def insert(
    data: Any, indices: _Indices, *, labels: Any = None,
    seed: Optional[int] = None) -> Canaries:
  """Gives the records at `indices` wrong labels, and includes each with probability one half.

  Args:
    data: `(x, y)` of arrays; x may be nested.
    indices: [count] records to use; their true labels are not used any more.
    labels: [count, ...] labels of the canaries. By default, the labels of these records are
      shuffled, so a model can only memorize them.
    seed: For tests only. By default the operating system's randomness draws the coins.
  """
  x, y = data
  y = np.array(y)
  indices = np.asarray(indices)
  if indices.ndim != 1 or len(indices) < 2 or len(set(indices.tolist())) != len(indices):
    raise ValueError('`indices` must be two or more different records. '
                     f'Received: an array of shape {indices.shape}.')
  if indices.min() < 0 or indices.max() >= len(y):
    raise ValueError('`indices` must be at least 0 and below the number of records, which is not '
                     'printed here. Received: others.')
  rng = np.random.default_rng(seed)
  y[indices] = np.roll(y[indices], 1, axis=0) if labels is None else labels
  included = rng.random(len(indices)) < 0.5
  weight = np.ones(len(y), np.float32)
  weight[indices[~included]] = 0
  return Canaries((x, y, weight), indices, included)


def loss_scores(
    model: compat.Model, x: Any, y: np.ndarray, before: Optional[np.ndarray] = None) -> np.ndarray:
  """Returns minus the loss of every record, [n], less the scores `before` if given."""
  outputs = model.predict(x, verbose=0)
  loss = model.loss if callable(model.loss) else compat.named_loss(model.loss, y, outputs)
  values = np.asarray(getattr(loss, 'call', loss)(np.asarray(y), outputs))
  scores = -values.reshape(len(values), -1).mean(axis=1)
  return scores if before is None else scores - before


def run(
    build_model: Callable[[], compat.Model], data: Any, plan: privacy.PrivacyPlan, *,
    indices: Optional[_Indices] = None, labels: Any = None,
    score: Optional[Callable[..., np.ndarray]] = None, confidence: float = 0.95,
    seed: Optional[int] = None, **fit: Any) -> Report:
  """Trains a model by a plan with canaries in its data, and audits it.

  The model is for the audit: its canaries have wrong labels.

  Args:
    build_model: `() -> model`, a compiled private Keras model whose optimizer
      has `plan`.
    data: `(x, y)`, as many records as the plan's population.
    plan: An example-level `PrivacyPlan`.
    indices: The records that become canaries. By default, all records up to 1000, else 1000 at
      random.
    labels: See `insert`.
    score: `(model, x, y) -> [n]`, larger if the model seems to know a record. By default, it is the
      fall of the loss during training.
    confidence: Probability with which the bound is valid, in (0, `LARGEST_CONFIDENCE`].
    seed: For tests only.
    **fit: Further arguments of `model.fit`, such as `verbose`.

  Returns:
    A `Report`. The bound holds for the final model. An attacker who sees all intermediate models
    may do better, up to the plan's epsilon.
  """
  bounds.check_confidence(confidence)
  if plan.unit != 'example':
    raise ValueError('`plan` must be example-level: canaries are examples. '
                     f'Received: unit={plan.unit!r}.')
  if indices is None:
    size = len(data[1])
    indices = np.random.default_rng(seed).permutation(size)[:1000]
  canaries = insert(data, indices, labels=labels, seed=seed)
  logging.getLogger(__name__).warning(
      '%s', foresight(len(canaries.indices), plan.epsilon(), plan.target_delta, confidence))
  x, y, _ = canaries.data
  chosen = (sources.map_structure(lambda a: np.asarray(a)[canaries.indices], x),
            y[canaries.indices])
  model = build_model()
  before = loss_scores(model, *chosen) if score is None else None
  model.fit(plan.batches(canaries.data), **dict({'verbose': 0}, **fit))
  scores = np.asarray(
      loss_scores(model, *chosen, before) if score is None else score(model, *chosen))
  return report(scores, canaries.included, plan.epsilon(), plan.target_delta, confidence)


def report(
    scores: np.ndarray, included: np.ndarray, claimed: float, delta: float,
    confidence: float = 0.95) -> Report:
  """Returns the bound that scores prove.

  It guesses "in" for the highest scores and "out" for as many of the lowest. It tries a few numbers
  of guesses and divides the confidence between these attempts.
  """
  bounds.check_confidence(confidence)
  scores, included = np.asarray(scores, np.float64), np.asarray(included, bool)
  if scores.shape != included.shape or scores.ndim != 1 or not np.all(np.isfinite(scores)):
    raise ValueError('`scores` must be finite, one per canary. Received: '
                     f'shapes {scores.shape} and {included.shape}.')
  found = bounds.guess(scores, included, delta, confidence)
  return Report(**vars(found), delta=delta, claimed=claimed, auc=bounds.auc(scores, included),
                scores=scores, included=included)
