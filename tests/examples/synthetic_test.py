# SPDX-License-Identifier: Apache-2.0
"""Made-up inputs have the spectrum and the frequencies that they say."""

import numpy as np
import pytest

from tfdp_adaptive.examples import synthetic


@pytest.mark.parametrize('exponent', [0.0, 1.0, 2.0])
def test_the_power_of_noise_falls_with_frequency(exponent):
  x = synthetic.pink_noise(400, (32, 2), exponent)
  assert x.dtype == np.float32 and x.shape == (400, 32, 2)
  assert np.mean(np.square(x, dtype=np.float64)) == pytest.approx(1, abs=.1)
  power = np.mean(np.abs(np.fft.fft(x, axis=1))**2, (0, 2))[1:17]
  slope = np.polyfit(np.log(np.arange(1, 17)), np.log(power), 1)[0]
  assert slope == pytest.approx(-exponent, abs=.15)


def test_images_look_alike_in_all_directions_and_vectors_are_white():
  x = synthetic.pink_noise(200, (16, 16, 1), 2.0)
  power = np.mean(np.abs(np.fft.fft2(x[..., 0]))**2, 0)
  np.testing.assert_allclose(power[0, 1:8], power[1:8, 0], rtol=.6)
  assert power[1, 1] / power[4, 4] == pytest.approx(16, rel=.6)
  covariance = np.cov(synthetic.pink_noise(4000, (5,)).T)
  np.testing.assert_allclose(covariance, np.eye(5), atol=.15)


def test_words_have_the_frequencies_of_zipf():
  x = synthetic.zipf_tokens(2000, 10, 50)
  counts = np.bincount(x.ravel(), minlength=50)
  expected = 20000 / np.arange(1, 51) / np.sum(1 / np.arange(1, 51))
  assert x.dtype == np.int32 and x.shape == (2000, 10) and x.max() < 50
  assert np.sum((counts - expected)**2 / expected) < 150  # Chi-squared with 49 degrees of freedom.


def test_seeds_and_arguments():
  np.testing.assert_array_equal(
      synthetic.pink_noise(2, (4, 4, 1), seed=3), synthetic.pink_noise(2, (4, 4, 1), seed=3))
  assert np.any(synthetic.zipf_tokens(2, 9, 50) != synthetic.zipf_tokens(2, 9, 50, seed=1))
  with pytest.raises(ValueError, match='`count`'):
    synthetic.pink_noise(0, (4,))
  with pytest.raises(ValueError, match='`exponent`'):
    synthetic.zipf_tokens(2, 3, 4, exponent=-1)
