# SPDX-License-Identifier: Apache-2.0
"""Noise at the edges of a dtype: of the stated variance, or refused before anything runs."""

import math

import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import privatizer
from tfdp_adaptive import rules
from tfdp_adaptive.rules import statistics

ASKS = {
    'mean': contract.Ask(),
    'squared mean': contract.Ask(second=statistics.square_of_mean()),
    'squares': contract.Ask(second=statistics.joint_mean_of_squares()),
    'quantile': rules.quantile_clip(rules.dp_sgd()).asks[0],
    'slack': rules.slack_clip(rules.dp_sgd(), 3).asks[0]}
NUMBERS = [(clip, sigma, batch) for clip in (1e-44, 1e-30, 1e-18, 1e-9, 1., 1e9, 1e18, 1e30, 1e200)
           for sigma in (1e-6, 0.0, 1.0, 1e20) for batch in (1.0, 1e3, 1e12)]


def release(ask, dtype, clip, sigma, batch, size=4, adjacency='replace'):
  one = privatizer.Privatizer((ask,), tf.TensorSpec([size], dtype), l2_norm_clip=clip,
                              noise_multiplier=sigma, batch_size=batch, adjacency=adjacency, seed=1)
  sums = contract.Sums(
      tf.zeros([size], dtype),
      tf.zeros([size], dtype) if ask.second is not None and ask.second.per_record_square else (),
      tf.zeros([ask.side_query.size], dtype) if ask.side_query is not None else ())
  return one.release(one.init(), (contract.Query(),), (sums,))[0][0]


def variances(ask, clip, sigma, batch, adjacency='replace'):
  """Of mean, second and side query, in Python's numbers; () of what is not released."""
  factor, side = (1.0, None) if ask.side_query is None else ask.side_query.noise(sigma, batch)
  distance = {'replace': 2.0, 'zero_out': 1.0}[adjacency]
  mean, second = distance * clip / batch, None
  if ask.second is not None:
    mean, second = ask.second.stddevs(clip, batch, adjacency)
  return [() if std is None else std**2 for std in (
      mean * sigma * factor, None if second is None else second * sigma,
      None if side is None else distance * side / batch)]


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64], ids=lambda d: d.name)
@pytest.mark.parametrize('name', sorted(ASKS))
def test_the_variance_is_the_stated_one_or_the_numbers_are_refused(name, dtype):
  taken = 0
  for numbers in NUMBERS:
    try:
      got = release(ASKS[name], dtype, *numbers)
    except ValueError as error:
      assert 'Received' in str(error), numbers
      continue
    taken += 1
    assert all(np.all(np.isfinite(leaf)) for leaf in tf.nest.flatten(got)), numbers
    precision = 1e-5 if dtype == tf.float32 else 1e-13
    for stated, true in zip((got.variance, got.second_variance, got.side_variance),
                            variances(ASKS[name], *numbers)):
      if true != ():
        np.testing.assert_allclose(float(stated), true, rtol=precision, err_msg=str(numbers))
        assert stated.dtype == dtype
  assert len(NUMBERS) / 10 < taken < len(NUMBERS)


@pytest.mark.parametrize('clip', [1e-30, 1e-22, 1e30, 1e39])
def test_a_clip_norm_that_float32_cannot_square_is_refused(clip):
  with pytest.raises(ValueError, match='must fit into float32.*Scale the loss'):
    release(ASKS['mean'], tf.float32, clip, 1.0, 4.0)
  release(ASKS['mean'], tf.float64, clip, 1.0, 4.0)


@pytest.mark.parametrize('adjacency, factor', [('zero_out', 1), ('replace', 2)])
@pytest.mark.parametrize('name', ['quantile', 'slack'])
def test_numbers_that_ride_along_have_the_noise_of_their_neighbours(name, adjacency, factor):
  """Under replace one record turns from 1/2 to -1/2: twice the distance, twice the noise."""
  wide = ASKS[name].side_query._replace(size=4000)
  ask, sigma, batch = ASKS[name]._replace(side_query=wide), 0.8, 64.0
  std = {'quantile': batch / 20, 'slack': sigma}[name] * factor / batch
  got = release(ask, tf.float64, 0.5, sigma, batch, adjacency=adjacency)
  assert math.sqrt(got.side_variance) == pytest.approx(std, rel=1e-13)
  accepts = lambda s: stats.kstest(got.side_mean.numpy() / s, 'norm').pvalue > 1e-4
  assert accepts(std) and not accepts(std / 2) and not accepts(2 * std)
