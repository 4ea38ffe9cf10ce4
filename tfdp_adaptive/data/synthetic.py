# SPDX-License-Identifier: Apache-2.0
"""Made-up inputs, public because nobody's data is in them: for rules that use public data (NumPy).

    x = synthetic.pink_noise(64, (32, 32, 3))
    y = np.random.default_rng(1).integers(0, 10, 64)
    tfdp.DPKFC(..., public_data=(x, y))
"""

from typing import Sequence

import numpy as np

from tfdp_adaptive import checks


def pink_noise(
    count: int, shape: Sequence[int], exponent: float = 1.0, seed: int = 0) -> np.ndarray:
  """Noise whose power falls with frequency as `f^-exponent`, as that of photographs and sounds.

  Args:
    count: How many inputs.
    shape: Of one, its last axis being channels, which are independent. Inputs of one axis
      have no neighbours: white noise.
    exponent: 0 is white; photographs have about 2.
    seed: Of the draws.

  Returns:
    [count, *shape] float32 with mean zero and variance one.
  """
  checks.whole(count=count)
  checks.not_negative(exponent=exponent)
  axes = tuple(range(1, len(shape)))
  noise = np.random.default_rng(seed).normal(size=(count, *shape))
  frequencies = np.meshgrid(*[np.fft.fftfreq(size) for size in shape[:-1]], indexing='ij')
  if axes:
    square = sum((f**2 for f in frequencies), np.zeros(shape[:-1]))
    least = np.min(square[square > 0], initial=1.0)
    amplitude = np.maximum(square, least)**(-exponent / 4)
    noise = np.fft.ifftn(
        np.fft.fftn(noise, axes=axes) * amplitude[..., np.newaxis], axes=axes).real
    noise /= np.sqrt(np.mean(amplitude**2))
  return noise.astype(np.float32)


def zipf_tokens(
    count: int, length: int, vocabulary: int, exponent: float = 1.0, seed: int = 0) -> np.ndarray:
  """Words whose frequency falls with their rank r as `r^-exponent`, as those of languages.

  Args:
    count: How many sequences.
    length: Words in each.
    vocabulary: How many words there are; id 0 is the most frequent.
    exponent: 0 has all alike.
    seed: Of the draws.

  Returns:
    [count, length] int32.
  """
  checks.whole(count=count, length=length, vocabulary=vocabulary)
  checks.not_negative(exponent=exponent)
  shares = np.arange(1, vocabulary + 1, dtype=np.float64)**-exponent
  return np.random.default_rng(seed).choice(
      vocabulary, size=(count, length), p=shares / shares.sum()).astype(np.int32)
