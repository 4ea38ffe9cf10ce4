# SPDX-License-Identifier: Apache-2.0
"""Settings of private training, and what trainings with them came to."""

from __future__ import annotations

import math
import time
from typing import Dict, NamedTuple, Set, Tuple

import numpy as np
import tqdm

from tfdp_adaptive.advice import inputs as inputs_lib
from tfdp_adaptive.trees import Tree

GIVEN, PUBLIC, LAST = 'given', 'public', 'last layer'  # Names of start weights.
Key = Tuple[int, int]  # Fold and seed of a training.
One = Tuple[np.ndarray, float, Tree]  # Losses, metric and outputs of judged examples.
now = time.monotonic  # Seconds.
_HUGE = 1e6  # Value for losses that are not finite.
_CLEAR = 1.65  # Standard errors of a clear difference.


class Setting(NamedTuple):
  """Settings of private training, in units of the gradients at its start.

  Attributes:
    inputs: A kind of `inputs`.
    start: 'given', 'public' for weights that were trained on the public examples, or 'last layer'
      for these if the last layer alone is trained.
    optimizer: Name of the class.
    momentum: Of DPSGD and DPKFC.
    clip: Clip norm, over the median norm of a gradient (see `Experiment.base`).
    rate: Learning rate, in the unit of `Experiment.unit`.
    averaged: Whether the rate is constant and the weights are averaged; else the rate falls
      linearly to zero.
    noise: Index of the plan.
  """

  inputs: str = inputs_lib.AS_GIVEN
  start: str = GIVEN
  optimizer: str = 'DPSGD'
  momentum: float = 0.0
  clip: float = 3.0
  rate: float = 1.0
  averaged: bool = False
  noise: int = 0


class Judged(Dict[Key, One]):
  """Results of trainings, by fold and seed. In metrics, larger is better."""

  def note(self, key: Key, losses: np.ndarray, metric: float, outputs: Tree) -> None:
    """Adds a training; what is not finite counts as very bad."""
    self[key] = (np.nan_to_num(losses, nan=_HUGE, posinf=_HUGE),
                 metric if math.isfinite(metric) else -_HUGE, outputs)

  def shifted(self, by: float) -> Judged:
    """Returns the judgement with a number added to all losses."""
    return Judged({key: (one[0] + by, *one[1:]) for key, one in self.items()})

  def of(self, fold: int, index: int = 0) -> np.ndarray:
    """Returns the mean losses, or metric (index 1), over the trainings of a fold."""
    return np.mean([np.asarray(one[index]) for key, one in self.items() if key[0] == fold], 0)

  @property
  def folds(self) -> Set[int]:
    return {fold for fold, _ in self}

  @property
  def loss(self) -> float:
    return float(np.mean(np.concatenate([one[0] for one in self.values()])))

  @property
  def metric(self) -> float:
    return float(np.mean([one[1] for one in self.values()]))

  def above(self, other: Judged, index: int = 0) -> Tuple[float, float]:
    """Returns by how much the losses, or metrics (index 1), are above other ones.

    Returns:
      Mean and standard error, over examples and over folds, that both have judged. Another draw of
      the noise moves all examples of a fold.
    """
    parts = [np.atleast_1d(self.of(fold, index) - other.of(fold, index))
             for fold in sorted(self.folds & other.folds)]
    error = lambda values: (
        float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0)
    more = np.concatenate(parts)
    return float(more.mean()), max(error(more), error([part.mean() for part in parts]))


def better(one: Judged, other: Judged, errors: float = 0.0) -> bool:
  """Whether the loss is less and the metric not clearly worse, or the other way round.

  A metric is compared on three folds or more, which tell its error.

  Args:
    one, other: What is compared.
    errors: By how many standard errors one of loss and metric must be better. The other one must
      then not be worse at all.
  """
  more, error = one.above(other)
  gain, spread = one.above(other, 1)
  if len(one.folds & other.folds) < 3:
    gain, spread = 0.0, 0.0
  if more < -errors * error and gain >= -_CLEAR * spread:
    return True
  return gain > max(errors, _CLEAR) * spread and more <= (0.0 if errors else _CLEAR * error)


class OutOfTime(Exception):
  """Ends a part of the search."""


class Clock:
  """Ends the parts of a search in time, and prints a line that says what is tried.

  Args:
    seconds: The time for all parts.
    verbose: 0 prints nothing.
  """

  def __init__(self, seconds: float, verbose: int) -> None:
    self._began, self._seconds = now(), seconds
    self._ends, self._reserved = math.inf, 0.0
    self._bar = tqdm.tqdm(
        bar_format='{desc}', mininterval=1, miniters=1, delay=1, disable=not verbose)

  def reserve(self, seconds: float) -> None:
    """Saves seconds for what comes after all parts, but half of the time at most."""
    self._reserved = min(seconds, .5 * self._seconds)

  def allow(self, share: float) -> None:
    """Lets the next part end when this share of the time is over."""
    self._ends = self._began + share * (self._seconds - self._reserved)

  @property
  def left(self) -> float:
    return self._ends - now()

  def check(self, text: str, cost: float = 0.0) -> None:
    """Raises `OutOfTime` if the part has no time for what costs so many seconds."""
    if self.left < cost:
      raise OutOfTime()
    left = self._began + self._seconds - now()
    self._bar.set_description_str(f'recommend: {text:60.60} {left:4.0f} s left', refresh=False)
    self._bar.update()

  def end(self) -> None:
    self._bar.close()
