# SPDX-License-Identifier: Apache-2.0
"""Facts that describe a task, computed from public constants and PUBLIC gradients."""

import math
from typing import Dict, NamedTuple, Optional

import numpy as np
import numpy.typing as npt

# How far apart tasks are at which evidence counts 1/e: of log10(noise), log10(correlation),
# log10(evenness) and log10(agreement).
_WIDTHS = (.5, .15, .4, .6)


class Facts(NamedTuple):
  """Facts that describe a task; None if they need public gradients that are missing.

  Attributes:
    noise: sigma sqrt(m) / B: noise of all coordinates over the clip norm.
    correlation: Error of independent noise over that of banded noise, at equal epsilon.
    evenness: (sum_j s_j)^2 / (m sum_j s_j^2), where s_j is the root mean square of coordinate j
      of a gradient. It is 1 if all coordinates have the same size.
    agreement: Squared norm of the expected gradient over the expected squared norm. It is 1 if
      all records have the same gradient.
    batch_size: Expected batch size B.
  """

  noise: float
  correlation: float
  evenness: Optional[float] = None
  agreement: Optional[float] = None
  batch_size: Optional[float] = None

  @property
  def noise_to_signal(self) -> Optional[float]:
    """Returns noise over signal of one step in the best scaling of coordinates, or None.

    The mean of B records has `sqrt(a + (1 - a) / B)` of a record's norm, where a is the agreement.
    The least noise of an ellipsoid is `sqrt(evenness)` times that of a ball. This is PASAN's
    ellipsoid, whose axes are proportional to the roots of the sizes of coordinates. If the result
    is 1 or more, second moments of noisy gradients are mostly noise in any such scaling.
    """
    if self.evenness is None or self.agreement is None or self.batch_size is None:
      return None
    kept = self.agreement + (1 - self.agreement) / self.batch_size
    return self.noise * math.sqrt(self.evenness / kept)

  def distance(self, other: 'Facts') -> float:
    """Returns the Euclidean distance, in units of widths, over the facts that both have."""
    pairs = zip(_WIDTHS, self, other)
    return math.sqrt(sum(
        (math.log10(max(a, 1e-3) / max(b, 1e-3)) / width)**2
        for width, a, b in pairs if a is not None and b is not None))


def facts_of(gradients: npt.ArrayLike) -> Dict[str, float]:
  """Returns `evenness` and `agreement` of PUBLIC gradients [n, parameters], see `Facts`.

  The estimate of the agreement is unbiased before it is clipped to [0, 1].
  """
  values = numbers(gradients)
  if values.ndim != 2 or len(values) < 2 or not np.all(np.isfinite(values)) or not values.any():
    raise ValueError('`gradients` must be finite, of shape [records, parameters] with at least '
                     f'two records, and not all zero. Received: shape {values.shape}.')
  size, squares = len(values), np.square(values).mean(0)
  ratio = float(np.square(values.mean(0)).sum() / squares.sum())
  return dict(
      evenness=float(np.sqrt(squares).sum()**2 / (len(squares) * squares.sum())),
      agreement=float(np.clip((size * ratio - 1) / (size - 1), 0, 1)))


def evenness_of(
    input_sizes: Optional[npt.ArrayLike] = None,
    class_frequencies: Optional[npt.ArrayLike] = None) -> Optional[float]:
  """Returns `Facts.evenness` of a last layer, computed from PUBLIC numbers without gradients.

  A record's gradient is the outer product of its inputs and `p - e_y`. If the model knows only the
  frequencies `p`, the second factor has the sizes `sqrt(p_k (1 - p_k))`. If both factors are
  independent, the evenness is the product of their evennesses.

  Args:
    input_sizes: Root mean square of each input (for words, the root of the frequency); None if
      all are equal.
    class_frequencies: Shares of at least two classes; None if all are equal.

  Returns:
    The evenness, or None if neither argument is given.
  """
  if input_sizes is None and class_frequencies is None:
    return None
  result = 1.0
  if input_sizes is not None:
    sizes = _not_negative(input_sizes, 'input_sizes', 1)
    result *= float(sizes.sum()**2 / (len(sizes) * np.square(sizes).sum()))
  if class_frequencies is not None:
    shares = _not_negative(class_frequencies, 'class_frequencies', 2)
    shares = shares / shares.sum()
    variances = shares * (1 - shares)
    if not variances.any():
      raise ValueError('`class_frequencies` must be positive for two classes at least. '
                       f'Received: {class_frequencies!r}.')
    result *= float(np.sqrt(variances).sum()**2 / (len(shares) * variances.sum()))
  return result


def _not_negative(values: npt.ArrayLike, name: str, fewest: int) -> np.ndarray:
  array = numbers(values, name)
  if (array.ndim != 1 or len(array) < fewest or not np.all(np.isfinite(array))
      or (array < 0).any() or not array.any()):
    raise ValueError(f'`{name}` must be a list of {fewest} or more finite numbers that are not '
                     f'negative and not all zero. Received: {values!r}.')
  return array / array.max()


def numbers(values: npt.ArrayLike, name: str = 'gradients') -> npt.NDArray[np.float64]:
  """Returns the values as an array, or raises a ValueError that names the argument."""
  try:
    return np.asarray(values, np.float64)
  except (TypeError, ValueError, OverflowError) as error:
    raise ValueError(f'`{name}` must be an array of numbers. '
                     f'Received: {values!r:.60} ({error}).') from error
