# SPDX-License-Identifier: Apache-2.0
"""Tests whether the noise is as announced: large enough, fresh at each step, and nothing else.

Empty batches release pure noise, announced as `unit * C^-1 Z`. Taken apart again, with
the covariance C^-1 C^-T of the mechanism, it must be independent standard normals, or
more. All tails are exact and one-sided: what is refuted is less noise, in all or in any
direction over the steps. More noise than announced refutes nothing; a value that all keys share
does, since what is neither noise nor a record was added after both.
"""

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
from scipy import linalg
from scipy import stats

from tfdp_adaptive.audit import interface

_RUNS = 2  # Number of keys; more of them prove more about the tails only.
_FOR_TAILS, _MOST_RUNS = 48_000, 10  # Numbers of which some are beyond 3.7, and what they may take.


class Noise(NamedTuple):
  """The measured noise.

  Attributes:
    size: Measured over announced standard deviation.
    p_value: Probability of a noise this weak, or this repetitive, if all is as announced.
    what: The weakest point, in words.
    values: The number of inspected values.
  """

  size: float
  p_value: float
  what: str
  values: int


def measure(subject: interface.Subject, seed: Optional[int] = None, steps: int = 12) -> Noise:
  """Runs empty batches, twice from fresh keys, and tests what comes out."""
  steps = subject.limit(steps)
  needed = -(-_FOR_TAILS // (steps * subject.size))
  count = needed if _RUNS < needed <= _MOST_RUNS else _RUNS
  runs = [_whitened(subject, None if seed is None else seed + run, steps) for run in range(count)]
  firsts = [np.array([dict(run)[name][0] for run in runs]) for name in dict(runs[0])
            if name.startswith('mean')]
  return weakest([rows for run in runs for rows in run], firsts)


def _whitened(
    subject: interface.Subject, seed: Optional[int], steps: int) -> List[Tuple[str, np.ndarray]]:
  """Returns [(name, [n, k] standard normals if all is as announced)] of one run."""
  empty, weights = np.zeros([1, subject.size]), np.zeros(1)
  state = subject.fresh(seed)
  by_name: Dict[Any, Any] = {}
  for step in range(steps):
    parts, state = subject.step(state, empty, weights)
    for part in parts:
      when, rows = by_name.setdefault(part.name, ([], []))
      when.append(step)
      rows.append(part.value / part.unit if part.unit else 0 * part.value)
  return [(name, subject.whitened(steps, when, np.array(rows)))
          for name, (when, rows) in by_name.items()]


def weakest(
    named_rows: Sequence[Tuple[str, np.ndarray]], firsts: Sequence[np.ndarray] = ()) -> Noise:
  """Tests [(name, [n, k])] rows that should be independent standard normals.

  The kinds of tests share the false alarms, and so do the tests of a kind.

  Args:
    named_rows: The rows of all steps, by name.
    firsts: [keys, k] each, what different keys release of the same weights.
  """
  values = sum(rows.size for _, rows in named_rows)
  if not all(np.all(np.isfinite(rows)) for _, rows in named_rows):
    return Noise(math.inf, 0.0, 'numbers that are not finite', values)
  squares = sum(float(np.sum(rows**2)) for _, rows in named_rows)
  of_length: Dict[int, List[np.ndarray]] = {}
  for _, rows in named_rows:
    of_length.setdefault(rows.shape[1], []).append(rows)
  stacks = [np.concatenate(stack) for stack in of_length.values()]
  kinds = {
      'all noise together': [stats.chi2.cdf(squares, values)],
      'the noise of one step': [
          _least(np.sum(rows**2, axis=1), rows.shape[1]) for rows in stacks],
      'noise that elements share': [_elements(rows) for rows in stacks if rows.shape[1] > 1],
      'noise that two steps share': [_pairs(rows) for rows in stacks if len(rows) > 1],
      'noise that later steps take back': [_sums(rows) for _, rows in named_rows],
      'noise far from zero, of which there is too little': [
          _largest(np.concatenate([np.ravel(rows) for _, rows in named_rows]))],
      'noise in some direction of all steps': [_directions(rows) for rows in stacks],
      'a value beside the noise, the same from every key': [_shared(rows) for rows in firsts],
  }
  scored = {what: min(1.0, len(kinds) * len(p_values) * min(p_values))
            for what, p_values in kinds.items() if p_values}
  what = min(scored, key=lambda kind: scored[kind])
  return Noise(float(np.sqrt(squares / values)), float(scored[what]), what, values)


def _least(squares: Union[np.ndarray, Sequence[float]], freedom: float) -> float:
  """Returns the p-value of the least of several sums of `freedom` squares of normals."""
  return min(1.0, np.size(squares) * float(stats.chi2.cdf(np.min(squares), freedom)))


def _elements(rows: np.ndarray) -> float:
  """Tests sums and differences of neighboring elements, which shared noise would cancel."""
  left, right = rows[:, :rows.shape[1] // 2 * 2:2], rows[:, 1::2]
  return _least([np.sum((left - right)**2) / 2, np.sum((left + right)**2) / 2], left.size)


def _pairs(rows: np.ndarray) -> float:
  """Tests sums and differences of any two rows."""
  products, (i, j) = rows @ rows.T, np.triu_indices(len(rows), 1)
  both = (products[i, i] + products[j, j]) / 2
  return _least(both - np.abs(products[i, j]), rows.shape[1]) * 2


def _sums(rows: np.ndarray) -> float:
  """Tests sums over the first steps, where noise that is anti-correlated vanishes."""
  sums = np.cumsum(rows, axis=0) / np.sqrt(np.arange(1, len(rows) + 1))[:, np.newaxis]
  return _least(np.sum(sums**2, axis=1), rows.shape[1])


def _largest(rows: np.ndarray) -> float:
  """Tests the largest of all in size, which finds a tail that is cut off."""
  return float((1 - 2 * stats.norm.sf(np.max(np.abs(rows))))**rows.size)


def _shared(rows: np.ndarray) -> float:
  """Compares the common part of all rows with their differences by an F test."""
  keys, length = rows.shape
  common = keys * np.sum(np.mean(rows, axis=0)**2)
  apart = (np.sum(rows**2) - common) / (keys - 1)
  return float(stats.f.sf(common / apart if apart > 0 else np.inf, length, (keys - 1) * length))


def _directions(rows: np.ndarray) -> float:
  """Tests the least singular value (Davidson and Szarek 2001, Theorem 2.13)."""
  length = rows.shape[1]
  rows = rows[:max(1, length // 8)]
  gap = 1 - np.sqrt(len(rows) / length) - linalg.svdvals(rows)[-1] / np.sqrt(length)
  return float(np.exp(-length * max(gap, 0)**2 / 2))
