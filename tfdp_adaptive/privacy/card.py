# SPDX-License-Identifier: Apache-2.0
"""The privacy card: what a reviewer needs to check a guarantee without the data.

A card is a public constant that `Ledger.card` makes. It holds the runs with their terms, the
numbers that are claimed of them, and the trainer's own words. What follows from the terms, such as
a sensitivity, is computed where it is shown, so that it cannot differ from them. A card holds no
secret and nothing exact about the data: no seed, no metric, and only those sizes that a plan
declares public.
"""

from __future__ import annotations

import dataclasses
import functools
from importlib import metadata
import platform
from typing import Any, List, Optional, Sequence, Tuple
import unicodedata

from tfdp_adaptive import gate
from tfdp_adaptive import terms
from tfdp_adaptive import version
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.privacy import entry as entry_lib

LONGEST = 10_000  # Characters of a text.
_LIBRARIES = ('dp-accounting', 'tensorflow', 'keras', 'numpy', 'scipy')
_POINTS = 10  # Points of the curve of epsilon.
_LARGEST = 1e11  # Epsilon; above it the numbers of a card are not finite.
# Fractions of epsilon at which delta is stated, and further ones for plots.
FRACTIONS, _MORE_FRACTIONS = (1.0, 0.6, 0.35), (0.15, 0.5, 0.8, 1.25, 1.6)
_BEFORE = 'THE WEIGHTS WERE TRAINED BEFORE, and what they lost then is counted above.'
_SEED = ('A FIXED SEED was used for the noise: whoever knows it can take the noise away, so this '
         'run is a test and the guarantee above does not hold against them.')
_COUNTED = (
    'The ledger counts every run that left its record on these weights, wherever Keras copied, '
    'loaded or wrapped them, and in checkpoints of variables. It cannot follow values that were '
    'copied by hand (get_weights, set_weights, set_state_tree, assign), a model trained on '
    'predictions of these weights, a SavedModel used as a layer, or training without this library, '
    'as of files that were read or written before it was imported.')


@dataclasses.dataclass(frozen=True)
class Words:
  """Words of the trainer, which no program can check."""

  about: str
  text: str


@dataclasses.dataclass(frozen=True)
class Audit:
  """The result of an audit that was run on the model: `refuted` is final, its absence is not."""

  name: str
  refuted: bool
  text: str


@dataclasses.dataclass(frozen=True)
class Card:
  """A privacy claim about weights, and the data that it follows from.

  Attributes:
    runs: Every run the weights went through, without seeds.
    delta: The delta of the guarantee.
    epsilon: The epsilon of all steps done; None if there is no guarantee.
    planned_epsilon: The epsilon of all planned steps.
    accountant: The accountant of epsilon: 'pld' or 'rdp'.
    reason: Why there is no guarantee.
    curve: (steps, epsilon at `delta`), over all runs; the last point is the plan's end.
    profile: Further valid (epsilon, delta); the first ones bound the attacker in the statement.
    trust: 'central' (a trusted curator has the records), 'federated' (a trusted server has the
      updates) or 'silo' (one of several has its own records, and trusts nobody else).
    words: Text that the trainer added.
    facts: Sentences of the library that do not follow from the runs alone.
    audits: The audits that were run.
    versions: (library, version).
    weights: Digests of the arrays, in any order; see `weight_digests`. () if not known.
  """

  runs: Tuple[entry_lib.Entry, ...]
  delta: float = 0.0
  epsilon: Optional[float] = None
  planned_epsilon: Optional[float] = None
  accountant: str = 'pld'
  reason: str = ''
  curve: Tuple[Tuple[int, float], ...] = ()
  profile: Tuple[Tuple[float, float], ...] = ()
  trust: str = 'central'
  words: Tuple[Words, ...] = ()
  facts: Tuple[str, ...] = ()
  audits: Tuple[Audit, ...] = ()
  versions: Tuple[Tuple[str, str], ...] = ()
  weights: Tuple[str, ...] = ()

  @property
  def done(self) -> int:
    """Steps taken, over all runs."""
    return sum(run.steps for run in self.runs)

  @property
  def plans(self) -> Tuple[terms.Terms, ...]:
    """Returns the plans of the runs that have one."""
    return tuple(run.plan for run in self.runs if run.plan is not None)

  @property
  def unit(self) -> str:
    """The unit of privacy: 'example' or 'user'."""
    return self.plans[0].unit if self.plans else 'example'

  @property
  def adjacency(self) -> str:
    """The adjacency of data sets, see `PrivacyPlan`."""
    return self.plans[0].adjacency if self.plans else 'zero_out'

  @functools.cached_property
  def mu(self) -> Optional[float]:
    """The mu of the Gaussian mechanism with this epsilon at this delta."""
    return gaussian.mu_of(self.epsilon, self.delta) if self.epsilon and self.delta else None

  @property
  def rate(self) -> float:
    """The attacker's true-positive rate at 1% false positives, as the statement reports it."""
    return gaussian.detection_bound(self.profile[:len(FRACTIONS)], 0.01)

  def true_positive_rate(self, false_positive_rate: float) -> float:
    """Returns an upper bound of the attacker's rate, from every point of the profile."""
    return gaussian.detection_bound(self.profile, false_positive_rate)

  def beside(self, number: int) -> Tuple[entry_lib.Entry, ...]:
    """Returns all runs that took steps but the one of this number, from one on."""
    return tuple(run for run in (*self.runs[:number - 1], *self.runs[number:]) if run.steps)

  @property
  def parts(self) -> List[Tuple[str, str]]:
    """Returns the parts of the library that were used, each 'stable' or 'experimental'."""
    names = {run.rule for run in self.runs if run.rule} | ({self.trust} - {'central'})
    for plan in self.plans:
      names |= {type(plan.sampling).__name__, type(plan.mechanism).__name__}
      names |= {'Search'} if plan.search is not None else set()
    return [(name, gate.state_of(name)) for name in sorted(names)]

  @property
  def notes(self) -> List[str]:
    """Returns the sentences that follow from what the runs have recorded, and the facts."""
    found = [note for run in self.runs for note in run.notes]
    for number, run in enumerate(self.runs, 1):
      if run.seeded:
        found.append(f'Run {number}: {_SEED}')
      if run.taken is not None:
        found.append(f'Run {number} was stopped after {run.taken} steps by something that had '
                     f'been seen, so that all {run.steps} steps that it could have taken are '
                     'counted.')
      if run.clip_norms:
        found.append(f'The clip norm of run {number} changed: ' + ', then '.join(
            f'{norm:g} in {steps} steps' for steps, norm in run.clip_norms) + '.')
      if run.shared:
        found.append(f'Run {number} took steps on batches that other steps took, too. Where a '
                     'ledger has both, they are added up without amplification by sampling; where '
                     'it has one, publishing both costs more than two ledgers say.')
      if run.looks is not None:
        found.append(run.looks.describe(run.plan, run.done))
    return list(dict.fromkeys([*found, *self.facts]))

  def with_words(self, words: Sequence[Words]) -> Card:
    """Returns a copy that says more in the trainer's own words."""
    return dataclasses.replace(self, words=self.words + tuple(
        Words(clean(one.about), clean(one.text)) for one in words))


def claimed(card: Card, ledger: Any, plots: bool) -> Card:
  """Returns the card of a `Ledger` with epsilon, or with the reason why there is none."""
  for number, entry in enumerate(ledger.entries, 1):
    if not entry.guaranteed:
      return dataclasses.replace(card, reason=(
          f'run {number} of {len(ledger.entries)} on these weights '
          + ('had no plan' if entry.plan is None else
             f'used a statistic of the data without noise ({clean(entry.rule)})'
             if not entry.private else 'had a noise multiplier of 0')))
  accountant, target_delta = card.accountant, card.delta or None
  epsilon = ledger.epsilon(target_delta, accountant)
  if epsilon > _LARGEST:
    return dataclasses.replace(card, reason='The noise is too small for a finite epsilon')
  end = ledger
  if ledger.entries and ledger.entries[-1].plan is not None:
    last = ledger.entries[-1]
    end = dataclasses.replace(
        ledger, entries=(*ledger.entries[:-1], last.after(last.plan.steps)))
  total = end.epsilon(target_delta, accountant)
  planned = total if total <= _LARGEST else None
  if ledger.entries and ledger.entries[-1].looks is not None:
    # All else holds at steps and deltas that were fixed beforehand.
    return dataclasses.replace(
        card, epsilon=epsilon, planned_epsilon=max(epsilon, planned or 0.0),
        profile=((epsilon, card.delta),))
  plots = plots and not any(plan.sampling.draws for plan in card.plans)  # Each point: minutes.
  curve = {steps: ledger.until(steps).epsilon(card.delta, accountant)
           for steps in (plotted_steps(card) if plots else ())}
  if planned is not None:
    curve[sum(entry.steps for entry in end.entries)] = planned
  curve[card.done] = epsilon
  fractions = FRACTIONS + (_MORE_FRACTIONS if plots else ())
  profile = [(fraction * epsilon, ledger.delta(fraction * epsilon, accountant))
             for fraction in fractions] if epsilon > 0 else []
  return dataclasses.replace(card, epsilon=epsilon, planned_epsilon=planned,
                             curve=tuple(sorted(curve.items())), profile=tuple(profile))


def about_weights(entries: Sequence[entry_lib.Entry]) -> List[str]:
  """Returns facts for the card of the weights of one model, whose ledger this is."""
  return [_BEFORE] * (len(entries) > 1) + [_COUNTED]


def plotted_steps(card: Card) -> List[int]:
  """Returns the steps that are plotted: about ten, the first, and the ends of a few runs."""
  ends, end = set(), 0
  for run in card.runs[:_POINTS // 2]:
    end += run.steps
    ends.add(end)
  inner = {card.done * i // _POINTS for i in range(1, _POINTS)}
  return sorted((inner | {min(1, card.done), *ends}) - {0})


def audited(report: Any) -> Audit:
  """Returns only the verdict. An audit's measurements may be exact numbers of the data."""
  if isinstance(report, Audit):
    return report
  refuted = bool(report.violated)
  return Audit(clean(f'{type(report).__name__} {getattr(report, "name", "")}'.strip()), refuted,
               'The claim is violated.' if refuted else
               'It found nothing that refutes the claim. An audit cannot prove one.')


def versions() -> Tuple[Tuple[str, str], ...]:
  """Returns the versions of this library and of the packages that determine its numbers."""
  found = [('tfdp_adaptive', version.__version__), ('Python', platform.python_version())]
  for name in _LIBRARIES:
    try:
      found.append((name, metadata.version(name)))
    except metadata.PackageNotFoundError:
      pass
  return tuple(found)


def public(entry: entry_lib.Entry) -> entry_lib.Entry:
  """Returns an entry as a card holds it: without a seed, and with printable texts."""
  return dataclasses.replace(
      entry.without_seed(), rule=clean(entry.rule), own_sampler=clean(entry.own_sampler),
      notes=tuple(map(clean, entry.notes)), clipping=tuple(map(clean, entry.clipping)),
      engines=tuple(map(clean, entry.engines)), shared=tuple(map(clean, entry.shared)))


def clean(text: str) -> str:
  """Returns a line of printable text, without control or direction characters."""
  return ' '.join(''.join(c if printable(c) else ' ' for c in str(text)).split())[:LONGEST]


def printable(character: str) -> bool:
  """Returns whether a terminal and a page show a character where it stands."""
  return unicodedata.category(character) not in ('Cc', 'Cf', 'Cs', 'Co', 'Cn', 'Zl', 'Zp')
