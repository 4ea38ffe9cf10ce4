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
    facts: Those of `task_facts.Facts`.
    results: Of every method.
  """

  task: str
  epsilon: float
  start: float
  facts: Tuple[float, float, float, float, float]
  results: Tuple[Result, ...]


ROWS: Tuple[Row, ...] = (
    Row('zipf classes', 4, 2.872, (0.1046, 1.746, 0.5963, 0.02181, 200.0), (
        Result('DPSGD', False, 0.04882, 0.004816, 3.162, 0.1, 0),
        Result('DPSGD', True, 0.03387, 0.002253, 3.162, 0.1, 0),
        Result('DPAdam', False, 0.0461, 0.004781, 0.09487, 0.1, 0.01),
        Result('DPAdam', True, 0.03361, 0.002518, 0.3, 0.1, 0.01),
        Result('DPAdamBC', False, 0.04673, 0.004759, 0.09487, 0.1, 1),
        Result('DPAdamBC', True, 0.03519, 0.004019, 0.3, 0.1, 1),
        Result('DPAdamSTP', False, 0.03348, 0.003804, 0.09487, 1, 0.003),
        Result('DPAdamSTP', True, 0.02809, 0.002174, 0.3, 1, 0.003),
    )),
    Row('scales', 1, 0.6931, (0.02569, 1.004, 0.2995, 0.01212, 256.0), (
        Result('DPSGD', False, 0.5031, 0.02303, 3.162, 1, 0),
        Result('DPSGD', True, 0.5011, 0.01786, 1, 1, 0),
        Result('DPAdam', False, 0.4856, 0.02993, 0.9487, 1, 1),
        Result('DPAdam', True, 0.5001, 0.02089, 0.3, 1, 0.01),
        Result('DPAdamBC', False, 0.4461, 0.02457, 0.09487, 1, 0.3),
        Result('DPAdamBC', True, 0.4862, 0.0262, 0.3, 1, 0.3),
        Result('DPAdamSTP', False, 0.3839, 0.04607, 0.9487, 16, 0.003),
        Result('DPAdamSTP', True, 0.4981, 0.02871, 0.3, 4, 0.1),
    )),
    Row('regression', 1, 0.6063, (0.1033, 1.095, 0.04318, 0.2223, 100.0), (
        Result('DPSGD', False, 0.001152, 7.119e-05, 0.1, 0.1, 0),
        Result('DPSGD', True, 0.001239, 8.194e-05, 0.1, 0.1, 0),
        Result('DPAdam', False, 0.0008332, 8.076e-05, 0.03, 0.1, 0.01),
        Result('DPAdam', True, 0.001071, 0.0001724, 0.09487, 0.1, 0.01),
        Result('DPAdamBC', False, 0.0008405, 8.2e-05, 0.03, 0.1, 1),
        Result('DPAdamBC', True, 0.000912, 7.73e-05, 0.03, 0.1, 0.3),
        Result('DPAdamSTP', False, 0.0002206, 2.456e-05, 0.03, 1, 0.003),
        Result('DPAdamSTP', True, 0.0004581, 0.000111, 0.09487, 1, 0.003),
    )),
    Row('pros and cons', 1, 0.6931, (0.1437, 1.004, 0.1366, 0.0129, 256.0), (
        Result('DPSGD', False, 0.4296, 0.001934, 3.162, 1, 0),
        Result('DPSGD', True, 0.4269, 0.002499, 0.3162, 1, 0),
        Result('DPAdam', False, 0.4252, 0.001954, 0.03, 1, 0.01),
        Result('DPAdam', True, 0.4278, 0.004097, 0.3, 1, 1),
        Result('DPAdamBC', False, 0.4263, 0.002424, 0.03, 1, 1),
        Result('DPAdamBC', True, 0.4267, 0.00373, 0.09487, 1, 1),
        Result('DPAdamSTP', False, 0.4201, 0.002223, 0.03, 4, 0.1),
        Result('DPAdamSTP', True, 0.428, 0.003103, 0.09487, 1, 0.1),
    )),
    Row('ratings of films', 1, 0.6931, (0.1017, 1.004, 0.2434, 0.0002332, 256.0), (
        Result('DPSGD', False, 0.6294, 0.01202, 3.162, 1, 0),
        Result('DPSGD', True, 0.6266, 0.01689, 1, 1, 0),
        Result('DPAdam', False, 0.619, 0.0066, 0.03, 1, 0.01),
        Result('DPAdam', True, 0.619, 0.006931, 0.3, 1, 1),
        Result('DPAdamBC', False, 0.6168, 0.005595, 0.009487, 1, 0.3),
        Result('DPAdamBC', True, 0.617, 0.00526, 0.09487, 1, 1),
        Result('DPAdamSTP', False, 0.608, 0.005675, 0.03, 4, 0.1),
        Result('DPAdamSTP', True, 0.685, 0.008403, 0.03, 4, 0.003),
    )),
    Row('scales, narrow', 1, 0.6931, (0.02569, 1.004, 0.6971, 0.01395, 256.0), (
        Result('DPSGD', False, 0.2747, 0.005768, 3.162, 1, 0),
        Result('DPSGD', True, 0.2756, 0.005882, 0.3162, 1, 0),
        Result('DPAdam', False, 0.2735, 0.002512, 0.03, 1, 1),
        Result('DPAdam', True, 0.2751, 0.005629, 0.09487, 1, 0.01),
        Result('DPAdamBC', False, 0.2731, 0.002847, 0.009487, 1, 0.3),
        Result('DPAdamBC', True, 0.2784, 0.003411, 0.03, 1, 1),
        Result('DPAdamSTP', False, 0.2745, 0.001415, 0.009487, 16, 0.003),
        Result('DPAdamSTP', True, 0.2755, 0.005973, 0.09487, 4, 0.1),
    )),
    Row('mnist, linear', 0.5, 2.303, (0.3119, 0.8662, 0.4189, 0.01193, 256.0), (
        Result('DPSGD', False, 0.4096, 0.01042, 3.162, 0.3, 0),
        Result('DPSGD', True, 0.4103, 0.01079, 0.3162, 0.3, 0),
        Result('DPAdam', False, 0.4103, 0.008197, 0.03, 0.3, 1),
        Result('DPAdam', True, 0.4186, 0.01048, 0.09487, 0.3, 0.01),
        Result('DPAdamBC', False, 0.4248, 0.01484, 0.009487, 0.3, 0.3),
        Result('DPAdamBC', True, 0.419, 0.01273, 0.09487, 0.3, 1),
        Result('DPAdamSTP', False, 0.4301, 0.01091, 0.03, 1, 0.1),
        Result('DPAdamSTP', True, 1.027, 0.06644, 0.03, 1, 0.003),
    )),
    Row('scales', 4, 0.6931, (0.01512, 1.612, 0.2995, 0.01212, 256.0), (
        Result('DPSGD', False, 0.4937, 0.02514, 3.162, 1, 0),
        Result('DPSGD', True, 0.4895, 0.0108, 1, 1, 0),
        Result('DPAdam', False, 0.4314, 0.02132, 0.3, 1, 0.01),
        Result('DPAdam', True, 0.4651, 0.01178, 0.3, 1, 0.01),
        Result('DPAdamBC', False, 0.4195, 0.01784, 0.09487, 1, 0.3),
        Result('DPAdamBC', True, 0.4166, 0.01409, 0.3, 1, 0.3),
        Result('DPAdamSTP', False, 0.3368, 0.01279, 0.9487, 16, 0.003),
        Result('DPAdamSTP', True, 0.4267, 0.02534, 0.3, 16, 0.003),
    )),
    Row('zipf classes', 1, 2.872, (0.167, 1.095, 0.5963, 0.02181, 200.0), (
        Result('DPSGD', False, 0.05893, 0.003446, 1, 0.1, 0),
        Result('DPSGD', True, 0.0541, 0.002589, 1, 0.1, 0),
        Result('DPAdam', False, 0.05855, 0.006252, 0.09487, 0.1, 0.01),
        Result('DPAdam', True, 0.05074, 0.005749, 0.9487, 0.1, 1),
        Result('DPAdamBC', False, 0.05909, 0.006142, 0.09487, 0.1, 1),
        Result('DPAdamBC', True, 0.05, 0.005282, 0.3, 0.1, 1),
        Result('DPAdamSTP', False, 0.04117, 0.005089, 0.09487, 1, 0.003),
        Result('DPAdamSTP', True, 0.04933, 0.00304, 0.3, 1, 0.003),
    )),
    Row('scales, narrow', 4, 0.6931, (0.01512, 1.612, 0.6971, 0.01395, 256.0), (
        Result('DPSGD', False, 0.2727, 0.00473, 3.162, 1, 0),
        Result('DPSGD', True, 0.2723, 0.002091, 0.3162, 1, 0),
        Result('DPAdam', False, 0.2706, 0.001754, 0.03, 1, 1),
        Result('DPAdam', True, 0.2727, 0.004279, 0.09487, 1, 1),
        Result('DPAdamBC', False, 0.2722, 0.001726, 0.009487, 1, 0.3),
        Result('DPAdamBC', True, 0.2713, 0.003175, 0.009487, 1, 0.3),
        Result('DPAdamSTP', False, 0.2728, 0.001409, 0.009487, 16, 0.003),
        Result('DPAdamSTP', True, 0.2703, 0.001435, 0.03, 16, 0.003),
    )),
    Row('mnist, linear', 4, 2.303, (0.1187, 1.612, 0.4189, 0.01193, 256.0), (
        Result('DPSGD', False, 0.3697, 0.009726, 10, 1, 0),
        Result('DPSGD', True, 0.3414, 0.004299, 1, 1, 0),
        Result('DPAdam', False, 0.3636, 0.001998, 0.03, 0.3, 1),
        Result('DPAdam', True, 0.345, 0.002551, 0.09487, 1, 0.01),
        Result('DPAdamBC', False, 0.3715, 0.007193, 0.03, 1, 1),
        Result('DPAdamBC', True, 0.3478, 0.006864, 0.09487, 1, 1),
        Result('DPAdamSTP', False, 0.363, 0.006084, 0.03, 4, 0.1),
        Result('DPAdamSTP', True, 0.3612, 0.003753, 0.09487, 1, 0.1),
    )),
    Row('ratings of films', 0.25, 0.6931, (0.2727, 0.8153, 0.2434, 0.0002332, 256.0), (
        Result('DPSGD', False, 0.6509, 0.005966, 1, 1, 0),
        Result('DPSGD', True, 0.6509, 0.004701, 0.1, 1, 0),
        Result('DPAdam', False, 0.6472, 0.006138, 0.03, 1, 1),
        Result('DPAdam', True, 0.6529, 0.005918, 0.09487, 1, 0.01),
        Result('DPAdamBC', False, 0.6429, 0.009384, 0.009487, 1, 0.3),
        Result('DPAdamBC', True, 0.648, 0.008491, 0.03, 1, 0.3),
        Result('DPAdamSTP', False, 0.6748, 0.005343, 0.009487, 4, 0.1),
        Result('DPAdamSTP', True, 0.6794, 0.005399, 0.03, 1, 0.003),
    )),
    Row('pros and cons', 0.25, 0.6931, (0.3855, 0.8153, 0.1366, 0.0129, 256.0), (
        Result('DPSGD', False, 0.4542, 0.004291, 3.162, 1, 0),
        Result('DPSGD', True, 0.4562, 0.005222, 0.3162, 1, 0),
        Result('DPAdam', False, 0.4439, 0.003245, 0.03, 1, 0.01),
        Result('DPAdam', True, 0.4487, 0.003827, 0.3, 1, 1),
        Result('DPAdamBC', False, 0.4453, 0.003309, 0.03, 1, 1),
        Result('DPAdamBC', True, 0.447, 0.00418, 0.09487, 1, 1),
        Result('DPAdamSTP', False, 0.4788, 0.002918, 0.009487, 1, 0.1),
        Result('DPAdamSTP', True, 0.6495, 0.06356, 0.09487, 1, 0.003),
    )),
    Row('ratings of films', 4, 0.6931, (0.05984, 1.612, 0.2434, 0.0002332, 256.0), (
        Result('DPSGD', False, 0.6183, 0.007322, 1, 1, 0),
        Result('DPSGD', True, 0.6118, 0.01295, 1, 1, 0),
        Result('DPAdam', False, 0.6103, 0.004496, 0.03, 1, 0.01),
        Result('DPAdam', True, 0.6071, 0.002232, 0.09487, 1, 0.01),
        Result('DPAdamBC', False, 0.6092, 0.003451, 0.009487, 1, 0.3),
        Result('DPAdamBC', True, 0.6073, 0.003419, 0.09487, 1, 1),
        Result('DPAdamSTP', False, 0.6052, 0.005512, 0.03, 16, 0.003),
        Result('DPAdamSTP', True, 0.6117, 0.004647, 0.3, 4, 0.1),
    )),
    Row('pros and cons', 4, 0.6931, (0.08458, 1.612, 0.1366, 0.0129, 256.0), (
        Result('DPSGD', False, 0.4308, 0.005713, 1, 1, 0),
        Result('DPSGD', True, 0.4203, 0.004187, 1, 1, 0),
        Result('DPAdam', False, 0.4198, 0.001805, 0.03, 1, 0.01),
        Result('DPAdam', True, 0.4176, 0.002997, 0.09487, 1, 0.01),
        Result('DPAdamBC', False, 0.4211, 0.001919, 0.03, 1, 1),
        Result('DPAdamBC', True, 0.4163, 0.002075, 0.03, 1, 0.3),
        Result('DPAdamSTP', False, 0.4154, 0.002112, 0.03, 4, 0.1),
        Result('DPAdamSTP', True, 0.4183, 0.003128, 0.09487, 4, 0.003),
    )),
    Row('regression', 4, 0.6063, (0.06469, 1.746, 0.04318, 0.2223, 100.0), (
        Result('DPSGD', False, 0.001263, 0.0002671, 0.3162, 0.3, 0),
        Result('DPSGD', True, 0.001102, 7.162e-05, 0.1, 0.1, 0),
        Result('DPAdam', False, 0.0006108, 8.649e-05, 0.03, 0.1, 0.01),
        Result('DPAdam', True, 0.0005719, 4.014e-05, 0.09487, 0.1, 0.01),
        Result('DPAdamBC', False, 0.0006222, 8.847e-05, 0.03, 0.1, 1),
        Result('DPAdamBC', True, 0.0005276, 0.0001372, 0.09487, 0.1, 1),
        Result('DPAdamSTP', False, 0.00018, 2.498e-05, 0.03, 1, 0.003),
        Result('DPAdamSTP', True, 0.0002825, 2.06e-05, 0.03, 1, 0.003),
    )),
    Row('mnist, linear', 1, 2.303, (0.2016, 1.004, 0.4189, 0.01193, 256.0), (
        Result('DPSGD', False, 0.3844, 0.005998, 3.162, 0.3, 0),
        Result('DPSGD', True, 0.3796, 0.005051, 0.3162, 0.3, 0),
        Result('DPAdam', False, 0.3852, 0.004607, 0.03, 0.3, 1),
        Result('DPAdam', True, 0.3822, 0.005653, 0.09487, 0.3, 0.01),
        Result('DPAdamBC', False, 0.3957, 0.008992, 0.009487, 0.3, 0.3),
        Result('DPAdamBC', True, 0.3877, 0.007482, 0.09487, 0.3, 1),
        Result('DPAdamSTP', False, 0.4146, 0.005494, 0.009487, 1, 0.1),
        Result('DPAdamSTP', True, 0.4291, 0.006827, 0.09487, 1, 0.003),
    )),
    Row('zipf classes, noisy', 4, 2.848, (0.1046, 1.746, 0.5945, 0.01422, 200.0), (
        Result('DPSGD', False, 1.202, 0.008634, 1, 1, 0),
        Result('DPSGD', True, 1.183, 0.005341, 10, 1, 0),
        Result('DPAdam', False, 1.195, 0.005463, 0.03, 1, 0.01),
        Result('DPAdam', True, 1.183, 0.003793, 0.09487, 1, 0.01),
        Result('DPAdamBC', False, 1.197, 0.006129, 0.03, 1, 1),
        Result('DPAdamBC', True, 1.186, 0.005158, 0.03, 1, 0.3),
        Result('DPAdamSTP', False, 1.188, 0.004178, 0.03, 3.761, 0.1),
        Result('DPAdamSTP', True, 1.187, 0.002968, 0.09487, 3.761, 0.003),
    )),
    Row('scales, clean', 4, 0.6931, (0.01512, 1.612, 0.2995, 0.02332, 256.0), (
        Result('DPSGD', False, 0.4523, 0.007648, 1, 1, 0),
        Result('DPSGD', True, 0.4502, 0.01721, 1, 1, 0),
        Result('DPAdam', False, 0.3733, 0.0176, 0.3, 1, 0.01),
        Result('DPAdam', True, 0.4209, 0.01337, 0.3, 1, 0.01),
        Result('DPAdamBC', False, 0.3423, 0.02218, 0.3, 1, 0.3),
        Result('DPAdamBC', True, 0.3573, 0.01551, 0.3, 1, 0.3),
        Result('DPAdamSTP', False, 0.1991, 0.02116, 0.9487, 16, 0.003),
        Result('DPAdamSTP', True, 0.3581, 0.02068, 0.3, 16, 0.003),
    )),
    Row('scales', 8, 0.6931, (0.012, 1.925, 0.2995, 0.01212, 256.0), (
        Result('DPSGD', False, 0.4922, 0.02553, 3.162, 1, 0),
        Result('DPSGD', True, 0.4885, 0.009386, 1, 1, 0),
        Result('DPAdam', False, 0.4206, 0.01998, 0.3, 1, 0.01),
        Result('DPAdam', True, 0.4506, 0.009452, 0.3, 1, 0.01),
        Result('DPAdamBC', False, 0.4099, 0.01563, 0.09487, 1, 0.3),
        Result('DPAdamBC', True, 0.3998, 0.01318, 0.3, 1, 0.3),
        Result('DPAdamSTP', False, 0.3269, 0.01124, 0.9487, 16, 0.003),
        Result('DPAdamSTP', True, 0.385, 0.009646, 0.3, 16, 0.003),
    )),
)
