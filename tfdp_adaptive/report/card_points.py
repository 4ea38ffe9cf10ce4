# SPDX-License-Identifier: Apache-2.0
"""The points of NIST SP 800-226 for evaluators, and a card's answer to each.

The points are those of its differential privacy pyramid, from the top (section 2, the
guarantee) over algorithms (section 3) to deployment (section 4); "Guidelines for Evaluating
Differential Privacy Guarantees", March 2025, doi 10.6028/NIST.SP.800-226.
"""

from __future__ import annotations

from typing import Iterator, NamedTuple, TYPE_CHECKING

from tfdp_adaptive.privacy import statement

if TYPE_CHECKING:
  from tfdp_adaptive.privacy import card as card_lib

CHECKED, WORD, UNKNOWN = 'checked by tfdp verify', "the trainer's word", 'not on this card'


class Point(NamedTuple):
  """A point of the publication: its section, its name, the card's answer, and who stands for it."""

  section: str
  name: str
  answer: str
  standing: str


def points(card: card_lib.Card) -> Iterator[Point]:
  """Yields the points in the order of the publication."""
  section = '2. Guarantee'
  if card.epsilon is None:
    parameters = 'No guarantee: epsilon is infinite.'
  else:
    parameters = ('Approximate differential privacy: epsilon '
                  f'{statement.rounded_up(card.epsilon)}, delta {card.delta:g}, after '
                  f'{card.done} steps.')
  yield Point(section, 'Privacy parameters', parameters, CHECKED)
  yield Point(section, 'Variants, and comparison of guarantees', (
      'No guarantee to compare.' if card.mu is None or not card.epsilon else
      f'Gaussian differential privacy with mu = {statement.rounded_up(card.mu)} has this epsilon '
      'at this delta. Any other variant can be computed from the terms of the runs below.'),
              CHECKED)
  yield Point(section, 'Unit of privacy', f'{statement.UNITS[card.unit].capitalize()}. Whether one '
              'person is one unit depends on the data.', WORD)
  yield Point(section, 'Bounded or unbounded', {
      'add_remove': 'Unbounded: add or remove one unit; the number of units is protected.',
      'zero_out': 'Zero-out: one unit becomes empty; the number of units is public.',
      'replace': 'Bounded: one unit is replaced; the number of units is public.',
  }[card.adjacency], CHECKED)
  yield Point(section, 'Other releases of the same data', (
      f'{len(card.runs)} run(s) on these weights are counted. What is not covered is listed '
      'below.'),
              WORD)
  yield Point(section, 'Audits', '; '.join(
      f'{audit.name}: {audit.text}' for audit in card.audits) or 'None was put on this card.', WORD)
  section = '3. Algorithms'
  yield Point(section, 'Algorithms and correctness', ' '.join(
      ['Clipped sums with Gaussian noise.', *(
          f'Run {number}: sensitivity {run.sensitivity:.6g} clip norms, noise multiplier '
          f'{run.plan.noise_multiplier:.6g}.' for number, run in enumerate(card.runs, 1)
          if run.plan is not None)]), CHECKED)
  yield Point(section, 'Utility', 'Accuracy is an exact number of the data. Report it only on '
              'public data, or as a private statistic.', UNKNOWN)
  yield Point(section, 'Bias', 'Clipping and noise cost small groups more. Measure it by group, on '
              'data that are public or held out for it.', UNKNOWN)
  section, caveats = '4. Deployment', statement.caveats(card)
  yield Point(section, 'Query model', 'Data release: the number of steps was fixed before '
              'training; the weights of all steps may be released.', WORD)
  yield Point(section, 'Trust model', {
      'central': 'Central: the curator has the records, the random keys and the noise state.',
      'federated': 'Central: the server sees the update of every user. There is no local noise and '
                   'no secure aggregation.'}[card.trust], WORD)
  yield Point(section, 'Side channels', f'{caveats[0].upper()}{caveats[1:]} Times of steps '
              'are not protected.', UNKNOWN)
  yield Point(section, 'Hyperparameters', (
      'Chosen by a private search, which is part of the guarantee.' if any(
          plan.search is not None for plan in card.plans) else
      'Covered only if no other settings were tried on the same data.'), WORD)
  yield Point(section, 'Data security and access control', 'Records, checkpoints that resume a '
              'run, and logs of training are not released and must be kept safe.', WORD)
  yield Point(section, 'Data collection exposure', 'No guarantee covers the records while they are '
              'collected and stored.', UNKNOWN)
