# SPDX-License-Identifier: Apache-2.0
"""Private SOAP: Adam in the coordinates of Shampoo's matrices, which also clip and noise."""

from tfdp_adaptive import contract
from tfdp_adaptive.rules import kronecker


def dp_soap(
    beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-4, *,
    scale_epsilon: float = 1e-2, refresh_every: int = 50, max_size: int = 512) -> contract.Rule:
  """SOAP (Vyas et al., arXiv:2409.11321) with scale-then-privatize between its matrices.

  The private form is ours. Records are clipped and noised as in `dp_shampoo`, between A and G;
  with Q_A, Q_G the eigenvectors of these, and h = Q_A' g Q_G the release in their coordinates:

      nu = average of h^2 less its noise, which there is v / (a_i c_j)^2 at row i, column j
      direction = Q_A (normalized average of h / sqrt(max(nu, epsilon^2))) Q_G'

  with a, c the eigenvalues of A and G. At a refresh the first moment moves to the new
  coordinates; nu stays, as in SOAP. Vectors are Adam's, in their own coordinates.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moments, in [0, 1).
    epsilon: Floor of the root of nu, in gradient units, > 0.
    scale_epsilon: Added to eigenvalues relative to their mean, > 0.
    refresh_every: Steps between two decompositions, see `dp_shampoo`.
    max_size: Longer sides are left as they are.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return kronecker.rule('dp_soap', beta_1, beta_2, epsilon, scale_epsilon, refresh_every,
                        max_size, rotated=True)
