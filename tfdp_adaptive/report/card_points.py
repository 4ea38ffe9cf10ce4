# SPDX-License-Identifier: Apache-2.0
"""The points of NIST SP 800-226 for evaluators, and a card's answer to each.

The points are those of its differential privacy pyramid, from the top (section 2, the
guarantee) over algorithms (section 3) to deployment (section 4); "Guidelines for Evaluating
Differential Privacy Guarantees", March 2025, doi 10.6028/NIST.SP.800-226.
"""

from __future__ import annotations

from typing import Iterator, Tuple

from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import statement

CHECKED, WORD, UNKNOWN = 'checked by tfdp verify', "the trainer's word", 'not on this card'


def points(card: card_lib.Card) -> Iterator[Tuple[str, str, str]]:
  """Yields a point of the publication, the card's answer, and who stands for it, in its order."""
  yield '2. Guarantee: Privacy parameters', (
      'No guarantee: epsilon is infinite.' if card.epsilon is None else
      'Approximate differential privacy: epsilon '
      f'{statement.rounded_up(card.epsilon)}, delta {card.delta:g}, after {card.done} steps.'
  ), CHECKED
  yield '2. Guarantee: Variants, and comparison of guarantees', (
      'No guarantee to compare.' if card.mu is None or not card.epsilon else
      f'Gaussian differential privacy with mu = {statement.rounded_up(card.mu)} has this epsilon '
      'at this delta. Any other variant can be computed from the terms of the runs below.'), CHECKED
  yield '2. Guarantee: Unit of privacy', (
      f'{statement.UNITS[card.unit].capitalize()}. Whether one person is one unit depends on the '
      'data.'), WORD
  yield '2. Guarantee: Bounded or unbounded', {
      'add_remove': 'Unbounded: add or remove one unit; the number of units is protected.',
      'zero_out': 'Zero-out: one unit becomes empty; the number of units is public.',
      'replace': 'Bounded: one unit is replaced; the number of units is public.',
  }[card.adjacency], CHECKED
  yield '2. Guarantee: Other releases of the same data', (
      f'{len(card.runs)} run(s) on these weights are counted. What is not covered is listed '
      'below.'), WORD
  yield '2. Guarantee: Audits', '; '.join(
      f'{audit.name}: {audit.text}' for audit in card.audits) or 'None was put on this card.', WORD
  yield '3. Algorithms: Algorithms and correctness', ' '.join(
      ['Clipped sums with Gaussian noise.', *(
          f'Run {number}: sensitivity {run.sensitivity:.6g} clip norms, noise multiplier '
          f'{run.plan.noise_multiplier:.6g}.' for number, run in enumerate(card.runs, 1)
          if run.plan is not None)]), CHECKED
  yield '3. Algorithms: Utility', (
      'Accuracy is an exact number of the data. Report it only on public data, or as a private '
      'statistic.'), UNKNOWN
  yield '3. Algorithms: Bias', (
      'Clipping and noise cost small groups more. Measure it by group, on data that are public or '
      'held out for it.'), UNKNOWN
  yield '4. Deployment: Query model', (
      'Data release: the number of steps was fixed before training; the weights of all steps may '
      'be released.'), WORD
  yield '4. Deployment: Trust model', {
      'central': 'Central: the curator has the records, the random keys and the noise state.',
      'federated': 'Central: the server sees the update of every user. There is no local noise and '
                   'no secure aggregation.'}[card.trust], WORD
  caveats = statement.caveats(card)
  yield '4. Deployment: Side channels', (
      f'{caveats[0].upper()}{caveats[1:]} Times of steps are not protected.'), UNKNOWN
  yield '4. Deployment: Hyperparameters', (
      'Chosen by a private search, which is part of the guarantee.' if any(
          plan.search is not None for plan in card.plans) else
      'Covered only if no other settings were tried on the same data.'), WORD
  yield '4. Deployment: Data security and access control', (
      'Records, checkpoints that resume a run, and logs of training are not released and must be '
      'kept safe.'), WORD
  yield '4. Deployment: Data collection exposure', (
      'No guarantee covers the records while they are collected and stored.'), UNKNOWN
