# SPDX-License-Identifier: Apache-2.0
"""Settings of private training, and what trainings with them came to."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from typing import Callable, cast, Dict, Hashable, NamedTuple, Tuple, TypeVar

import numpy as np

from tfdp_adaptive.advice import inputs as inputs_lib
from tfdp_adaptive.trees import Tree

GIVEN, PUBLIC, LAST = 'given', 'public', 'last layer'  # Names of start weights.
Key = Tuple[int, int]  # Fold and seed of a training.
_Method = TypeVar('_Method', bound=Callable[..., object])
now = time.monotonic  # Seconds.
_HUGE = 1e6  # In place of a loss that is not finite.


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

  @property
  def rule(self) -> str:
    return f'{self.optimizer} {self.momentum:g}'


@dataclasses.dataclass(frozen=True)
class Judged:
  """What trainings came to, by fold and seed.

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
    folds = sorted({fold for fold, _ in own} & {fold for fold, _ in others})
    more = np.concatenate([
        np.atleast_1d(_of_fold(own, fold) - _of_fold(others, fold)) for fold in folds])
    error = more.std(ddof=1) / math.sqrt(len(more)) if len(more) > 1 else 0.0
    return float(more.mean()), float(error)


def better(one: Judged, other: Judged, errors: float = 0.0) -> bool:
  """Whether the metric is better by more than a standard error, or level and the loss is less.

  Args:
    one, other: What is compared.
    errors: By how many standard errors the loss must be less.
  """
  more, error = one.above(other, 'metrics')
  if abs(more) > error:
    return more > 0
  more, error = one.above(other)
  return more < -errors * error


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

  def allow(self, share: float) -> None:
    """Lets the next part end when this share of the time is over."""
    self._ends = self._began + share * self._seconds

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
