# SPDX-License-Identifier: Apache-2.0
"""Checks a card, and lists what remains the trainer's word or unknown."""

from __future__ import annotations

import math
from typing import Any, Iterator, List, NamedTuple

import numpy as np
from scipy import special

from tfdp_adaptive.accounting import second_accountant
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import ledger as ledger_lib
from tfdp_adaptive.privacy import weight_digests

WRONG, VERIFIED, WORD, UNKNOWN = 'wrong', 'verified', "trainer's word", 'cannot be known'
_SAME = 1e-6  # Relative: of numbers that are derived, not accounted for.
_SLACK = 1e-5  # Of epsilon, absolute: below what anybody reads.
_CHECKED = 4  # Points of the curve.


class Finding(NamedTuple):
  """A line of a report. Its kind is one of the constants above."""

  kind: str
  text: str


def check(card: card_lib.Card, weights: Any = None) -> List[Finding]:
  """Returns all findings, in the order of a review.

  Args:
    card: A card that was read, so that every plan on it has checked its own terms.
    weights: Path of the file that the card is said to be about, or None.
  """
  findings = [*_same_neighbours(card), *_derived(card)]
  if card.epsilon is None:
    findings += _without_guarantee(card)
  elif not any(finding.kind == WRONG for finding in findings):
    findings += [*_total(card), *_shapes(card), *_mu(card)]
  return findings + [*_weights(card, weights), *_audits(card), *_words(card), *_unknown(card)]


def _same_neighbours(card: card_lib.Card) -> Iterator[Finding]:
  pairs = {(plan.unit, plan.adjacency) for plan in card.plans}
  if not pairs <= {(card.unit, card.adjacency)}:
    yield Finding(WRONG, f'The card is for unit {card.unit} and adjacency {card.adjacency}, but '
                         f'its runs are for {sorted(pairs)}: such guarantees do not add up.')
  elif pairs:
    yield Finding(VERIFIED, f'All runs protect one {card.unit} under {card.adjacency} adjacency.')


def _derived(card: card_lib.Card) -> Iterator[Finding]:
  """Checks that the derived numbers of each run follow from its terms."""
  for number, run in enumerate(card.runs, 1):
    plan = run.entry.plan
    if plan is None:
      continue
    expected = card_lib.derived(plan, run.entry.steps)
    wrong = [name for name, value in expected.items() if not _same(getattr(run, name), value)]
    for name in wrong:
      yield Finding(WRONG, f'Run {number} claims {name} = {getattr(run, name)}, and from its terms '
                           f'follows {expected[name]}.')
    if wrong or not run.entry.steps:
      continue
    yield _sampling(number, run)
    yield from _sensitivity(number, run)


def _sampling(number: int, run: card_lib.Run) -> Finding:
  plan = run.entry.plan
  if run.amplified:
    return Finding(VERIFIED, f'Run {number}: amplification is claimed for {_kind(plan.sampling)} '
                             f'with sampling probability {run.probability:.6g}, which its noise '
                             f'({_kind(plan.mechanism)}) and {plan.adjacency} adjacency allow.')
  return Finding(VERIFIED, f'Run {number}: no amplification by sampling is claimed; a record takes '
                           f'part at most {run.max_participations} times in {run.entry.steps} '
                           f'steps, at least {run.min_sep} apart, as {_kind(plan.sampling)} does.')


def _sensitivity(number: int, run: card_lib.Run) -> Iterator[Finding]:
  """Checks the sensitivity by multiplying out C, if the run is not amplified."""
  plan, steps = run.entry.plan, run.entry.steps
  if run.amplified:
    return
  found = second_accountant.look(plan, steps).sensitivity
  if found is None:
    yield Finding(UNKNOWN, f'Run {number}: the sensitivity of {_kind(plan.mechanism)} is taken '
                           'from the library; C is too large, or its sampling too new, to multiply '
                           'out.')
  elif run.sensitivity < found * (1 - _SAME):
    yield Finding(WRONG, f'Run {number} claims a sensitivity of {run.sensitivity:.6g}, and a '
                         f'record can move its releases by {found:.6g} clip norms.')
  else:
    yield Finding(VERIFIED, f'Run {number}: {_kind(plan.mechanism)} has sensitivity '
                            f'{run.sensitivity:.6g} for these participations; multiplying out C '
                            f'for them gives {found:.6g}.')


def _without_guarantee(card: card_lib.Card) -> Iterator[Finding]:
  if all(run.entry.guaranteed for run in card.runs) and len(
      {(plan.unit, plan.adjacency) for plan in card.plans}) < 2:
    yield Finding(WRONG, 'The card gives no epsilon, but every run on it has one.')
  else:
    yield Finding(VERIFIED, f'The card claims no guarantee: {card.reason or "no reason given"}.')


def _total(card: card_lib.Card) -> Iterator[Finding]:
  """Epsilon of the whole ledger, by another accountant."""
  ledger = ledger_lib.Ledger(tuple(run.entry for run in card.runs))
  epsilon: Any = card.epsilon
  if not ledger.guaranteed:
    yield Finding(WRONG, 'The card gives an epsilon, but a run on it has no finite cost.')
    return
  if not card.done:
    yield Finding(VERIFIED if not epsilon else WRONG, 'No step was taken: epsilon is 0.')
    return
  if not 0 < card.delta < 1:
    yield Finding(WRONG, f'Delta must be between 0 and 1, and is {card.delta:g}.')
    return
  profile = [point for point, _ in card.profile]
  answer = second_accountant.answer(ledger.entries, card.delta, profile)
  if answer.epsilon is None:
    yield from _again(card, ledger, answer.method)
    return
  least = answer.epsilon * (1 - answer.tolerance) - _SLACK
  told = (f'epsilon {epsilon:.6g} at delta {card.delta:g}; {answer.method} compute '
          f'{answer.epsilon:.6g}')
  if epsilon < least:
    yield Finding(WRONG, f'The terms do not give {told}.')
  elif epsilon > answer.epsilon * 1.01 + _SLACK and answer.exact:
    yield Finding(VERIFIED, f'The card claims less privacy than its terms give: {told}.')
  else:
    yield Finding(VERIFIED, f'The runs together have {told}.')
    if not answer.exact:
      yield Finding(UNKNOWN, 'How far epsilon is above that of less private terms at a larger '
                             'delta was not computed again.')
  for (point, delta), found in zip(card.profile, answer.deltas):
    if delta < found * (1 - max(0.03, 10 * answer.tolerance)) - second_accountant.SMALLEST_DELTA:
      yield Finding(WRONG, f'At epsilon {point:.4g} the terms do not give delta {delta:.4g}; '
                           f'{answer.method} compute {found:.4g}.')
  yield from _curve(card, ledger)


def _again(
    card: card_lib.Card, ledger: ledger_lib.Ledger, why: str) -> Iterator[Finding]:
  """Uses the first accountant with its public draws, if there is no second one."""
  epsilon: Any = card.epsilon
  found = ledger.epsilon(card.delta, card.accountant)
  if epsilon < found * (1 - 1e-3) - _SLACK:
    yield Finding(WRONG, f'The terms do not give epsilon {epsilon:.6g}: computed again, it is '
                         f'{found:.6g}.')
  else:
    yield Finding(VERIFIED, f'Epsilon {epsilon:.6g} at delta {card.delta:g} comes out again, by '
                            'the accountant that computed it.')
    yield Finding(UNKNOWN, f'No second accountant has confirmed epsilon: {why}.')


def _curve(card: card_lib.Card, ledger: ledger_lib.Ledger) -> Iterator[Finding]:
  """Epsilon at some of the steps that are plotted."""
  points = [point for point in card.curve if 0 < point[0] < card.done]
  chosen = points[::max(1, -(-len(points) // _CHECKED))]
  for steps, epsilon in chosen:
    answer = second_accountant.answer(card_lib.until(ledger, steps).entries, card.delta)
    if answer.epsilon is not None and epsilon < answer.epsilon * (1 - answer.tolerance) - _SLACK:
      yield Finding(WRONG, f'After {steps} steps the terms do not give epsilon {epsilon:.6g}; '
                           f'{answer.method} compute {answer.epsilon:.6g}.')
      return
  if chosen:
    yield Finding(VERIFIED, f'Epsilon over steps agrees at {len(chosen)} more points.')


def _shapes(card: card_lib.Card) -> Iterator[Finding]:
  """Curve, profile and planned end say one thing."""
  epsilon: Any = card.epsilon
  planned = card.planned_epsilon
  curve = sorted(card.curve)
  values = [value for _, value in curve]
  if list(card.curve) != curve or any(
      a > b * (1 + 1e-3) + _SLACK for a, b in zip(values, values[1:])):
    yield Finding(WRONG, 'Epsilon over steps must not fall, and on this card it does.')
  if curve and not _same(dict(curve).get(card.done), epsilon):
    yield Finding(WRONG, f'The plot does not end at epsilon {epsilon:.6g} after {card.done} steps.')
  if planned is None or planned < epsilon * (1 - 1e-3) - _SLACK:
    yield Finding(WRONG, f'Epsilon at the planned end, {planned}, is below that of the steps done.')
  if any(not 0 <= delta <= 1 for _, delta in card.profile):
    yield Finding(WRONG, 'Deltas must be from 0 to 1.')


def _mu(card: card_lib.Card) -> Iterator[Finding]:
  """delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu), of Gaussian DP."""
  epsilon: Any = card.epsilon
  mu = card.mu
  if not epsilon:
    return
  if mu is None or mu <= 0:
    yield Finding(WRONG, 'mu of Gaussian DP is missing.')
    return
  log_second = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
  delta = math.exp(special.log_ndtr(mu / 2 - epsilon / mu)) - math.exp(min(0.0, log_second))
  if not math.isclose(delta, card.delta, rel_tol=1e-3, abs_tol=1e-15):
    yield Finding(WRONG, f'One Gaussian mechanism of mu = {mu:.6g} has delta {delta:.4g} at this '
                         f'epsilon, not {card.delta:g}.')
  else:
    yield Finding(VERIFIED, f'One Gaussian mechanism of mu = {mu:.4g} has this epsilon and delta.')


def _weights(card: card_lib.Card, path: Any) -> Iterator[Finding]:
  if path is None:
    yield Finding(UNKNOWN, 'Which weights the card is about: give them by --weights FILE.'
                  if card.weights else 'Which weights the card is about: it has no digest.')
    return
  if not card.weights:
    yield Finding(WRONG, 'The card has no digest of weights, so it is not about this file.')
    return
  file = weight_digests.of_file(path)
  if file.weights == tuple(sorted(card.weights)):
    yield Finding(VERIFIED, f'The {len(file.weights)} arrays of weights in {path} are those of the '
                            f'card (digest {weight_digests.short(file.weights)}).')
  else:
    common = len(set(file.weights) & set(card.weights))
    yield Finding(WRONG, f'{path} has {len(file.weights)} arrays of weights, the card '
                         f'{len(card.weights)}, and {common} of them are the same.')
  if file.of_optimizer or file.of_metrics:
    yield Finding(UNKNOWN, f'{path} also holds {file.of_optimizer} arrays of an optimizer and '
                           f'{file.of_metrics} of metrics, which no guarantee covers. Publish a '
                           'file of weights alone.')


def _audits(card: card_lib.Card) -> Iterator[Finding]:
  for audit in card.audits:
    yield Finding(WRONG if audit.refuted else WORD, f'Audit {audit.name}: {audit.text}')


def _words(card: card_lib.Card) -> Iterator[Finding]:
  for words in card.words:
    yield Finding(WORD, f'Of {words.about}: {words.text!r}')
  for number, run in enumerate(card.runs, 1):
    if run.seeded:
      yield Finding(WORD, f'Run {number} drew its batches with a fixed seed, as tests do: the '
                          'guarantee does not hold against anybody who knows the seed.')
  for fact in card.facts:
    yield Finding(WORD, fact)
  yield Finding(WORD, 'These are all runs that the data and these weights went through, with the '
                      'steps, the clip norm and the noise stated.')


def _unknown(card: card_lib.Card) -> Iterator[Finding]:
  yield Finding(UNKNOWN, f'Whether each {card.unit} was one record of the data: duplicates share '
                         'one guarantee.')
  yield Finding(UNKNOWN, 'Whether noise and batches were drawn as described. An audit can refute '
                         'that, not prove it.')
  yield Finding(UNKNOWN, 'What else was computed from the same data and released.')


def _same(a: Any, b: Any) -> bool:
  if a is None or b is None or isinstance(b, (bool, int)):
    return a == b
  return bool(np.isclose(a, b, rtol=_SAME, atol=0.0))


def _kind(value: Any) -> str:
  return type(value).__name__
