# SPDX-License-Identifier: Apache-2.0
"""One set of argument checks: what is a number, and what every error says."""

import math

import numpy as np
import pytest

from tfdp_adaptive import checks

HUGE = 10**400  # No float.
NO_NUMBERS = (True, False, '1', None, [1], 1j, np.bool_(True), math.nan)


@pytest.mark.parametrize('check, good, bad', [
    (checks.positive, (1, 0.5, np.float32(2), np.int64(3)), (0, -1, math.inf, HUGE, *NO_NUMBERS)),
    (checks.not_negative, (0, 0.0, np.float64(2)), (-1e-9, math.inf, HUGE, *NO_NUMBERS)),
    (checks.whole, (1, np.int32(7), 10**12), (0, -1, 1.0, 2.5, math.inf, HUGE, *NO_NUMBERS)),
    (checks.probability, (0.5, np.float32(0.25)), (0, 1, 1.5, *NO_NUMBERS)),
    (checks.decay, (0, 0.0, 0.999), (1, 1.0, -0.1, math.inf, *NO_NUMBERS)),
])
def test_what_is_refused_is_named(check, good, bad):
  for value in good:
    check(rate=value)
  for value in bad:
    with pytest.raises(ValueError, match=r'`rate` must be .*Received: rate='):
      check(rate=value)


def test_the_smallest_integer_can_be_chosen():
  checks.whole(0, steps=0)
  with pytest.raises(ValueError, match='`steps` must be an integer >= 2. Received: steps=1.'):
    checks.whole(2, steps=1)
  with pytest.raises(ValueError, match="must be one of .'a', 'b'.. Received: name='c'."):
    checks.one_of(('a', 'b'), name='c')
