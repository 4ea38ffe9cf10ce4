# SPDX-License-Identifier: Apache-2.0
"""Private Shampoo: clip and noise between the two matrices that precondition the update."""

from tfdp_adaptive import contract
from tfdp_adaptive.rules import kronecker


def dp_shampoo(
    beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-4, *,
    scale_epsilon: float = 1e-2, refresh_every: int = 50, max_size: int = 512) -> contract.Rule:
  """Shampoo (Gupta et al., arXiv:1802.09568) with scale-then-privatize between its matrices.

  The private form is ours. A record's gradient W of a matrix is clipped and noised as `A W G`,
  and with g the release taken back to gradient units, v the variance of its noise there:

      L = average of g g' less its noise;   A = (L d / tr L + scale_epsilon)^-1/4
      R = average of g'g less its noise;    G = (R p / tr R + scale_epsilon)^-1/4
      direction = A m G / max(sqrt(average of g^2 less its noise), epsilon)

  with m the normalized first moment: Shampoo's direction times (d p)^(1/4), so that learning
  rates are those of Adam. Eigenvalues that come out negative are noise and count as zero.
  Vectors have a scale per coordinate, `(nu / mean(nu) + scale_epsilon)^-1/2`.

  A and G are about one: `l2_norm_clip` is in gradient units, though a record whose
  gradient lies where gradients are large comes out shorter, by (d p)^(1/4) at most. They stay
  as they are for `refresh_every` steps, in which correlated noise cancels as in DP-SGD.
  Large `scale_epsilon` has the geometry of DP-SGD.

  Args:
    beta_1: Decay of the first moment, in [0, 1).
    beta_2: Decay of the second moments, in [0, 1).
    epsilon: Floor of the root mean square, in gradient units, > 0.
    scale_epsilon: Added to eigenvalues relative to their mean, > 0.
    refresh_every: Steps between two decompositions, in float64. XLA is slow at them on a CPU:
      some eight seconds for a side of 512, where TensorFlow takes a tenth of one. There,
      compile the model with `jit_compile=False` (Keras 3 chooses XLA by itself).
    max_size: Longer sides are left as they are, as tables of embeddings mostly are.

  Returns:
    A `contract.Rule` whose direction has no unit.
  """
  return kronecker.rule('dp_shampoo', beta_1, beta_2, epsilon, scale_epsilon, refresh_every,
                        max_size, rotated=False)
