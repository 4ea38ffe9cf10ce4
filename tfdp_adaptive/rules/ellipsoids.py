"""Ellipsoids for PASAN and PAGAN, and the private estimate they may come from (NumPy)."""

import math

from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_mechanism
import numpy as np

from tfdp_adaptive.rules import base


def pagan_ellipsoid(stddevs, bound=None):
  """The ellipsoid that suits `rules.pagan`: a = C / bound^2 with C = stddevs^(-4/3).

  Minimizes the error bound of Asi et al. (2021) for sub-Gaussian coordinates.

  Args:
    stddevs: [d] root mean squares of the gradient's coordinates, > 0, known or
      estimated from public data or by `private_stddevs`; or a list of arrays,
      one per variable.
    bound: Of the gradient's norm in the metric C, at which records are clipped
      by `l2_norm_clip=1`. Its root mean square by default.

  Returns:
    `ellipsoid`, in the structure of `stddevs`.
  """
  return _ellipsoid(stddevs, -4 / 3, bound)


def pasan_ellipsoid(stddevs, bound=None):
  """As `pagan_ellipsoid` for `rules.pasan`: C = 1 / stddevs."""
  return _ellipsoid(stddevs, -1.0, bound)


def private_stddevs(records, *, scale, moment_ratio, target_epsilon, target_delta, rng=None):
  """Root mean squares of coordinates within a factor of two, privately.

  Algorithm 3 of Asi et al. (2021) with its threshold on the scale of standard
  deviations and with exactly calibrated noise: the constants printed there are
  not (target_epsilon, target_delta)-DP when few rounds are made. The cost comes
  on top of that of training; no amplification by sampling applies.

  Args:
    records: [n, d], for instance the features of a generalized linear model or
      per-example gradients; n is taken as public. A record that is not finite
      counts as zero.
    scale: Upper bound of all root mean squares, > 0; public.
    moment_ratio: r >= 1, a bound of the ratio of high moments to the second.
    target_epsilon: Of this estimate, > 0.
    target_delta: Of this estimate, in (0, 1).
    rng: `numpy.random.Generator`, for tests; entropy of the system by default.

  Returns:
    [d] float64, `scale * 2**-t` for t in 1..rounds.
  """
  z = np.asarray(records, np.float64)
  if z.ndim != 2 or 0 in z.shape:
    raise ValueError(f'`records` must be a [n, d] matrix. Received: shape {z.shape}.')
  base.check_positive(scale=scale, moment_ratio=moment_ratio)
  if moment_ratio < 1:
    raise ValueError(f'`moment_ratio` must be >= 1. Received: moment_ratio={moment_ratio}.')
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
    found = np.sqrt(np.maximum(noisy, 0.0)) >= scale * 2.0**-(t + 1)
    estimate[active[found]] = scale * 2.0**-t
    active = active[~found]
  return estimate


def calibration(dimension, target_epsilon, target_delta):
  """(number of rounds, noise multiplier of each) of `private_stddevs`.

  Together they are one Gaussian mechanism of noise multiplier
  `multiplier / sqrt(rounds)`, exactly calibrated.
  """
  base.check_positive(target_epsilon=target_epsilon)
  if not 0 < target_delta < 1:
    raise ValueError(f'`target_delta` must be in (0, 1). Received: target_delta={target_delta}.')
  rounds = max(1, math.ceil(1.5 * math.log2(dimension)))
  single = privacy_loss_mechanism.GaussianPrivacyLoss.from_privacy_guarantee(
      common.DifferentialPrivacyParameters(target_epsilon, target_delta))
  return rounds, math.sqrt(rounds) * single.standard_deviation


def _ellipsoid(stddevs, power, bound):
  arrays = [np.asarray(s, np.float64) for s in (
      stddevs if isinstance(stddevs, (list, tuple)) else [stddevs])]
  for s in arrays:
    if not np.all((s > 0) & np.isfinite(s)):
      raise ValueError(f'`stddevs` must be positive and finite. Received: {s}.')
  if bound is None:
    bound = math.sqrt(sum(np.sum(s**(2 + power)) for s in arrays))
  base.check_positive(bound=bound)
  ellipsoid = [s**power / bound**2 for s in arrays]
  return ellipsoid if isinstance(stddevs, (list, tuple)) else ellipsoid[0]
