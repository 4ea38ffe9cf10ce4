# SPDX-License-Identifier: Apache-2.0
"""Noise that is as announced passes as often as stated; noise that is not is caught."""

import math

import numpy as np
import pytest

from tfdp_adaptive.audit import noise_rows

RNG = np.random.default_rng(0)


def rows(scale=1.0, steps=8, length=400):
  return scale * RNG.standard_normal((steps, length))


def test_right_noise_is_refuted_as_rarely_as_stated():
  p_values = np.array([noise_rows.weakest([('mean', rows()), ('mean', rows()),
                                           ('second', rows(length=50))]).p_value
                       for _ in range(300)])
  for level in (0.01, 0.05, 0.2):
    refuted = np.mean(p_values <= level)
    assert refuted <= level + 3 * math.sqrt(level * (1 - level) / 300)
  assert np.mean(p_values <= 0.2) > 0.01  # Not vacuous.


def test_more_noise_refutes_nothing():
  assert noise_rows.weakest([('mean', rows(1.5))]).p_value == 1


@pytest.mark.parametrize('named_rows', [
    [('mean', rows(0.95, steps=12, length=2000))],
    [('mean', rows(0.5))],
    [('mean', np.concatenate([rows(), rows(0.8, steps=1)]))],
    [('mean', np.tile(rows(steps=1), (8, 1)))],
    [('mean', same := rows()), ('second', same)],
    [('mean', same), ('mean', same)],
    [('mean', np.repeat(rows(length=200), 2, axis=1))],
    [('mean', np.concatenate([rows(steps=7), 0 * rows(steps=1)]))],
    [('mean', np.concatenate([first := rows(), -first]))]], ids=[
        'five percent', 'half', 'one step', 'same at each step', 'same in two parts',
        'same in two runs', 'same for two elements', 'none at one step', 'taken back'])
def test_less_noise_is_caught(named_rows):
  assert noise_rows.weakest(named_rows).p_value < 1e-4


def test_the_weakest_point_is_named():
  assert 'two steps share' in noise_rows.weakest([('mean', np.tile(rows(steps=1), (8, 1)))]).what
  one = 1.2 * np.sign(rows(length=1))  # No step is near zero, which would be found first.
  assert 'elements' in noise_rows.weakest([('mean', np.tile(one, (1, 400)))]).what


def test_what_is_added_after_the_noise_refutes():
  """From two keys, by a penalty up to 1,619 times as large as the noise, whatever its size."""
  rng = np.random.default_rng(0)
  found = lambda keys, scale, shift, length: noise_rows.weakest(
      [('mean', scale * rows())], [scale * (rng.standard_normal((keys, length)) + shift)]).p_value
  for scale in (1.0, 50.0):  # More noise than announced alone refutes nothing.
    assert found(2, scale, 0.0, 64) > 0.01
    assert found(2, scale, 1.0, 200) < 1e-4 > found(2, scale, 1619.0, 8)
    assert found(10, scale, 3.0, 3) < 1e-4


def test_what_keys_share_is_found_as_rarely_as_stated():
  rng = np.random.default_rng(0)
  p_values = np.array([noise_rows._shared(rng.standard_normal((3, 20))) for _ in range(2000)])
  for level in (0.01, 0.1, 0.5):
    assert abs(np.mean(p_values <= level) - level) < 4 * math.sqrt(level * (1 - level) / 2000)
