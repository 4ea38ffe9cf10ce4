# SPDX-License-Identifier: Apache-2.0
"""Settings of private training, and what trainings with them came to."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from typing import Callable, cast, Collection, Dict, Hashable, NamedTuple, Set, Tuple, TypeVar

import numpy as np

from tfdp_adaptive.advice import inputs as inputs_lib
from tfdp_adaptive.trees import Tree

GIVEN, PUBLIC, LAST = 'given', 'public', 'last layer'  # Names of start weights.
Key = Tuple[int, int]  # Fold and seed of a training.
One = Tuple[np.ndarray, float, Tree]  # Losses, metric and outputs of judged examples.
_Method = TypeVar('_Method', bound=Callable[..., object])
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


@dataclasses.dataclass(frozen=True)
class Judged:
  """Results of trainings, by fold and seed.

  Attributes:
    losses: [n] losses of the judged examples.
    metrics: Metrics, larger is better.
    outputs: Outputs for the judged examples.
  """

  losses: Dict[Key, np.ndarray] = dataclasses.field(default_factory=dict)
  metrics: Dict[Key, float] = dataclasses.field(default_factory=dict)
  outputs: Dict[Key, Tree] = dataclasses.field(default_factory=dict)

  def note(self, key: Key, losses: np.ndarray, metric: float, outputs: Tree) -> None:
    """Adds a training; what is not finite counts as very bad."""
    self.losses[key] = np.nan_to_num(losses, nan=_HUGE, posinf=_HUGE)
    self.metrics[key] = metric if math.isfinite(metric) else -_HUGE
    self.outputs[key] = outputs

  def shifted(self, by: float) -> Judged:
    """Returns the judgement with a number added to all losses."""
    return dataclasses.replace(
        self, losses={key: losses + by for key, losses in self.losses.items()})

  def only(self, seeds: Collection[int], folds: Collection[int]) -> Judged:
    """Returns the judgement by trainings with these seeds, on these folds."""
    kept = [key for key in self.losses if key[0] in folds and key[1] in seeds]
    return Judged(*({key: values[key] for key in kept}  # type: ignore[arg-type]
                    for values in (self.losses, self.metrics, self.outputs)))

  def of(self, fold: int) -> One:
    """Returns means over the trainings of a fold, and outputs of one of them."""
    return (_of_fold(self.losses, fold), float(_of_fold(self.metrics, fold)),
            next(value for key, value in self.outputs.items() if key[0] == fold))

  @property
  def folds(self) -> Set[int]:
    return {fold for fold, _ in self.losses}

  @property
  def loss(self) -> float:
    return float(np.mean(np.concatenate([*self.losses.values()])))

  @property
  def metric(self) -> float:
    return float(np.mean([*self.metrics.values()]))

  def above(self, other: Judged, what: str = 'losses') -> Tuple[float, float]:
    """Returns by how much the losses, or metrics, are above other ones.

    Returns:
      Mean and standard error, over examples, or over folds for metrics, that both have judged.
    """
    own, others = getattr(self, what), getattr(other, what)
    folds = sorted(self.folds & other.folds)
    more = np.concatenate([
        np.atleast_1d(_of_fold(own, fold) - _of_fold(others, fold)) for fold in folds])
    error = more.std(ddof=1) / math.sqrt(len(more)) if len(more) > 1 else 0.0
    return float(more.mean()), float(error)


def better(one: Judged, other: Judged, errors: float = 0.0) -> bool:
  """Whether the loss is less and the metric not clearly worse, or the other way round.

  A metric is compared on three folds or more, which tell its error.

  Args:
    one, other: What is compared.
    errors: By how many standard errors one of loss and metric must be better. The other one must
      then not be worse at all.
  """
  more, error = one.above(other)
  gain, spread = one.above(other, 'metrics')
  if len(one.folds & other.folds) < 3:
    gain, spread = 0.0, 0.0
  if more < -errors * error and gain >= -_CLEAR * spread:
    return True
  return gain > max(errors, _CLEAR) * spread and more <= (0.0 if errors else _CLEAR * error)


def _of_fold(values: Dict[Key, Tree], fold: int) -> np.ndarray:
  return np.mean([value for key, value in values.items() if key[0] == fold], 0)


class OutOfTime(Exception):
  """Ends a part of the search."""


class Clock:
  """Ends the parts of a search in time, and prints a line that says what is tried.

  Args:
    seconds: The time for all parts.
    verbose: 0 prints nothing.
  """

  def __init__(self, seconds: float, verbose: int) -> None:
    self._began = self._printed = now()
    self._seconds, self._verbose, self._ends = seconds, verbose, math.inf
    self._reserved = 0.0

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
    time_now = now()
    if self._verbose and time_now - self._printed > 1:
      self._printed = time_now
      left = self._began + self._seconds - time_now
      print(f'\rrecommend: {text:60.60} {left:4.0f} s left', end='', file=sys.stderr, flush=True)

  def end(self) -> None:
    if self._verbose:
      print(file=sys.stderr, flush=True)


def kept(method: _Method) -> _Method:
  """Returns a method that keeps its results in its object."""
  @functools.wraps(method)
  def once(self: object, *args: Hashable) -> object:
    results = self.__dict__.setdefault(f'_results of {method.__name__}', {})
    if args not in results:
      results[args] = method(self, *args)
    return results[args]
  return cast(_Method, once)
