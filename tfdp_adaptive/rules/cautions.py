# SPDX-License-Identifier: Apache-2.0
"""Warnings about settings with which a rule is known to fail."""

import math
from typing import Callable, Tuple


def epsilon(value: float) -> Callable[[float, float, int], Tuple[str, ...]]:
  """Returns `Rule.cautions` of a rule that divides by at least `value` where noise may dominate."""

  def check(clip_norm: float, noise_std: float, size: int) -> Tuple[str, ...]:
    del clip_norm, size
    if not noise_std:
      return ()
    text = (f'epsilon={value:g}, and the noise per coordinate of the mean gradient is '
            f'{noise_std:.2g}')
    if value < noise_std / 20:
      return (f'{text}: where the second moment comes out negative, steps of pure noise are '
              f'{noise_std / value:.2g} learning rates long. Try epsilon near the noise.',)
    if value > 10 * noise_std:
      return (f'{text}: epsilon rather than the second moment scales most coordinates. '
              'Try epsilon near the noise.',)
    return ()

  return check


def scaled(clip_norm: float, noise_std: float, size: int) -> Tuple[str, ...]:
  """Returns `Rule.cautions` of scale-then-privatize."""
  cautions = []
  if noise_std >= 0.9:
    cautions.append(
        f'l2_norm_clip * noise_multiplier / batch_size is {noise_std:.2g} in scaled units: from 1 '
        'on the noise feeds itself through the scale, and the second moment grows without bound. '
        'Use larger batches, less noise or a smaller clip norm.')
  wanted = math.sqrt(size)
  if not wanted / 10 <= clip_norm <= 30 * wanted:  # The norm is up to sqrt(size * batch).
    cautions.append(
        f'l2_norm_clip={clip_norm:g} is in scaled units, where a well preconditioned gradient of '
        f'{size} parameters has norm {wanted:.2g}. Far below, this is DP-Adam with the clip norm '
        'l2_norm_clip * scale_epsilon; far above, nothing is clipped and all is noise.')
  return tuple(cautions)
