# SPDX-License-Identifier: Apache-2.0
"""The private runs of a model's weights, and their total privacy cost.

A ledger is a public constant like a plan: `begin` and `done` return a new one.
It belongs to the weights, and is saved with them; whoever trains them further,
with another optimizer or another plan, adds a line.
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
from tfdp_adaptive.privacy import card
from tfdp_adaptive.privacy import plan_checks
from tfdp_adaptive.privacy import statement as statement_lib

if TYPE_CHECKING:
  from tfdp_adaptive import contract

_FORMAT, _VERSION = 'tfdp_adaptive.ledger', 1
_RELATION = dp_accounting.NeighboringRelation


@dataclasses.dataclass(frozen=True)
class Entry:
  """A run.

  Attributes:
    plan: Its plan, with the clip norm of its last step; None if there was none, so that nothing
      is known of its cost.
    steps: Steps that count.
    rule: Name of the update rule, for people.
    private: Whether everything that the rule saw of the data was noised.
    own_sampler: The caller's description of the sampling, if the plan did not draw the batches.
    examples_per_user: With users as records: the largest number of one user's examples; 0 if
      that is not known.
    run: Identifier of the run, the same wherever its weights are; '' if it has none.
    resumed: `(run, steps)` of the runs that this run continues: their first steps are among
      the steps of this entry.
    notes: Sentences that the statement repeats.
    delta: Probability of what `plan` does not account for; part of the ledger's delta.
    taken: Steps done, where something that had been seen stopped the run, so that `steps` counts
      all that it could have done. None for other runs.
    clip_norms: `(steps, clip norm)` of the parts of a run whose clip norm changed, else ().
    clipping: Sentences about how its rule clips, such as by a clip norm that follows a quantile.
    seeded: Whether the noise had a fixed seed, as in tests.
    engines: The clipping engines.
    shared: Identifiers of runs that took steps on the same batches: their samples are one.
    looks: The evaluations after which the run could stop, if the claim follows from them.
  """

  plan: Any
  steps: int
  rule: str = ''
  private: bool = True
  own_sampler: str = ''
  examples_per_user: int = 0
  run: str = dataclasses.field(default='', compare=False)
  resumed: Tuple[Tuple[str, int], ...] = dataclasses.field(default=(), compare=False)
  notes: Tuple[str, ...] = ()
  delta: float = 0.0
  taken: Optional[int] = None
  clip_norms: Tuple[Tuple[int, float], ...] = ()
  clipping: Tuple[str, ...] = ()
  seeded: bool = False
  engines: Tuple[str, ...] = ()
  shared: Tuple[str, ...] = ()
  looks: Optional[stopping.Looks] = None

  def __post_init__(self) -> None:
    checks.whole(0, examples_per_user=self.examples_per_user)
    for name in ('clipping', 'engines', 'shared'):
      object.__setattr__(self, name, tuple(map(str, getattr(self, name))))
    object.__setattr__(self, 'clip_norms', tuple(
        (int(n), float(norm)) for n, norm in self.clip_norms))
    if self.clip_norms and (
        sum(n for n, _ in self.clip_norms) != self.done
        or self.plan is None or self.clip_norms[-1][1] != self.plan.l2_norm_clip):
      raise ValueError("`clip_norms` must be of all steps of a run, and end with its plan's. "
                       f'Received: clip_norms={self.clip_norms}.')
    for name in ('private', 'seeded'):
      if not isinstance(getattr(self, name), bool):
        raise ValueError(f'`{name}` must be True or False. Received: {getattr(self, name)!r}.')
    if self.taken is not None:
      checks.whole(0, taken=self.taken)
      if self.taken >= self.steps:
        raise ValueError('`taken` must be below `steps`, which counts what could have been taken. '
                         f'Received: taken={self.taken}, steps={self.steps}.')
    object.__setattr__(self, 'resumed', tuple((str(run), int(n)) for run, n in self.resumed))
    object.__setattr__(self, 'notes', tuple(map(str, self.notes)))
    if self.plan is not None and not isinstance(self.plan, terms_lib.Terms):
      raise ValueError(
          f'`plan` must be a `tfdp.PrivacyPlan` or None. Received: plan={self.plan!r}.')
    checks.whole(0, steps=self.steps)
    if self.plan is not None and self.steps > self.plan.steps:
      raise ValueError(f"`steps` must be at most the plan's {self.plan.steps}. "
                       f'Received: steps={self.steps}.')

  @property
  def done(self) -> int:
    """Steps that the run has taken; fewer than `steps` if something stopped it."""
    return self.steps if self.taken is None else self.taken

  def after(self, steps: int) -> Entry:
    """The entry of the same run at another number of steps."""
    return dataclasses.replace(self, steps=steps, taken=None, clip_norms=(), looks=None)

  @property
  def guaranteed(self) -> bool:
    """Whether its cost is finite and known."""
    return not self.steps or bool(
        self.private and self.plan is not None and self.plan.noise_multiplier)


@dataclasses.dataclass(frozen=True)
class Ledger:
  """All runs of the same weights on the same records, in order.

  A later run may depend on the weights of an earlier one: composition is
  adaptive. A record that only some of the runs saw has lost less.

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
    if not isinstance(self.entries, (tuple, list)) or not all(
        isinstance(entry, Entry) for entry in self.entries):
      raise ValueError('`entries` must be a tuple of `tfdp.privacy.ledger.Entry`. '
                       f'Received: entries={self.entries!r}.')
    object.__setattr__(self, 'entries', tuple(self.entries))

  def begin(
      self, plan: Optional[terms_lib.Terms], rule: Union[contract.Rule, str, None] = None,
      own_sampler: str = '') -> 'Ledger':
    """The ledger when another run begins, with nothing done.

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
    """The ledger when the last run has done `steps` steps in all."""
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
    """The entries that cost something, all of one unit and adjacency."""
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
    """The dp_accounting relation `event` is read under."""
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
    """Epsilon of all runs together; infinite if one of them has no guarantee.

    Args:
      target_delta: By default the largest of the plans.
      accountant: 'pld' (tight) or 'rdp'.
      looks: Fixed before the last run began, where what was released decided when it stopped;
        by default those of its entry.
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
    """Delta of all runs together at `epsilon`."""
    checks.one_of(cost.ACCOUNTANTS, accountant=accountant)
    if not any(entry.steps for entry in self.entries):
      return 0.0
    if not self.guaranteed:
      return 1.0
    return min(1.0, cost.delta(self.event(), epsilon, accountant, self.relation())
               + sum(entry.delta for entry in self.entries if entry.steps))

  def statement(self, target_delta: Optional[float] = None, accountant: str = 'pld',
                looks: Optional[stopping.Looks] = None) -> str:
    """Returns the privacy statement of the weights, in plain text; see `epsilon`."""
    self._run()  # Raises without a run.
    return statement_lib.of(card.of(
        self, delta=target_delta, accountant=accountant, plots=False, looks=looks))

  def to_json(self) -> str:
    """Returns all entries as text without secrets. `from_json` restores them."""
    return json.dumps({'format': _FORMAT, 'version': _VERSION,
                       'entries': [_entry_to_dict(entry) for entry in self.entries]})

  @classmethod
  def from_json(cls, text: str) -> 'Ledger':
    """The ledger `to_json` described; all checks are made again."""
    content = checks.read_json(text, 'a ledger', _FORMAT, _VERSION)
    try:
      return cls(tuple(_entry_from_dict(entry) for entry in content['entries']))
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


def _entry_to_dict(entry: Entry) -> Dict[str, Any]:
  plan = entry.plan
  return {
      'steps': int(entry.steps), 'rule': entry.rule, 'private': entry.private,
      'own_sampler': entry.own_sampler,
      **{name: getattr(entry, name) for name in (
          'examples_per_user', 'run', 'resumed', 'notes', 'delta', 'clip_norms', 'clipping',
          'seeded', 'engines', 'shared') if getattr(entry, name)},
      **({} if entry.taken is None else {'taken': entry.taken}),
      **({} if entry.looks is None else {'looks': dataclasses.asdict(entry.looks)}),
      'plan': None if plan is None else {
          'kind': type(plan).__name__, 'content': json.loads(plan.to_json())}}


def _entry_from_dict(fields: Dict[str, Any]) -> Entry:
  plan = fields['plan']
  if plan is not None:
    kinds = _kinds(terms_lib.Terms)
    checks.one_of(sorted(kinds), kind=plan['kind'])
    plan = kinds[plan['kind']].from_json(json.dumps(plan['content']))
  looks = fields.get('looks')
  return Entry(**dict(
      fields, plan=plan, looks=None if looks is None else stopping.Looks(**looks)))


def _kinds(base: Any) -> Dict[str, Any]:
  """Returns the subclasses by name, those of a user's own among them."""
  found = {}
  for kind in base.__subclasses__():
    found.update({kind.__name__: kind, **_kinds(kind)})
  return found


def of(value: Any) -> Any:
  """A ledger as it is, a plan as one run with all its steps; None for anything else."""
  if isinstance(value, terms_lib.Terms):
    return Ledger((Entry(value, value.steps),))
  return value if isinstance(value, Ledger) else None
