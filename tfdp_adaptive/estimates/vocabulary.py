# SPDX-License-Identifier: Apache-2.0
"""A vocabulary chosen privately from the users' own words.

This is differentially private set union with Gaussian weights (Gopi et al., ICML 2020,
arXiv:2002.09745). A user with k words adds 1/sqrt(k) to the count of each word, which is a vector
of norm one. Gaussian noise is added to the count of every word that occurs, and words above a
threshold are released. A word of a single user passes the threshold with probability at most delta,
which adds to the delta of the training.
"""

import collections
import math
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import dp_accounting
import numpy as np
from scipy import special

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import privacy
from tfdp_adaptive.accounting import cost


class PrivateVocabulary(NamedTuple):
  """Words that may be published, and the privacy that they cost.

  Attributes:
    words: The words, most frequent first. `epsilon` states their privacy.
    noise_multiplier: Noise multiplier of the counts, which have sensitivity one.
    delta: Probability that a word that only one user has is released.
  """

  words: Tuple[str, ...]
  noise_multiplier: float
  delta: float

  def epsilon(
      self, plan: privacy.PrivacyPlan, steps: Optional[int] = None,
      rule: Optional[contract.Rule] = None) -> float:
    """Returns epsilon of vocabulary and the first `steps` rounds of a plan, at its target delta."""
    if not 0 < self.delta < plan.target_delta:
      raise ValueError('`delta` of the vocabulary must be below the target delta of the plan, '
                       f'{plan.target_delta:g}. Received: delta={self.delta:g}.')
    if not plan.whole_users or plan.adjacency == 'replace':
      raise ValueError('A private vocabulary is accounted for users under add_remove or zero_out. '
                       f'Received: unit={plan.unit!r}, adjacency={plan.adjacency!r}.')
    if rule is not None and not plan.check_rule(rule):
      return math.inf
    event = dp_accounting.ComposedDpEvent(
        (dp_accounting.GaussianDpEvent(self.noise_multiplier), plan.event(steps)))
    return cost.epsilon(
        event, plan.target_delta - self.delta, neighbors=cost.relation(plan))


def private_vocabulary(
    words_of_users: Mapping[str, Sequence[str]], size: int, *, noise_multiplier: float,
    delta: float, words_per_user: int = 100, seed: Optional[int] = None) -> PrivateVocabulary:
  """Chooses the words of a model privately, from the words of users.

  Args:
    words_of_users: {user: all words of that user, with repetitions}.
    size: Most words to keep.
    noise_multiplier: Noise standard deviation of the counts.
    delta: Probability that a word that only one user has is released. It adds to the plan's delta.
    words_per_user: The number of different words that a user may vote for. Each user votes for the
      most frequent of their words.
    seed: For tests only.

  Returns:
    A `PrivateVocabulary` of at most `size` words.
  """
  checks.positive(noise_multiplier=noise_multiplier, size=size, words_per_user=words_per_user)
  checks.probability(delta=delta)
  counts: Dict[str, float] = collections.defaultdict(float)
  for words in words_of_users.values():
    for word, weight in _votes(words, words_per_user):
      counts[word] += weight
  names = sorted(counts)  # This order does not depend on who came first.
  rng = np.random.default_rng(seed)
  noised = (np.array([counts[name] for name in names])
            + noise_multiplier * rng.standard_normal(len(names)))
  least = threshold(noise_multiplier, delta, words_per_user)
  order = [i for i in np.argsort(-noised, kind='stable')[:size] if noised[i] > least]
  return PrivateVocabulary(tuple(names[i] for i in order), float(noise_multiplier), float(delta))


def threshold(noise_multiplier: float, delta: float, words_per_user: int) -> float:
  """Returns max over t <= words_per_user of `1/sqrt(t) + sigma Phi^-1((1 - delta)^(1/t))`."""
  t = np.arange(1.0, words_per_user + 1)
  # Phi^-1(1 - p) = -Phi^-1(p), with p = 1 - (1 - delta)^(1/t) computed without loss.
  tail = -np.expm1(np.log1p(-delta) / t)
  return float(np.max(1 / np.sqrt(t) - noise_multiplier * special.ndtri(tail)))


def _votes(words: Sequence[str], words_per_user: int) -> List[Tuple[str, float]]:
  ranked = sorted(collections.Counter(words).items(), key=lambda item: (-item[1], item[0]))
  chosen = [word for word, _ in ranked[:words_per_user]]
  return [(word, 1 / math.sqrt(len(chosen))) for word in chosen]
