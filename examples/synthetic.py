# SPDX-License-Identifier: Apache-2.0
"""Synthetic inputs for rules that use public data; they contain nobody's data (NumPy).

    x = synthetic.pink_noise(64, (32, 32, 3))
    y = np.random.default_rng(1).integers(0, 10, 64)
    tfdp.DPKFC(..., public_data=(x, y))
"""

from typing import Sequence

import numpy as np

from tfdp_adaptive import checks


def pink_noise(
    count: int, shape: Sequence[int], exponent: float = 1.0, seed: int = 0) -> np.ndarray:
  """Returns noise whose power falls with frequency as `f^-exponent`, as in photographs and sounds.

  Args:
    count: How many inputs.
    shape: Shape of one input. Its last axis holds channels, which are independent. Inputs with one
      axis are white noise.
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
  """Returns words whose frequency falls with their rank r as `r^-exponent`, as in languages.

  Args:
    count: How many sequences.
    length: Words in each.
    vocabulary: How many words there are; id 0 is the most frequent.
    exponent: 0 gives equal frequencies.
    seed: Of the draws.

  Returns:
    [count, length] int32.
  """
  checks.whole(count=count, length=length, vocabulary=vocabulary)
  checks.not_negative(exponent=exponent)
  shares = np.arange(1, vocabulary + 1, dtype=np.float64)**-exponent
  return np.random.default_rng(seed).choice(
      vocabulary, size=(count, length), p=shares / shares.sum()).astype(np.int32)
