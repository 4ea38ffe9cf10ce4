# SPDX-License-Identifier: Apache-2.0
"""The privacy card: what a reviewer needs to check a guarantee without the data.

A card is a public constant, made from a ledger: the terms of every run, the numbers claimed
of them, and what the trainer says in own words. `card_checks` recomputes the numbers from the
terms. A card holds no secret and nothing exact about the data: no seed, no metric, and only
those sizes that a plan declares public.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata
import math
import platform
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple
import unicodedata

from tfdp_adaptive import checks
from tfdp_adaptive import gate
from tfdp_adaptive import version
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import meaning
from tfdp_adaptive.accounting import stopping

LONGEST = 10_000  # Characters of a text.
_LIBRARIES = ('dp-accounting', 'tensorflow', 'keras', 'numpy', 'scipy')
_POINTS = 10  # Points of the curve of epsilon.
_BEFORE = 'THE WEIGHTS WERE TRAINED BEFORE, and what they lost then is counted above.'
_SEED = ('A FIXED SEED was used for the noise: whoever knows it can take the noise away, so this '
         'run is a test and the guarantee above does not hold against them.')
_LARGEST = 1e11  # Epsilon; above it the numbers of a card are not finite.
_COUNTED = (
    'The ledger counts every run that left its record on these weights, wherever Keras copied, '
    'loaded or wrapped them, and in checkpoints of variables. It cannot follow values that were '
    'copied by hand (get_weights, set_weights, set_state_tree, assign), a model trained on '
    'predictions of these weights, a SavedModel used as a layer, or training without this library, '
    'as of files that were read or written before it was imported.')
# Fractions of epsilon at which delta is stated.
_SHARES = meaning.FRACTIONS + (0.15, 0.5, 0.8, 1.25, 1.6)


@dataclasses.dataclass(frozen=True)
class Run:
  """A line of the ledger, and the results derived from its terms.

  Attributes:
    entry: A `ledger.Entry`; its plan has no seed.
    probability: Of a record in a batch of its turn; None if sampling is not random.
    amplified: Whether amplification by sampling is claimed.
    min_sep: Smallest distance of two participations of a record.
    max_participations: Largest number of them, in the steps done.
    sensitivity: Of all releases, or of one release if amplified, in clip norms.
    noise_stddev: The noise on a sum of clipped records, before correlation.
    seeded: Whether sampling used a fixed seed, as in tests.
    details: Sentences about the rule, such as a clip norm that follows noised statistics.
  """

  entry: Any
  probability: Optional[float] = None
  amplified: bool = False
  min_sep: int = 1
  max_participations: int = 0
  sensitivity: float = 0.0
  noise_stddev: float = 0.0
  seeded: bool = False
  details: Tuple[str, ...] = ()


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
class Part:
  """A part of the library that was used, and its `state`: 'stable' or 'experimental'."""

  name: str
  state: str


@dataclasses.dataclass(frozen=True)
class Card:
  """A privacy claim about weights, and the terms that it follows from.

  Attributes:
    runs: Every run the weights went through.
    unit: 'example' or 'user'.
    adjacency: See `PrivacyPlan`.
    delta: The delta of the guarantee.
    epsilon: Of all steps done; None if there is no guarantee.
    planned_epsilon: The epsilon of all planned steps.
    mu: The mu of the Gaussian mechanism with this epsilon at this delta.
    accountant: The accountant of epsilon: 'pld' or 'rdp'.
    reason: Why there is no guarantee.
    curve: (steps, epsilon at `delta`), over all runs; the last point is the plan's end.
    profile: (epsilon, delta) that hold as well; the first ones bound the attacker in words.
    trust: 'central' (a trusted curator has the records) or 'federated' (a trusted server has
      the updates).
    words: The trainer's own.
    facts: Findings of the library as sentences, with the notes of runs first.
    audits: The audits that were run.
    parts: The parts that were used.
    versions: (library, version).
    weights: Digests of the arrays, in any order; see `weight_digests`. () if not known.
  """

  runs: Tuple[Run, ...]
  unit: str = 'example'
  adjacency: str = 'zero_out'
  delta: float = 0.0
  epsilon: Optional[float] = None
  planned_epsilon: Optional[float] = None
  mu: Optional[float] = None
  accountant: str = 'pld'
  reason: str = ''
  curve: Tuple[Tuple[int, float], ...] = ()
  profile: Tuple[Tuple[float, float], ...] = ()
  trust: str = 'central'
  words: Tuple[Words, ...] = ()
  facts: Tuple[str, ...] = ()
  audits: Tuple[Audit, ...] = ()
  parts: Tuple[Part, ...] = ()
  versions: Tuple[Tuple[str, str], ...] = ()
  weights: Tuple[str, ...] = ()

  def with_words(self, words: Sequence[Words]) -> Card:
    """A copy that says more in the trainer's own words."""
    return dataclasses.replace(self, words=self.words + tuple(words))

  @property
  def done(self) -> int:
    """Steps taken, over all runs."""
    return sum(run.entry.steps for run in self.runs)

  @property
  def plans(self) -> Tuple[Any, ...]:
    """Returns the plans of the runs that have one."""
    return tuple(run.entry.plan for run in self.runs if run.entry.plan is not None)

  @property
  def rate(self) -> float:
    """The attacker's true positives at 1% false ones, as the statement says it."""
    return meaning.bound(self.profile[:len(meaning.FRACTIONS)], 0.01)

  def true_positive_rate(self, false_positive_rate: float) -> float:
    """Returns an upper bound of the attacker's rate, from every point of the profile."""
    return meaning.bound(self.profile, false_positive_rate)


def of(
    ledger: Any, *, delta: Optional[float] = None, accountant: str = 'pld',
    plots: bool = True, trust: str = 'central', words: Sequence[Words] = (),
    facts: Sequence[str] = (), audits: Sequence[Any] = (), weights: Sequence[str] = (),
    looks: Optional[stopping.Looks] = None) -> Card:
  """The card of all runs of a ledger.

  Args:
    ledger: A `tfdp.Ledger`, the runs.
    delta: By default the largest of the plans.
    accountant: 'pld' (tight) or 'rdp'.
    plots: Whether to compute what only plots show: the curve, and more of the profile.
    trust: See `Card`.
    words: See `Card`. Sentences about the sampling of a run come first.
    facts: See `Card`.
    audits: Reports of `tfdp.audit`.
    weights: See `weight_digests`.
    looks: The looks fixed before the last run, if released results decided when it stopped.
  """
  checks.one_of(cost.ACCOUNTANTS, accountant=accountant)
  if looks is not None and ledger.entries and ledger.entries[-1].plan is not None:
    ledger = type(ledger)((*ledger.entries[:-1],
                           dataclasses.replace(ledger.entries[-1], looks=looks)))
  texts = derived_texts(ledger.entries, trust)
  plans = [entry.plan for entry in ledger.entries if entry.plan is not None]
  unit: Dict[str, Any] = dict(unit=plans[0].unit, adjacency=plans[0].adjacency) if plans else {}
  card = Card(
      runs=tuple(map(_run, ledger.entries)), accountant=accountant, trust=trust,
      words=texts.words + tuple(Words(clean(one.about), clean(one.text)) for one in words),
      facts=tuple(dict.fromkeys([*texts.facts, *map(clean, facts)])),
      audits=tuple(map(_audit, audits)), parts=texts.parts, versions=versions(),
      weights=tuple(sorted(weights)),
      delta=(ledger.target_delta or 0.0) if delta is None else delta, **unit)
  return _claims(card, ledger, plots)


class DerivedTexts(NamedTuple):
  """The words, facts and parts of a card that follow from its runs."""

  words: Tuple[Words, ...]
  facts: Tuple[str, ...]
  parts: Tuple[Part, ...]


def about_weights(entries: Sequence[Any]) -> List[str]:
  """Returns facts for the card of the weights of one model, whose ledger this is."""
  return [_BEFORE] * (len(entries) > 1) + [_COUNTED]


def derived_texts(entries: Sequence[Any], trust: str) -> DerivedTexts:
  """Returns the texts of a card that follow from the entries of a ledger."""
  plans = [entry.plan for entry in entries if entry.plan is not None]
  return DerivedTexts(
      tuple(Words(f'the sampling of run {number}', clean(entry.own_sampler))
            for number, entry in enumerate(entries, 1) if entry.own_sampler),
      tuple(map(clean, dict.fromkeys(_recorded(entries)))),
      tuple(_parts(plans, entries, trust)))


def _recorded(entries: Sequence[Any]) -> List[str]:
  """Returns the sentences that follow from what the entries of a ledger have recorded."""
  found = [note for entry in entries for note in entry.notes]
  for number, entry in enumerate(entries, 1):
    if entry.seeded:
      found.append(f'Run {number}: {_SEED}')
    if entry.taken is not None:
      found.append(f'Run {number} was stopped after {entry.taken} steps by something that had '
                   f'been seen, so that all {entry.steps} steps that it could have taken are '
                   'counted.')
    if entry.clip_norms:
      found.append(f'The clip norm of run {number} changed: ' + ', then '.join(
          f'{norm:g} in {steps} steps' for steps, norm in entry.clip_norms) + '.')
    if entry.shared:
      found.append(f'Run {number} took steps on batches that other steps took, too. Where a ledger '
                   'has both, they are added up without amplification by sampling; where it has '
                   'one, publishing both costs more than two ledgers say.')
    if entry.looks is not None:
      found.append(entry.looks.describe(entry.plan, entry.done))
  return found


def _claims(card: Card, ledger: Any, plots: bool) -> Card:
  """The card with epsilon and what follows from it, or the reason why there is none."""
  guaranteed = [entry.guaranteed for entry in ledger.entries]
  if not all(guaranteed):
    return dataclasses.replace(card, reason=_reason(
        ledger.entries[guaranteed.index(False)], guaranteed.index(False) + 1, len(guaranteed)))
  accountant, target_delta = card.accountant, card.delta or None
  try:
    epsilon = ledger.epsilon(target_delta, accountant)
  except ValueError as error:  # Guarantees about different neighbours do not add up.
    return dataclasses.replace(card, reason=clean(str(error)))
  if epsilon > _LARGEST:
    return dataclasses.replace(card, reason='The noise is too small for a finite epsilon')
  plan: Any = ledger.entries[-1].plan if ledger.entries else None
  end = ledger if plan is None else type(ledger)(
      (*ledger.entries[:-1], ledger.entries[-1].after(plan.steps)))
  total = end.epsilon(target_delta, accountant)
  planned = total if total <= _LARGEST else None
  if ledger.entries and ledger.entries[-1].looks is not None:
    # All else holds at steps and deltas that were fixed beforehand.
    return dataclasses.replace(
        card, epsilon=epsilon, planned_epsilon=max(epsilon, planned or 0.0),
        mu=meaning.gaussian_mu(epsilon, card.delta), profile=((epsilon, card.delta),))
  drawn = any(plan.sampling.draws for plan in card.plans)  # Each point: minutes.
  curve = ([(steps, until(ledger, steps).epsilon(card.delta, accountant))
            for steps in plotted_steps(card)] if plots and not drawn else [])
  last = sum(entry.steps for entry in end.entries)
  shares = _SHARES if plots and not drawn else meaning.FRACTIONS
  profile = [(share * epsilon, ledger.delta(share * epsilon, accountant))
             for share in shares] if 0 < epsilon < math.inf else []
  return dataclasses.replace(
      card, epsilon=epsilon, planned_epsilon=planned,
      mu=meaning.gaussian_mu(epsilon, card.delta) if card.delta else 0.0,
      curve=tuple((steps, value) for steps, value in sorted(
          {**dict(curve), last: planned, card.done: epsilon}.items()) if value is not None),
      profile=tuple(profile))


def plotted_steps(card: Card) -> List[int]:
  """Returns the steps that are plotted: about ten, the first, and the ends of a few runs."""
  ends, end = set(), 0
  for run in card.runs[:_POINTS // 2]:
    end += run.entry.steps
    ends.add(end)
  inner = {card.done * i // _POINTS for i in range(1, _POINTS)}
  return sorted((inner | {min(1, card.done), *ends}) - {0})


def until(ledger: Any, steps: int) -> Any:
  """The ledger after its first `steps` steps."""
  entries = []
  for entry in ledger.entries:
    taken = min(steps, entry.steps)
    steps -= taken
    entries.append(entry.after(taken))
  return type(ledger)(tuple(entries))


def _reason(entry: Any, number: int, runs: int) -> str:
  return f'run {number} of {runs} on these weights ' + (
      'had no plan' if entry.plan is None else
      f'used a statistic of the data without noise ({entry.rule})' if not entry.private else
      'had a noise multiplier of 0')


def _run(entry: Any) -> Run:
  plan: Any = entry.plan
  entry = dataclasses.replace(entry, rule=clean(entry.rule), own_sampler=clean(entry.own_sampler))
  if plan is None:
    return Run(entry)
  seeded = getattr(plan, 'seed', None) is not None
  if seeded:
    entry = dataclasses.replace(entry, plan=dataclasses.replace(plan, seed=None))
  return Run(entry, seeded=seeded, details=tuple(map(clean, entry.clipping)),
             **derived(plan, entry.steps))


def derived(plan: Any, steps: int) -> Dict[str, Any]:
  """Derives a run's numbers from the terms of a plan; see `Run`."""
  amplified = plan.sampling.claims(plan)
  random = amplified or plan.sampling.amplified
  min_sep, count = cost.participation(plan, steps)
  sensitivity = 0.0 if not steps else (
      cost.sensitivity(plan.mechanism, 1, 1) if amplified
      else cost.total_sensitivity(plan, steps))
  probability = plan.sampling.probability(plan) if random else None
  return dict(probability=probability, amplified=amplified, min_sep=min_sep,
              max_participations=count, sensitivity=float(sensitivity),
              noise_stddev=cost.noise_stddev(plan))


def _audit(report: Any) -> Audit:
  """Returns only the verdict. An audit's measurements may be exact numbers of the data."""
  if isinstance(report, Audit):
    return report
  refuted = bool(report.violated)
  return Audit(clean(f'{type(report).__name__} {getattr(report, "name", "")}'.strip()), refuted,
               'The claim is violated.' if refuted else
               'It found nothing that refutes the claim. An audit cannot prove one.')


def _parts(plans: Iterable[Any], entries: Iterable[Any], trust: str) -> Iterable[Part]:
  names = {entry.rule for entry in entries if entry.rule} | ({trust} - {'central'})
  for plan in plans:
    names |= {type(plan.sampling).__name__, type(plan.mechanism).__name__}
    names |= {'Search'} if plan.search is not None else set()
  return [Part(name, gate.state_of(name)) for name in sorted(map(clean, names))]


def versions() -> Tuple[Tuple[str, str], ...]:
  """Returns the versions of this library and of the packages that determine its numbers."""
  found = [('tfdp_adaptive', version.__version__), ('Python', platform.python_version())]
  for name in _LIBRARIES:
    try:
      found.append((name, metadata.version(name)))
    except metadata.PackageNotFoundError:
      pass
  return tuple(found)


def clean(text: str) -> str:
  """Returns a line of printable text, without control or direction characters."""
  return ' '.join(''.join(c if printable(c) else ' ' for c in str(text)).split())[:LONGEST]


def printable(character: str) -> bool:
  """Whether a terminal and a page show it where it stands."""
  return unicodedata.category(character) not in ('Cc', 'Cf', 'Cs', 'Co', 'Cn', 'Zl', 'Zp')
