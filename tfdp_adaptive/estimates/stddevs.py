# SPDX-License-Identifier: Apache-2.0
"""Private estimates of standard deviations, for ellipsoids (NumPy)."""

import math
from typing import Optional, Tuple

from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_mechanism
import numpy as np

from tfdp_adaptive import checks


def private_stddevs(
    records: np.ndarray, *, scale: float, moment_ratio: float, target_epsilon: float,
    target_delta: float, rng: Optional[np.random.Generator] = None) -> np.ndarray:
  """Privately estimates the root mean square of every coordinate, within a factor of two.

  Algorithm 3 of Asi et al. (2021) with its threshold on the scale of standard
  deviations and with exactly calibrated noise. The constants of the paper are not
  (target_epsilon, target_delta)-DP for few rounds. The cost comes on top of the cost of
  training. Sampling does not reduce it.

  Args:
    records: [n, d], for instance the features of a generalized linear model or
      per-example gradients; n is taken as public. A record that is not finite
      counts as zero.
    scale: Public upper bound of all root mean squares, > 0.
    moment_ratio: r >= 1, a bound of the ratio of high moments to the second.
    target_epsilon: The epsilon of this estimate, > 0.
    target_delta: The delta of this estimate, in (0, 1).
    rng: `numpy.random.Generator` for tests. By default the system's entropy is used.

  Returns:
    [d] float64, `scale * 2**-t` for t in 1..rounds.
  """
  z = checks.rectangular(records, '`records` must be a [n, d] matrix of numbers.', np.float64)
  if z.ndim != 2 or 0 in z.shape:
    raise ValueError('`records` must be a [n, d] matrix. Received: '
                     f'{z.ndim} axes, or none along one of them.')
  checks.positive(scale=scale, moment_ratio=moment_ratio)
  checks.require(moment_ratio >= 1, 'be >= 1', moment_ratio=moment_ratio)
  z = np.where(np.isfinite(z).all(axis=1, keepdims=True), z, 0.0)
  rng = np.random.default_rng() if rng is None else rng
  n, d = z.shape
  rounds, multiplier = calibration(d, target_epsilon, target_delta)
  estimate = np.full(d, scale * 2.0**-rounds)
  active = np.arange(d)
  for t in range(1, rounds + 1):
    if not active.size:
      break
    rho = 4 * moment_ratio * scale * 2.0**(1 - t) * max(1.0, math.log(moment_ratio))
    squares = np.square(np.minimum(np.abs(z[:, active]), rho)).mean(axis=0)
    std = multiplier * math.sqrt(active.size) * rho**2 / n
    noisy = squares + std * rng.standard_normal(active.size)
    large = np.sqrt(np.maximum(noisy, 0.0)) >= scale * 2.0**-(t + 1)
    estimate[active[large]] = scale * 2.0**-t
    active = active[~large]
  return estimate


def calibration(dimension: int, target_epsilon: float, target_delta: float) -> Tuple[int, float]:
  """Returns (number of rounds, noise multiplier of each) of `private_stddevs`.

  All rounds together are one exactly calibrated Gaussian mechanism of noise multiplier
  `multiplier / sqrt(rounds)`.
  """
  checks.positive(target_epsilon=target_epsilon)
  checks.probability(target_delta=target_delta)
  rounds = max(1, math.ceil(1.5 * math.log2(dimension)))
  single = privacy_loss_mechanism.GaussianPrivacyLoss.from_privacy_guarantee(
      common.DifferentialPrivacyParameters(target_epsilon, target_delta))
  return rounds, math.sqrt(rounds) * single.standard_deviation
