# SPDX-License-Identifier: Apache-2.0
"""What was best on small tasks: written by `benchmarks/evidence_tables.py`, not by hand."""

from __future__ import annotations

from typing import NamedTuple, Tuple


class Result(NamedTuple):
  """A method, tuned over a grid of 42 settings, on one task.

  Attributes:
    method: Name of the class.
    correlated: Banded noise of 16 bands with cyclic sampling; else independent, Poisson.
    loss: Mean over five runs on test records.
    interval: Half the 95% interval of that mean.
    rate: Learning rate chosen; for DPSGD times the clip norm.
    clip: Clip norm chosen, over the median norm of a gradient at the start; for DPAdamSTP
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
    epsilon: Of all results.
    start: Loss before training.
    facts: Those of `recommendation.Facts`.
    results: Of every method.
  """

  task: str
  epsilon: float
  start: float
  facts: Tuple[float, float, float, float]
  results: Tuple[Result, ...]


ROWS: Tuple[Row, ...] = (
    Row('zipf classes', 4, 2.872, (0.1046, 1.746, 0.5963, 0.02181), (
        Result('DPSGD', False, 0.04882, 0.004816, 3.162, 0.1, 0),
        Result('DPSGD', True, 0.03387, 0.002253, 3.162, 0.1, 0),
        Result('DPAdam', False, 0.0461, 0.004781, 0.09487, 0.1, 0.01),
        Result('DPAdam', True, 0.03361, 0.002518, 0.3, 0.1, 0.01),
        Result('DPAdamBC', False, 0.04673, 0.004759, 0.09487, 0.1, 1),
        Result('DPAdamBC', True, 0.03519, 0.004019, 0.3, 0.1, 1),
        Result('DPAdamSTP', False, 0.03348, 0.003804, 0.09487, 1, 0.003),
        Result('DPAdamSTP', True, 0.02809, 0.002174, 0.3, 1, 0.003),
    )),
    Row('scales', 1, 0.6931, (0.02569, 1.004, 0.2995, 0.01212), (
        Result('DPSGD', False, 0.5031, 0.02303, 3.162, 1, 0),
        Result('DPSGD', True, 0.5011, 0.01786, 1, 1, 0),
        Result('DPAdam', False, 0.4856, 0.02993, 0.9487, 1, 1),
        Result('DPAdam', True, 0.5001, 0.02089, 0.3, 1, 0.01),
        Result('DPAdamBC', False, 0.4461, 0.02457, 0.09487, 1, 0.3),
        Result('DPAdamBC', True, 0.4862, 0.0262, 0.3, 1, 0.3),
        Result('DPAdamSTP', False, 0.3839, 0.04607, 0.9487, 16, 0.003),
        Result('DPAdamSTP', True, 0.4981, 0.02871, 0.3, 4, 0.1),
    )),
    Row('regression', 1, 0.6063, (0.1033, 1.095, 0.04318, 0.2223), (
        Result('DPSGD', False, 0.001152, 7.119e-05, 0.1, 0.1, 0),
        Result('DPSGD', True, 0.001239, 8.194e-05, 0.1, 0.1, 0),
        Result('DPAdam', False, 0.0008332, 8.076e-05, 0.03, 0.1, 0.01),
        Result('DPAdam', True, 0.001071, 0.0001724, 0.09487, 0.1, 0.01),
        Result('DPAdamBC', False, 0.0008405, 8.2e-05, 0.03, 0.1, 1),
        Result('DPAdamBC', True, 0.000912, 7.73e-05, 0.03, 0.1, 0.3),
        Result('DPAdamSTP', False, 0.0002206, 2.456e-05, 0.03, 1, 0.003),
        Result('DPAdamSTP', True, 0.0004581, 0.000111, 0.09487, 1, 0.003),
    )),
    Row('pros and cons', 1, 0.6931, (0.1437, 1.004, 0.1366, 0.0129), (
        Result('DPSGD', False, 0.4296, 0.001934, 3.162, 1, 0),
        Result('DPSGD', True, 0.4269, 0.002499, 0.3162, 1, 0),
        Result('DPAdam', False, 0.4252, 0.001954, 0.03, 1, 0.01),
        Result('DPAdam', True, 0.4278, 0.004097, 0.3, 1, 1),
        Result('DPAdamBC', False, 0.4263, 0.002424, 0.03, 1, 1),
        Result('DPAdamBC', True, 0.4267, 0.00373, 0.09487, 1, 1),
        Result('DPAdamSTP', False, 0.4201, 0.002223, 0.03, 4, 0.1),
        Result('DPAdamSTP', True, 0.428, 0.003103, 0.09487, 1, 0.1),
    )),
    Row('ratings of films', 1, 0.6931, (0.1017, 1.004, 0.2434, 0.0002332), (
        Result('DPSGD', False, 0.6294, 0.01202, 3.162, 1, 0),
        Result('DPSGD', True, 0.6266, 0.01689, 1, 1, 0),
        Result('DPAdam', False, 0.619, 0.0066, 0.03, 1, 0.01),
        Result('DPAdam', True, 0.619, 0.006931, 0.3, 1, 1),
        Result('DPAdamBC', False, 0.6168, 0.005595, 0.009487, 1, 0.3),
        Result('DPAdamBC', True, 0.617, 0.00526, 0.09487, 1, 1),
        Result('DPAdamSTP', False, 0.608, 0.005675, 0.03, 4, 0.1),
        Result('DPAdamSTP', True, 0.685, 0.008403, 0.03, 4, 0.003),
    )),
    Row('scales, narrow', 1, 0.6931, (0.02569, 1.004, 0.6971, 0.01395), (
        Result('DPSGD', False, 0.2747, 0.005768, 3.162, 1, 0),
        Result('DPSGD', True, 0.2756, 0.005882, 0.3162, 1, 0),
        Result('DPAdam', False, 0.2735, 0.002512, 0.03, 1, 1),
        Result('DPAdam', True, 0.2751, 0.005629, 0.09487, 1, 0.01),
        Result('DPAdamBC', False, 0.2731, 0.002847, 0.009487, 1, 0.3),
        Result('DPAdamBC', True, 0.2784, 0.003411, 0.03, 1, 1),
        Result('DPAdamSTP', False, 0.2745, 0.001415, 0.009487, 16, 0.003),
        Result('DPAdamSTP', True, 0.2755, 0.005973, 0.09487, 4, 0.1),
    )),
    Row('mnist, linear', 0.5, 2.303, (0.3119, 0.8662, 0.4189, 0.01193), (
        Result('DPSGD', False, 0.4096, 0.01042, 3.162, 0.3, 0),
        Result('DPSGD', True, 0.4103, 0.01079, 0.3162, 0.3, 0),
        Result('DPAdam', False, 0.4103, 0.008197, 0.03, 0.3, 1),
        Result('DPAdam', True, 0.4186, 0.01048, 0.09487, 0.3, 0.01),
        Result('DPAdamBC', False, 0.4248, 0.01484, 0.009487, 0.3, 0.3),
        Result('DPAdamBC', True, 0.419, 0.01273, 0.09487, 0.3, 1),
        Result('DPAdamSTP', False, 0.4301, 0.01091, 0.03, 1, 0.1),
        Result('DPAdamSTP', True, 1.027, 0.06644, 0.03, 1, 0.003),
    )),
    Row('scales', 4, 0.6931, (0.01512, 1.612, 0.2995, 0.01212), (
        Result('DPSGD', False, 0.4937, 0.02514, 3.162, 1, 0),
        Result('DPSGD', True, 0.4895, 0.0108, 1, 1, 0),
        Result('DPAdam', False, 0.4314, 0.02132, 0.3, 1, 0.01),
        Result('DPAdam', True, 0.4651, 0.01178, 0.3, 1, 0.01),
        Result('DPAdamBC', False, 0.4195, 0.01784, 0.09487, 1, 0.3),
        Result('DPAdamBC', True, 0.4166, 0.01409, 0.3, 1, 0.3),
        Result('DPAdamSTP', False, 0.3368, 0.01279, 0.9487, 16, 0.003),
        Result('DPAdamSTP', True, 0.4267, 0.02534, 0.3, 16, 0.003),
    )),
    Row('zipf classes', 1, 2.872, (0.167, 1.095, 0.5963, 0.02181), (
        Result('DPSGD', False, 0.05893, 0.003446, 1, 0.1, 0),
        Result('DPSGD', True, 0.0541, 0.002589, 1, 0.1, 0),
        Result('DPAdam', False, 0.05855, 0.006252, 0.09487, 0.1, 0.01),
        Result('DPAdam', True, 0.05074, 0.005749, 0.9487, 0.1, 1),
        Result('DPAdamBC', False, 0.05909, 0.006142, 0.09487, 0.1, 1),
        Result('DPAdamBC', True, 0.05, 0.005282, 0.3, 0.1, 1),
        Result('DPAdamSTP', False, 0.04117, 0.005089, 0.09487, 1, 0.003),
        Result('DPAdamSTP', True, 0.04933, 0.00304, 0.3, 1, 0.003),
    )),
    Row('scales, narrow', 4, 0.6931, (0.01512, 1.612, 0.6971, 0.01395), (
        Result('DPSGD', False, 0.2727, 0.00473, 3.162, 1, 0),
        Result('DPSGD', True, 0.2723, 0.002091, 0.3162, 1, 0),
        Result('DPAdam', False, 0.2706, 0.001754, 0.03, 1, 1),
        Result('DPAdam', True, 0.2727, 0.004279, 0.09487, 1, 1),
        Result('DPAdamBC', False, 0.2722, 0.001726, 0.009487, 1, 0.3),
        Result('DPAdamBC', True, 0.2713, 0.003175, 0.009487, 1, 0.3),
        Result('DPAdamSTP', False, 0.2728, 0.001409, 0.009487, 16, 0.003),
        Result('DPAdamSTP', True, 0.2703, 0.001435, 0.03, 16, 0.003),
    )),
)
