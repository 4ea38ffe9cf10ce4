# SPDX-License-Identifier: Apache-2.0
"""Checks a card, and lists what remains the trainer's word or unknown."""

import dataclasses
import json
import pathlib
from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

from tfdp_adaptive import privacy
from tfdp_adaptive.accounting import second_accountant
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import entry as entry_lib
from tfdp_adaptive.privacy import statement
from tfdp_adaptive.privacy import weight_digests

WRONG, VERIFIED, WORD, UNKNOWN = 'wrong', 'verified', "trainer's word", 'cannot be known'
_SAME = 1e-6  # Relative difference of numbers from the same versions of the libraries.
_OTHER_VERSION = 2e-3  # Relative difference of epsilons and deltas from other versions.
_TINY = 1e-13  # Absolute error of a delta.
_SLACK = 1e-5  # Absolute tolerance of epsilon, below what anybody reads.
# Fields that no other field determines.
TRUSTED = ('versions', 'words', 'audits', 'facts', 'weights', 'trust', 'rule', 'notes', 'clipping',
           'clip_norms', 'l2_norm_clip', 'own_sampler', 'seeded', 'seeded_batches', 'taken', 'run',
           'resumed', 'shared', 'examples_per_user', 'engines', 'unit', 'adjacency',
           'target_delta', 'population_is_public', 'looks', 'max_participations', 'shuffle_seed')


class Finding(NamedTuple):
  """A line of a report. Its kind is one of the constants above."""

  kind: str
  text: str


def check(card: card_lib.Card, weights: Optional[pathlib.Path] = None) -> List[Finding]:
  """Returns all findings, in the order of a review.

  Args:
    card: A card that was read, so that every plan on it has checked its own terms.
    weights: Path of the file that the card is said to be about, or None.
  """
  findings = [*_same_neighbors(card), *_of_runs(card)]
  right = lambda: not any(finding.kind == WRONG for finding in findings)
  if card.epsilon is None:
    findings += _without_guarantee(card)
  elif card.reason:
    findings.append(Finding(WRONG, 'A card with an epsilon has no reason to have none.'))
  elif right():
    findings += _total(card)
    if right():
      findings += _recomputed(card)
  return findings + [*_weights(card, weights), *_audits(card), *_words(card), *_unknown(card)]


def _same_neighbors(card: card_lib.Card) -> Iterator[Finding]:
  pairs = {(plan.unit, plan.adjacency) for plan in card.plans}
  if len(pairs) == 1:
    yield Finding(VERIFIED, f'All runs protect one {card.unit} under {card.adjacency} adjacency.')
  elif pairs and card.epsilon is not None:
    yield Finding(WRONG, f'The runs are for {sorted(pairs)}: such guarantees do not add up.')


def _of_runs(card: card_lib.Card) -> Iterator[Finding]:
  for number, run in enumerate(card.runs, 1):
    if run.plan is None or not run.steps:
      continue
    plan, (min_sep, participations) = run.plan, run.participation
    if run.amplified:
      yield Finding(VERIFIED, f'Run {number}: amplification is claimed for {_kind(plan.sampling)} '
                              f'with sampling probability {plan.sampling.probability(plan):.6g}, '
                              f'which its noise ({_kind(plan.mechanism)}) and {plan.adjacency} '
                              'adjacency allow. '
                              f'{statement.added_up(run, card.beside(number))}'.strip())
      continue
    yield Finding(VERIFIED, f'Run {number}: no amplification by sampling is claimed; a record '
                            f'takes part at most {participations} times in {run.steps} steps, at '
                            f'least {min_sep} apart, as {_kind(plan.sampling)} does.')
    yield _sensitivity(number, run)


def _sensitivity(number: int, run: entry_lib.Entry) -> Finding:
  """Checks the sensitivity of a run by multiplying out C."""
  mechanism = _kind(run.plan.mechanism)
  found = second_accountant.look(run.plan, run.steps).sensitivity
  if found is None:
    return Finding(UNKNOWN, f'Run {number}: the sensitivity of {mechanism} is taken from the '
                            'library; C is too large, or its sampling too new, to multiply out.')
  if run.sensitivity < found * (1 - _SAME):
    return Finding(WRONG, f'Run {number} is accounted for with a sensitivity of '
                          f'{run.sensitivity:.6g}, and a record can move its releases by '
                          f'{found:.6g} clip norms.')
  return Finding(VERIFIED, f'Run {number}: {mechanism} has sensitivity {run.sensitivity:.6g} for '
                           f'these participations; multiplying out C for them gives {found:.6g}.')


def _without_guarantee(card: card_lib.Card) -> Iterator[Finding]:
  expected = privacy.Ledger(card.runs).card(
      plots=False, accountant=card.accountant, delta=card.delta or None)
  if expected.epsilon is not None:
    yield Finding(WRONG, 'The card gives no epsilon, but every run on it has one.')
  elif card.reason != expected.reason:
    yield Finding(WRONG, f'The reason that there is no guarantee is: {expected.reason}')
  else:
    yield Finding(VERIFIED, f'The card claims no guarantee: {card.reason or "no reason given"}.')


def _total(card: card_lib.Card) -> Iterator[Finding]:
  """Checks epsilon of the whole ledger by another accountant."""
  ledger = privacy.Ledger(card.runs)
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
    yield Finding(UNKNOWN, f'No second accountant has confirmed epsilon: {answer.method}.')
    return
  least = answer.epsilon * (1 - answer.tolerance) - _SLACK
  derived = (f'epsilon {epsilon:.6g} at delta {card.delta:g}; {answer.method} compute '
          f'{answer.epsilon:.6g}')
  if epsilon < least:
    yield Finding(WRONG, f'The terms do not give {derived}.')
  else:
    yield Finding(VERIFIED, f'The runs together have {derived}.')
    if not answer.exact:
      yield Finding(UNKNOWN, 'How far epsilon is above that of less private terms at a larger '
                             'delta was not computed again.')
  for (point, delta), found in zip(card.profile, answer.deltas):
    if delta < found * (1 - max(0.03, 10 * answer.tolerance)) - second_accountant.SMALLEST_DELTA:
      yield Finding(WRONG, f'At epsilon {point:.4g} the terms do not give delta {delta:.4g}; '
                           f'{answer.method} compute {found:.4g}.')


def _recomputed(card: card_lib.Card) -> Iterator[Finding]:
  """Computes every number of the card again, by the accountant that it names."""
  ledger = privacy.Ledger(card.runs)
  expected = ledger.card(delta=card.delta, accountant=card.accountant, plots=False)
  same = card.versions == card_lib.versions()
  numbers: List[Tuple[str, Any, Any]] = [
      ('Epsilon', card.epsilon, expected.epsilon),
      ('Epsilon at the planned end', card.planned_epsilon, expected.planned_epsilon)]
  known, steps_of = dict(expected.curve), [steps for steps, _ in card.curve]
  if steps_of not in ([], sorted(known), sorted({*known, *card_lib.plotted_steps(card)})):
    yield Finding(WRONG, f'The points of the plot are not at the steps {sorted(known)} and between '
                         f'them, but at {steps_of}.')
    return
  for steps, epsilon in card.curve:
    numbers.append((f'Epsilon after {steps} steps', epsilon, known[steps] if steps in known else
                    ledger.until(steps).epsilon(card.delta, card.accountant)))
  known = dict(expected.profile)
  numbers += [(f'Delta at epsilon {point:.6g}', delta, known[point] if point in known else
               ledger.delta(point, card.accountant)) for point, delta in card.profile]
  tolerance = _SAME if same else _OTHER_VERSION
  for name, stated, true in numbers:
    if stated is None and true is None:
      continue
    if None in (stated, true) or stated < true * (1 - tolerance) - _TINY:
      yield Finding(WRONG, f'{name} is not {stated}: computed again, it is {true}.')
    elif stated > true * (1 + tolerance) + _TINY:
      yield Finding(WORD, f'{name} is {stated:.8g}, which claims less privacy than the terms give: '
                          f'computed again, it is {true:.8g}.')
  yield Finding(VERIFIED, f'{len(numbers)} numbers were computed again, by the accountant that '
                          'the card names.')


def _weights(card: card_lib.Card, path: Optional[pathlib.Path]) -> Iterator[Finding]:
  if path is None:
    yield Finding(UNKNOWN, 'Which weights the card is about: give them by --weights FILE.'
                  if card.weights else 'Which weights the card is about: it has no digest.')
    return
  if not card.weights:
    yield Finding(WRONG, 'The card has no digest of weights, so it is not about this file.')
    return
  file = weight_digests.of_file(path)
  yield from _ledger_inside(card, file.ledger)
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


def _ledger_inside(card: card_lib.Card, text: str) -> Iterator[Finding]:
  """Compares the runs on the card with those that the file of weights has recorded."""
  if not text:
    yield Finding(UNKNOWN, 'Whether the weights had other runs: their file holds no ledger.')
    return
  inside = privacy.Ledger.from_json(text).entries
  mine, theirs = ([json.dumps(card_lib.public(dataclasses.replace(entry, looks=None)).to_dict())
                   for entry in entries if entry.steps]
                  for entries in (privacy.Ledger(card.runs).entries, inside))
  if sorted(mine) != sorted(theirs):
    yield Finding(WRONG, f'The ledger in the file of weights has {len(theirs)} run(s), of '
                         f'{[entry.steps for entry in inside]} steps, and is not that of the card.')
  else:
    yield Finding(VERIFIED, f'The ledger in the file of weights has the same {len(mine)} run(s).')


def _audits(card: card_lib.Card) -> Iterator[Finding]:
  for audit in card.audits:
    yield Finding(WRONG if audit.refuted else WORD, f'Audit {audit.name}: {audit.text}')


def _words(card: card_lib.Card) -> Iterator[Finding]:
  for words in card.words:
    yield Finding(WORD, f'Of {words.about}: {words.text!r}')
  for number, run in enumerate(card.runs, 1):
    if run.own_sampler:
      yield Finding(WORD, f'Of the sampling of run {number}: {run.own_sampler!r}')
    if run.seeded_batches:
      yield Finding(WORD, f'Run {number} drew its batches with a fixed seed, as tests do: the '
                          'guarantee does not hold against anybody who knows the seed.')
  for note in card.notes:
    yield Finding(WORD, note)
  yield Finding(WORD, 'Fields of the card that its other fields do not determine: '
                      f'{", ".join(TRUSTED)} (unless a sentence above or a file of weights says '
                      'the same); sizes of batches and population where no number above follows '
                      'from them, rows that a mechanism was designed for, the planned steps of '
                      'runs before the last, or that could stop at evaluations, and the steps of a '
                      'private search, all of which cost what the whole search costs.')
  yield Finding(WORD, 'These are all runs that the data and these weights went through, with the '
                      'unit, the steps, the clip norm and the noise stated.')


def _unknown(card: card_lib.Card) -> Iterator[Finding]:
  yield Finding(UNKNOWN, f'Whether each {card.unit} was one record of the data: duplicates share '
                         'one guarantee.')
  yield Finding(UNKNOWN, 'Whether noise and batches were drawn as described. An audit can refute '
                         'that, not prove it.')
  yield Finding(UNKNOWN, 'What else was computed from the same data and released.')


def _kind(value: object) -> str:
  return type(value).__name__
