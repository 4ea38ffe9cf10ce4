# SPDX-License-Identifier: Apache-2.0
"""Accounting of discrete Gaussian noise: by Renyi divergences of integer order.

For integer vectors m and N of standard deviation S in every coordinate, D_a(m + N || N) is
at most a |m|^2 / (2 S^2), as of the continuous Gaussian (Canonne, Kamath and Steinke, arXiv
2004.00010, proposition 5): unsampled releases, composed, keep to the same account.

Under Poisson sampling let P be a release with a record that takes part and Q without it. Then
E_Q ((1 - q + q P/Q)^a) is, for integer a, a sum of E_Q (P/Q)^l with l <= a and positive weights,
each at most what it is of the continuous Gaussian. And the other direction is never more: the
reflection x -> m - x maps the grid onto itself and swaps P and Q, and with it theorem 5 of
Mironov, Talwar and Zhang (arXiv 1908.10530) holds term by term. What the others of the batch
are only mixes, and divergences are quasi-convex. So the account of the continuous
Gaussian holds at INTEGER orders; it is not known to hold at others, nor of exact
trade-offs, which therefore are never used for an event with discrete noise in it.
"""

import dataclasses
from typing import Any

import dp_accounting

from tfdp_adaptive.accounting import events

ORDERS = tuple(range(2, 64)) + (64, 80, 96, 128, 192, 256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class DiscreteGaussianDpEvent(dp_accounting.DpEvent):
  """Like `dp_accounting.GaussianDpEvent`, with discrete Gaussian noise on integers.

  Attributes:
    noise_multiplier: Standard deviation per sensitivity, that of rounding included.
  """

  noise_multiplier: float


def present(event: Any) -> bool:
  """Whether an event has discrete noise in it."""
  return any(isinstance(one, DiscreteGaussianDpEvent) for one in events.walk(event))


def as_continuous(event: Any) -> Any:
  """The event with continuous noise in place of the discrete."""
  return events.replaced(event, lambda one: (
      dp_accounting.GaussianDpEvent(one.noise_multiplier)
      if isinstance(one, DiscreteGaussianDpEvent) else one))
