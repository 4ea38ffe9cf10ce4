# SPDX-License-Identifier: Apache-2.0
"""Privacy losses of secret bins, for the second accountant.

They come from a Fourier transform over the sum of lognormals, and from no code of `allocation`.
"""

import dataclasses
import math
from typing import Any, Tuple

import dp_accounting
from dp_accounting import pld
import numpy as np
from scipy import fft
from scipy import special

_REACH = 7.0  # Standard deviations of a normal that are looked at.
_MOST_CELLS = 1 << 23


@dataclasses.dataclass(frozen=True)
class SecretBins(dp_accounting.DpEvent):
  """One of some bins, each as likely, is moved by a shift of its own, in standard deviations."""

  shifts: Tuple[Tuple[int, float], ...]  # (count, shift)

  @property
  def noise_multiplier(self) -> float:
    """The noise multiplier of the largest shift."""
    return 1 / max(shift for count, shift in self.shifts if count)

  def ratios(self) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the mean R of lognormals and its masses, by a Fourier transform on a linear grid.

    Masses as small as errors of the transform are left out, which only takes from divergences.
    """
    total = sum(count for count, _ in self.shifts)
    moved = [(count, shift) for count, shift in self.shifts if count and shift]
    still = total - sum(count for count, _ in moved)  # Each is 1, which the grid need not have.
    step = min(0.01 * shift * math.exp(-shift**2 / 2) for _, shift in moved)
    largest = max(math.exp(shift * _REACH + shift**2 / 2) for _, shift in moved)
    spread = math.sqrt(sum(count * math.expm1(shift**2) for count, shift in moved))
    cells = (largest + total + 12 * spread) / step
    if cells > _MOST_CELLS:
      raise ArithmeticError('The grid is too long.')
    size = fft.next_fast_len(int(cells) + 1)
    values = np.arange(int(largest / step) + 2) * step
    spectrum = 1.0
    for count, shift in moved:
      below = np.log(values + step / 2) / shift + shift / 2
      spectrum *= fft.rfft(np.diff(special.ndtr(below), prepend=0.0), size)**count
    mass = fft.irfft(spectrum, size)
    mass = np.maximum(mass + 2 * min(0.0, float(mass.min())), 0.0)
    ratio = (np.arange(size) * step + still) / total
    kept = (mass > 0) & (ratio > 0)
    return ratio[kept], mass[kept]

  def losses(self, grid: float) -> Any:
    """Returns the losses: cells of R differ by their rounded logarithm, which only lowers it."""
    ratio, mass = self.ratios()
    cell = np.round(np.log(ratio) / grid).astype(int)
    first = cell.min()
    absent, present = (np.bincount(cell - first, one) for one in (mass, mass * ratio))
    lower, upper = ({int(i): math.log(of[i]) for i in np.flatnonzero(absent)}
                    for of in (absent, present))
    make = pld.privacy_loss_distribution.from_two_probability_mass_functions
    # dp-accounting 0.4 fails with `symmetric=False`.
    return pld.privacy_loss_distribution.PrivacyLossDistribution(*(
        make(*pair, value_discretization_interval=grid)._pmf_remove  # pylint: disable=protected-access
        for pair in ((lower, upper), (upper, lower))))
