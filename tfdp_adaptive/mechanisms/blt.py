# SPDX-License-Identifier: Apache-2.0
"""Buffered linear Toeplitz (BLT) strategies: a few decaying buffers, for any number of steps.

McMahan, Xu, Zhang 2024 (arXiv:2408.08868); Dvijotham et al. 2024
(arXiv:2404.16706); the pair C, C^-1: arXiv:2504.21413, Theorem 2.
"""

from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from tfdp_adaptive import checks
from tfdp_adaptive.mechanisms import blt_design
from tfdp_adaptive.mechanisms import registry
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.mechanisms import workload as workload_lib

_MOST = 10  # Buffers that are designed: at a million steps, the tenth gains less than 1e-5.


@registry.register(registry.Design('blt', 'buffers'))
class BLT(toeplitz.ToeplitzMechanism):
  """C with coefficients `C_0 = c_0`, `C_j = c_0 sum_i omega_i theta_i^(j-1)`.

  The streaming state is `buffers` rows, whatever T. The sensitivity grows with the number of steps,
  so a run beyond `steps` is refused.

  Args:
    buffers: Number of buffers d; 0 is independent noise; designed up to 10.
    steps: T, at most `most_steps`.
    weights: [buffers] omega, to be given with `decays`, instead of a design.
    decays: [buffers] theta in (0, 1), instead of a design.
    min_sep: Least distance between two steps of a record. The design minimizes the error for
      `min_sep` and `max_participations`.
    max_participations: As in `sensitivity`.
    workload: A `Workload` or its config; None for prefix sums.
    objective: 'mean', 'max' or 'last', the error to minimize.
  """

  steps: int
  buffers: int
  cached = True
  most_steps = 1 << 22  # All coefficients of C are written out.

  def __init__(
      self, buffers: int, steps: int, *, weights: Optional[Sequence[float]] = None,
      decays: Optional[Sequence[float]] = None, min_sep: Optional[int] = None,
      max_participations: int = 1, workload: workload_lib.Like = None,
      objective: str = 'mean') -> None:
    super().__init__(steps=steps, workload=workload, objective=objective, min_sep=min_sep,
                     max_participations=max_participations)
    checks.require(self.steps <= self.most_steps,
                   f'be at most {self.most_steps} for a BLT. Use BandedToeplitz, which takes any '
                   'number of steps, or fewer steps of larger batches', steps=steps)
    checks.whole(0, buffers=buffers)
    self.buffers = int(buffers)
    self._given = _check(weights, decays, self.buffers)
    checks.require(self._given is not None or self.buffers <= _MOST,
                   f'be at most {_MOST} to be designed: more gain nothing (four are within 1% of '
                   'the best Toeplitz noise up to a million steps), and cost a row of memory '
                   'each. Give `weights` and `decays` to use more', buffers=buffers)

  @property
  def output_scale(self) -> np.ndarray:
    """[] c_0: `x_t = z_t / c_0 - sum_i omega_i s_i`, then `s_i <- theta_i s_i + x_t`."""
    return self.arrays['output_scale']

  @property
  def weights(self) -> np.ndarray:
    """[buffers] omega of C."""
    return self.arrays['weights']

  @property
  def decays(self) -> np.ndarray:
    """[buffers] theta of C, in (0, 1), decreasing."""
    return self.arrays['decays']

  def shapes(self) -> Dict[str, Tuple[int, ...]]:
    return {'output_scale': (), 'weights': (self.buffers,), 'decays': (self.buffers,)}

  def design(self) -> Mapping[str, npt.ArrayLike]:
    if self._given is not None:
      weights, decays = map(np.asarray, self._given)
    else:
      weights, decays = blt_design.optimal(
          self.buffers, self.steps, self.workload, self.objective, self.min_sep or 1,
          self.max_participations, name=repr(self))
    norm = blt_design.sensitivity(1.0, weights, decays, self.steps, 1, 1)
    return {'output_scale': 1 / norm, 'weights': weights, 'decays': decays}

  def _say(self) -> None:
    if self._given is None and self.buffers and not self.workload.is_toeplitz and (
        not blt_design.evaluations(self.buffers, self.steps)):
      workload_lib.warn(f'BLT(buffers={self.buffers}, steps={self.steps})')

  def check_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
    super().check_arrays(arrays)
    decays = arrays['decays']
    if np.any(decays >= 1) or np.any(decays <= 0) or np.any(np.diff(decays) >= 0):
      raise ValueError(f'`dtype` must tell the decays from one another and from 1. Received: '
                       f'{self.dtype} for {self!r}. Use a wider type, fewer steps or buffers.')

  def strategy(self, n: Optional[int] = None) -> np.ndarray:
    return blt_design.coefficients(
        float(self.output_scale), self.weights, self.decays, self._rows(n))

  def noising(self, n: Optional[int] = None) -> np.ndarray:
    n = self._rows(n)
    weights, decays = blt_design.invert(self.weights, self.decays)
    return blt_design.coefficients(1 / float(self.output_scale), weights, decays, n)

  def memory(self) -> int:
    return self.buffers

  def squared_errors(self, n: Optional[int] = None) -> np.ndarray:
    if self.workload.is_toeplitz:
      return super().squared_errors(n)
    weights, decays = blt_design.invert(self.weights, self.decays)
    if not np.all(np.isfinite(weights)):  # Three decays or more that are equal but for rounding.
      return super().squared_errors(n)
    return workload_lib.squared_errors_of_decays(
        self.workload, self._rows(n), weights, decays) / float(self.output_scale)**2


def _check(
    weights: Optional[Sequence[float]], decays: Optional[Sequence[float]], buffers: int) -> Any:
  """Returns `(weights, decays)` as tuples of floats, or None if neither is given."""
  if weights is None and decays is None:
    return None
  omega, theta = (np.asarray(() if v is None else v, np.float64) for v in (weights, decays))
  checks.require(
      omega.shape == theta.shape == (buffers,) and np.all(omega > 0) and np.all(np.isfinite(omega))
      and np.all((theta > 0) & (theta < 1)) and np.all(np.diff(theta) < 0),
      f'be {buffers} positive numbers, and `decays` as many decreasing ones in (0, 1)',
      weights=weights, decays=decays)
  return tuple(omega.tolist()), tuple(theta.tolist())
