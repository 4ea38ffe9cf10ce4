# SPDX-License-Identifier: Apache-2.0
"""The private runs of a model's weights, and their total privacy cost.

A ledger is a public constant like a plan: `begin` and `done` return a new one.
It belongs to the weights and is saved with them. Training them further, with
another optimizer or another plan, adds an entry.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from typing import Any, Dict, List, Optional, Sequence, Tuple, TYPE_CHECKING, Union

import dp_accounting

from tfdp_adaptive import checks
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import stopping
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import entry as entry_lib
from tfdp_adaptive.privacy import plan_checks
from tfdp_adaptive.privacy import statement as statement_lib

if TYPE_CHECKING:
  from tfdp_adaptive import contract

_FORMAT, _VERSION = 'tfdp_adaptive.ledger', 1
_RELATION = dp_accounting.NeighboringRelation


Entry = entry_lib.Entry


@dataclasses.dataclass(frozen=True)
class Ledger:
  """All runs of the same weights on the same records, in order.

  A later run may depend on the weights of an earlier one: composition is
  adaptive. A record that only some of the runs used has lost less privacy.

  Attributes:
    entries: The runs.

  Examples:
    >>> plan = PrivacyPlan(batch_size=100, steps=500, l2_norm_clip=1.0, noise_multiplier=1.0,
    ...                    target_delta=1e-6, population_size=10_000)
    >>> ledger = Ledger().begin(plan, rule='dp_adam').done(200)
    >>> ledger = ledger.begin(plan, rule='dp_adam').done(500)  # Trained again.
    >>> plan.epsilon() < ledger.epsilon() < 2 * plan.epsilon()
    True
  """

  entries: Tuple[Entry, ...] = ()

  def __post_init__(self) -> None:
    checks.require(
        isinstance(self.entries, (tuple, list))
        and all(isinstance(entry, Entry) for entry in self.entries),
        'be a tuple of `tfdp.privacy.ledger.Entry`', entries=self.entries)
    object.__setattr__(self, 'entries', tuple(self.entries))

  def begin(
      self, plan: Optional[terms_lib.Terms], rule: Union[contract.Rule, str, None] = None,
      own_sampler: str = '') -> 'Ledger':
    """Returns the ledger when another run begins, with nothing done.

    Args:
      plan: The run's plan; None if it has none.
      rule: A rule of `tfdp.rules`, which the plan checks, or its name.
      own_sampler: A description of the sampling, if the plan does not draw the batches.
    """
    private, clipping = True, ()
    if rule is not None and not isinstance(rule, str):
      private, clipping = plan_checks.serves(plan, rule), statement_lib.clipping(rule)
      rule = rule.name
    return Ledger(self.entries + (
        Entry(plan, 0, rule or '', private, own_sampler, clipping=clipping),))

  def done(self, steps: int) -> 'Ledger':
    """Returns the ledger when the last run has done `steps` steps in all."""
    if not self.entries:
      raise ValueError('No run has begun: call `begin` first. '
                       f'Received: steps={steps} of an empty ledger.')
    last = self.entries[-1]
    checks.whole(0, steps=steps)
    if steps < last.steps:
      raise ValueError(f'What is done stays done: the last run has taken {last.steps} steps. '
                       f'Received: steps={steps}. A new run is another `begin`.')
    return Ledger(self.entries[:-1] + (
        last if steps == last.steps else last.after(int(steps)),))

  def __add__(self, other: Union['Ledger', terms_lib.Terms]) -> 'Ledger':
    more = of(other)
    return NotImplemented if more is None else Ledger(self.entries + more.entries)

  @property
  def guaranteed(self) -> bool:
    """Whether every run that did anything has a finite, known cost."""
    return all(entry.guaranteed for entry in self.entries)

  def _run(self) -> List[Entry]:
    """Returns the entries that cost something, all of one unit and adjacency."""
    entries = [entry for entry in self.entries if entry.steps]
    for name in ('unit', 'adjacency'):
      values = sorted({getattr(entry.plan, name) for entry in entries if entry.plan is not None})
      if len(values) > 1:
        raise ValueError(
            f'All plans of a ledger must have the same `{name}`: guarantees about different '
            f'neighbours do not add up. Received: {name}={values}. Make all plans for the one you '
            'want to state.')
    return entries

  def relation(self) -> dp_accounting.NeighboringRelation:
    """Returns the dp_accounting relation under which `event` is read."""
    relations = {cost.relation(entry.plan) for entry in self._run() if entry.plan is not None}
    return next((r for r in relations if r is not _RELATION.ADD_OR_REMOVE_ONE),
                _RELATION.ADD_OR_REMOVE_ONE)

  def event(self) -> dp_accounting.DpEvent:
    """Returns the event of all runs together."""
    entries = self._run()
    if not self.guaranteed:
      return dp_accounting.NonPrivateDpEvent()
    relation = self.relation()
    events = [cost.event(entry.plan, entry.steps, neighbors=relation, composed=len(entries) > 1,
                         shared=plan_checks.shares_bins(entry, entries[:i] + entries[i + 1:]),
                         same_batches=plan_checks.shares_batches(
                             entry, entries[:i] + entries[i + 1:]))
              for i, entry in enumerate(entries) if entry.plan is not None]
    if not events:
      return dp_accounting.NoOpDpEvent()
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(tuple(events))

  @property
  def target_delta(self) -> Optional[float]:
    """The largest delta of the plans; None without any."""
    return max((e.plan.target_delta for e in self.entries if e.plan is not None), default=None)

  def epsilon(self, target_delta: Optional[float] = None, accountant: str = 'pld',
              looks: Optional[stopping.Looks] = None) -> float:
    """Returns epsilon of all runs together, infinite if one of them has no guarantee.

    Args:
      target_delta: By default the largest of the plans.
      accountant: 'pld' (tight) or 'rdp'.
      looks: The steps after which the last run might stop early, if its releases decided when it
        stopped. They were fixed before it began. By default, those of the ledger's entry.
    """
    checks.one_of(cost.ACCOUNTANTS, accountant=accountant)
    if not any(entry.steps for entry in self.entries):
      return 0.0
    if not self.guaranteed:
      return math.inf
    delta: Any = self.target_delta if target_delta is None else target_delta
    checks.probability(target_delta=delta)
    last = self.entries[-1]
    looks = last.looks if looks is None else looks
    if looks is not None:
      share, counted = looks.claim(last.plan, last.done)
      claimed = Ledger(self.entries[:-1] + (last.after(counted),))
      return claimed.epsilon(share * delta, accountant)
    delta -= sum(entry.delta for entry in self.entries if entry.steps)
    return math.inf if delta <= 0 else cost.epsilon(
        self.event(), delta, accountant, self.relation())

  def delta(self, epsilon: float, accountant: str = 'pld') -> float:
    """Returns delta of all runs together at `epsilon`."""
    checks.one_of(cost.ACCOUNTANTS, accountant=accountant)
    if not any(entry.steps for entry in self.entries):
      return 0.0
    if not self.guaranteed:
      return 1.0
    return min(1.0, cost.delta(self.event(), epsilon, accountant, self.relation())
               + sum(entry.delta for entry in self.entries if entry.steps))

  def until(self, steps: int) -> Ledger:
    """Returns the ledger after its first `steps` steps."""
    entries = []
    for entry in self.entries:
      taken = min(steps, entry.steps)
      steps -= taken
      entries.append(entry.after(taken))
    return Ledger(tuple(entries))

  def card(
      self, *, delta: Optional[float] = None, accountant: str = 'pld', plots: bool = True,
      trust: str = 'central', words: Sequence[card_lib.Words] = (), facts: Sequence[str] = (),
      audits: Sequence[Any] = (), weights: Sequence[str] = (),
      looks: Optional[stopping.Looks] = None) -> card_lib.Card:
    """Returns the privacy card of all runs.

    Args:
      delta: By default the largest of the plans.
      accountant: 'pld' (tight) or 'rdp'.
      plots: Whether to compute what only plots show: the curve, and more of the profile.
      trust: See `Card`.
      words: See `Card`.
      facts: See `Card`.
      audits: Reports of `tfdp.audit`.
      weights: Digests of the weights, see `weight_digests`.
      looks: The evaluations fixed before the last run, if released results decided when it
        stopped.

    Examples:
      >>> plan = PrivacyPlan(batch_size=100, steps=500, l2_norm_clip=1.0, noise_multiplier=1.0,
      ...                    target_delta=1e-6, population_size=10_000)
      >>> card = Ledger().begin(plan).done(500).card(plots=False)
      >>> card.epsilon == plan.epsilon()
      True
    """
    checks.one_of(cost.ACCOUNTANTS, accountant=accountant)
    ledger = self
    if looks is not None and self.entries and self.entries[-1].plan is not None:
      last = dataclasses.replace(self.entries[-1], looks=looks)
      ledger = Ledger((*self.entries[:-1], last))
    card = card_lib.Card(
        runs=tuple(map(card_lib.public, ledger.entries)), accountant=accountant, trust=trust,
        facts=tuple(map(card_lib.clean, facts)), audits=tuple(map(card_lib.audited, audits)),
        versions=card_lib.versions(), weights=tuple(sorted(weights)),
        delta=(self.target_delta or 0.0) if delta is None else delta).with_words(words)
    try:
      return card_lib.claimed(card, ledger, plots)
    except ValueError as error:  # Guarantees about different neighbors do not add up.
      return dataclasses.replace(card, reason=card_lib.clean(str(error)))

  def statement(self, target_delta: Optional[float] = None, accountant: str = 'pld',
                looks: Optional[stopping.Looks] = None) -> str:
    """Returns the privacy statement of the weights, in plain text; see `epsilon`."""
    self._run()  # Raises if units or adjacencies differ.
    return statement_lib.of(self.card(
        delta=target_delta, accountant=accountant, plots=False, looks=looks))

  def to_json(self) -> str:
    """Returns all entries as text without secrets. `from_json` restores them."""
    return json.dumps({'format': _FORMAT, 'version': _VERSION,
                       'entries': [entry.to_dict() for entry in self.entries]})

  @classmethod
  def from_json(cls, text: Union[str, bytes]) -> 'Ledger':
    """Returns the ledger that `to_json` described, after all checks."""
    content = checks.read_json(text, 'a ledger', _FORMAT, _VERSION)
    try:
      return cls(tuple(map(Entry.from_dict, content['entries'])))
    except (KeyError, TypeError) as error:
      raise ValueError('The text must be the JSON of a ledger, as `to_json` wrote it. Received: '
                       f'{str(text)[:60]!r} ({error!r}).') from error


def new_run() -> str:
  """Returns an identifier of a run, which no other run has."""
  return secrets.token_hex(8)


def distinct(entries: Sequence[Entry]) -> Ledger:
  """Returns a ledger that counts every run once.

  Of two states of one run the later counts. A run that another run continues counts only
  if it took more steps than that other run has from it.

  Args:
    entries: The entries of several weights or files, in any order; those without `run` are kept.

  Examples:
    >>> [one.steps for one in distinct([
    ...     Entry(None, 2, run='a'), Entry(None, 3, run='a'),
    ...     Entry(None, 5, run='b', resumed=(('a', 3),))]).entries]
    [5]
  """
  latest: Dict[Any, Entry] = {}
  for number, entry in enumerate(entries):
    key, reach = entry.run or number, lambda one: (one.steps, len(one.notes))
    if key not in latest or reach(entry) > reach(latest[key]):
      latest[key] = entry
  continued: Dict[str, int] = {}
  for run, steps in (pair for entry in latest.values() for pair in entry.resumed):
    continued[run] = max(steps, continued.get(run, 0))
  return Ledger(tuple(entry for entry in latest.values()
                      if not entry.run or entry.steps > continued.get(entry.run, -1)))


def of(value: object) -> Any:
  """Returns a ledger unchanged, the ledger of all steps of a plan, or None for anything else."""
  if isinstance(value, terms_lib.Terms):
    return Ledger((Entry(value, value.steps),))
  return value if isinstance(value, Ledger) else None
