# SPDX-License-Identifier: Apache-2.0
"""Reads the best methods on small tasks from `evidence.json`."""

from __future__ import annotations

import json
import pathlib
from typing import NamedTuple, Tuple

FILE = pathlib.Path(__file__).with_name('evidence.json')


class Result(NamedTuple):
  """A method, tuned over a grid of 42 settings, on one task.

  Attributes:
    method: Name of the class.
    correlated: Whether noise has 16 bands, with cyclic sampling; else it is independent, with
      Poisson sampling.
    loss: Mean loss of five runs on test records.
    interval: Half the 95% interval of that mean.
    rate: The chosen learning rate; for DPSGD times the clip norm.
    clip: The chosen clip norm over the median norm of a gradient at the start; for DPAdamSTP
      over the square root of the number of parameters.
    floor: Adam's epsilon over the noise floor; for DPAdamSTP `scale_epsilon` over the size
      of a coordinate.
  """

  method: str
  correlated: bool
  loss: float
  interval: float
  rate: float
  clip: float
  floor: float


class Row(NamedTuple):
  """A task at one epsilon, delta 1e-5.

  Attributes:
    task: Its name.
    epsilon: Epsilon of all results.
    start: Loss before training.
    facts: The facts of `task_facts.Facts`.
    results: The result of every method.
  """

  task: str
  epsilon: float
  start: float
  facts: Tuple[float, float, float, float, float]
  results: Tuple[Result, ...]


def _read(text: str) -> Tuple[Row, ...]:
  return tuple(
      Row(one['task'], one['epsilon'], one['start'], tuple(one['facts']),
          tuple(Result(*result) for result in one['results'])) for one in json.loads(text))


ROWS = _read(FILE.read_text(encoding='utf-8'))
