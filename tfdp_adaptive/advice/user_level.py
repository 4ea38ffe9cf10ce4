# SPDX-License-Identifier: Apache-2.0
"""Compares the noise of sampling users with the noise of sampling their examples.

Users are sampled whole, and the mean of a user's examples is clipped; or examples are sampled and
clipped one by one, and the guarantee still covers all of a user (`PoissonExamples`). Both see the
same number of examples in a step. With g the norm of an example's gradient and r the mean cosine of
two examples of one user, the mean of m of them has norm g sqrt(r + (1 - r) / m), which is the clip
norm that users need. The noise of a step's mean is then, for B users in a step,

    whole users   sigma_u g sqrt(r + (1 - r) / m) / B          examples   sigma_e g / (m B)

and the signal is the same. All of this is public: it costs no privacy.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from tfdp_adaptive import checks
from tfdp_adaptive import gate
from tfdp_adaptive import privacy
from tfdp_adaptive.accounting import sampling


class Comparison(NamedTuple):
  """The cost of sampling examples compared with sampling users.

  Attributes:
    users: The plan that samples users; its records are users.
    examples: The plan that samples examples; its records are examples.
    even: The mean cosine of a user's examples at which both have the same noise over signal:
      above it, examples are better sampled one by one. 0 or less: always; 1 or more: never.
    reason: In a sentence.
  """

  users: privacy.PrivacyPlan
  examples: privacy.PrivacyPlan
  even: float
  reason: str


def compare(*, population_size: int, batch_size: float, examples_per_user: int, steps: int,
            likeness: Optional[float] = None, **target: Any) -> Comparison:
  """Compares both ways at one epsilon.

  Args:
    population_size: Number of users, public.
    batch_size: Expected number of users in a step.
    examples_per_user: Number m of examples that each user has, or is cut to.
    steps: Number of steps.
    likeness: Mean cosine of the gradients of two examples of one user, from PUBLIC data.
    **target: `target_epsilon`, `target_delta` and more of both plans.

  Examples:
    >>> found = compare(population_size=10_000, batch_size=100, examples_per_user=8, steps=1000,
    ...                 target_epsilon=2.0, target_delta=1e-6, likeness=0.9)
    >>> found.examples.noise_multiplier < 8 * found.users.noise_multiplier
    True
  """
  checks.whole(examples_per_user=examples_per_user)
  if likeness is not None and not (checks.is_number(likeness) and -1 <= likeness <= 1):
    raise ValueError('`likeness` is a mean cosine, from -1 to 1. '
                     f'Received: likeness={likeness!r}.')
  m = examples_per_user
  fields = {**dict(l2_norm_clip=1.0), **target, **dict(unit='user', steps=steps)}
  users = privacy.PrivacyPlan.calibrate(
      population_size=population_size, batch_size=batch_size, **fields)
  with gate.experimental('PoissonExamples'):  # To compare them, one needs no gate.
    scheme = sampling.PoissonExamples(examples_per_user=m)
  examples = privacy.PrivacyPlan.calibrate(
      population_size=population_size * m, batch_size=batch_size * m, sampling=scheme, **fields)
  # Equal where sigma_u sqrt(r + (1 - r) / m) = sigma_e / m.
  ratio = examples.noise_multiplier / (m * users.noise_multiplier)
  even = (ratio**2 * m - 1) / (m - 1) if m > 1 else 0.0
  better = None if likeness is None else (
      'PoissonExamples' if likeness > even else 'Poisson, of whole users')
  reason = (f'For users of {m} examples, PoissonExamples needs noise multiplier '
            f'{examples.noise_multiplier:.3g} and Poisson sampling of users '
            f'{users.noise_multiplier:.3g}. '
            + (f'At a mean cosine of {likeness:.2g} between the gradients of one user, {better}, '
               'has less noise over signal.' if better else
               'PoissonExamples has less noise over signal if the mean cosine between the '
               f'gradients of one user is above {even:.2f}.'))
  return Comparison(users, examples, even, reason)
