# SPDX-License-Identifier: Apache-2.0
"""Facts that describe a task of `evidence.py`."""

import math
from typing import Dict, NamedTuple

import numpy as np
import numpy.typing as npt


class Facts(NamedTuple):
  """Facts that describe a task.

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
  evenness: float
  agreement: float
  batch_size: float

  @property
  def noise_to_signal(self) -> float:
    """Returns noise over signal of one step in the best scaling of coordinates.

    The mean of B records has `sqrt(a + (1 - a) / B)` of a record's norm, where a is the agreement.
    The least noise of an ellipsoid is `sqrt(evenness)` times that of a ball. This is PASAN's
    ellipsoid, whose axes are proportional to the roots of the sizes of coordinates. If the result
    is 1 or more, second moments of noisy gradients are mostly noise in any such scaling.
    """
    kept = self.agreement + (1 - self.agreement) / self.batch_size
    return self.noise * math.sqrt(self.evenness / kept)


def facts_of(gradients: npt.ArrayLike) -> Dict[str, float]:
  """Returns `evenness` and `agreement` of gradients [n, parameters], see `Facts`.

  The estimate of the agreement is unbiased before it is clipped to [0, 1].
  """
  values = np.asarray(gradients, np.float64)
  size, squares = len(values), np.square(values).mean(0)
  ratio = float(np.square(values.mean(0)).sum() / squares.sum())
  return dict(
      evenness=float(np.sqrt(squares).sum()**2 / (len(squares) * squares.sum())),
      agreement=float(np.clip((size * ratio - 1) / (size - 1), 0, 1)))
