# SPDX-License-Identifier: Apache-2.0
"""Side queries: the noise on their numbers, and on the mean beside them."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import privatizer
from tfdp_adaptive import terms
from tfdp_adaptive.rules import statistics

SIZE, CLIP, SIGMA, B = 4000, 2.0, 1.5, 8.0
FACTOR, STD = 1.25, 3.0  # Side query: factor on the other noise, std on its own sum.


@pytest.mark.parametrize('adjacency', terms.ADJACENCIES)
def test_all_three_have_the_noise_that_is_accounted_for(adjacency):
  """A record moves mean, square and numbers together: each has its noise, doubled under replace."""
  statistic = statistics.square_of_mean()
  side = contract.SideQuery(SIZE, lambda norm, clip: norm, lambda sigma, batch_size: (FACTOR, STD))
  made = privatizer.Privatizer(
      (contract.Ask(second=statistic, side_query=side),), tf.TensorSpec([SIZE]), l2_norm_clip=CLIP,
      noise_multiplier=SIGMA, batch_size=B, adjacency=adjacency, seed=3)
  zeros = tf.zeros([SIZE])
  ((release,), _) = made.release(
      made.init(), (contract.Query(),), (contract.Sums(zeros, (), zeros),))
  of_mean, of_square = statistic.stddevs(CLIP, B, adjacency)
  expected = {'mean': FACTOR * SIGMA * of_mean, 'second': FACTOR * SIGMA * of_square,
              'side_mean': (2 if adjacency == 'replace' else 1) * STD / B}
  variances = {'mean': release.variance, 'second': release.second_variance,
               'side_mean': release.side_variance}
  for name, std in expected.items():
    np.testing.assert_allclose(variances[name], std**2, rtol=1e-5)
    drawn = np.std(getattr(release, name))  # 4,000 draws: within 1.1% in two cases of three.
    assert abs(drawn / std - 1) < 0.05, name
