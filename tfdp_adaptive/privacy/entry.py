# SPDX-License-Identifier: Apache-2.0
"""One run of a ledger: its plan, the steps that count, and what was in force in them."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, Dict, Optional, Tuple, Type

from tfdp_adaptive import checks
from tfdp_adaptive import terms
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import stopping

_TEXTS = ('notes', 'clipping', 'engines', 'shared')


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
    seeded_batches: Whether the plan had a fixed seed, which a card leaves out.
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
  seeded_batches: bool = False

  def __post_init__(self) -> None:
    for name in _TEXTS:
      object.__setattr__(self, name, tuple(map(str, getattr(self, name))))
    object.__setattr__(self, 'clip_norms', tuple(
        (int(n), float(norm)) for n, norm in self.clip_norms))
    object.__setattr__(self, 'resumed', tuple((str(run), int(n)) for run, n in self.resumed))
    checks.instance((terms.Terms, type(None)), 'a `tfdp.PrivacyPlan` or None', plan=self.plan)
    checks.whole(0, steps=self.steps, examples_per_user=self.examples_per_user)
    checks.decay(delta=self.delta)
    object.__setattr__(self, 'steps', int(self.steps))
    if self.plan is not None and self.steps > self.plan.steps:
      raise ValueError(f"`steps` must be at most the plan's {self.plan.steps}. "
                       f'Received: steps={self.steps}.')
    checks.instance(bool, 'True or False', private=self.private, seeded=self.seeded,
                    seeded_batches=self.seeded_batches)
    if self.taken is not None:
      checks.whole(0, taken=self.taken)
      if self.taken >= self.steps:
        raise ValueError('`taken` must be below `steps`, which counts what could have been taken. '
                         f'Received: taken={self.taken}, steps={self.steps}.')
    checks.require(
        not self.clip_norms or (
            sum(n for n, _ in self.clip_norms) == self.done and self.plan is not None
            and self.clip_norms[-1][1] == self.plan.l2_norm_clip),
        "be of all steps of a run, and end with its plan's", clip_norms=self.clip_norms)

  @property
  def done(self) -> int:
    """Steps that the run has taken; fewer than `steps` if something stopped it."""
    return self.steps if self.taken is None else self.taken

  @property
  def guaranteed(self) -> bool:
    """Whether its cost is finite and known."""
    return not self.steps or bool(
        self.private and self.plan is not None and self.plan.noise_multiplier)

  @property
  def has_seed(self) -> bool:
    """Whether the batches were drawn with a fixed seed, as in tests."""
    return self.seeded_batches or self.plan is not None and self.plan.seed is not None

  @property
  def amplified(self) -> bool:
    """Whether amplification by sampling is claimed; not if coins leave nothing to chance."""
    if self.plan is None or not self.plan.amplified:
      return False
    scheme = self.plan.sampling
    by_coins = scheme.pattern == 'steps' and not scheme.by_example and not scheme.max_batch_size
    return not (by_coins and scheme.probability(self.plan) == 1)

  @property
  def participation(self) -> Tuple[int, int]:
    """`(min_sep, max_participations)` of a record in the steps that count."""
    return self.plan.participation(self.steps)

  @functools.cached_property
  def sensitivity(self) -> float:
    """The sensitivity of all releases, or of one release if amplified, in clip norms."""
    if not self.steps:
      return 0.0
    return float(cost.sensitivity(self.plan.mechanism, 1, 1) if self.amplified
                 else cost.total_sensitivity(self.plan, self.steps))

  def after(self, steps: int) -> Entry:
    """Returns the entry of the same run at another number of steps."""
    return dataclasses.replace(self, steps=steps, taken=None, clip_norms=(), looks=None)

  def without_seed(self) -> Entry:
    """Returns the entry with a plan that has no seed, and says so if it had one."""
    if self.plan is None or self.plan.seed is None:
      return self
    return dataclasses.replace(
        self, plan=dataclasses.replace(self.plan, seed=None), seeded_batches=True)

  def to_dict(self) -> Dict[str, Any]:
    """Returns all fields that differ from their defaults, as JSON values."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)
              if getattr(self, field.name) != field.default}
    if self.looks is not None:
      fields['looks'] = dataclasses.asdict(self.looks)
    if self.plan is not None:
      fields['plan'] = {
          'kind': type(self.plan).__name__, 'content': json.loads(self.plan.to_json())}
    return fields

  @classmethod
  def from_dict(cls, fields: Dict[str, Any]) -> Entry:
    """Returns the entry that `to_dict` described, after all checks."""
    plan, looks = fields['plan'], fields.get('looks')
    if plan is not None:
      kinds = _kinds(terms.Terms)
      checks.one_of(sorted(kinds), kind=plan['kind'])
      plan = kinds[plan['kind']].from_json(json.dumps(plan['content']))
    return cls(**dict(
        fields, plan=plan, looks=None if looks is None else stopping.Looks(**looks)))


def _kinds(base: Type[terms.Terms]) -> Dict[str, Any]:
  """Returns the subclasses by name, those of a user's own among them."""
  found = {}
  for kind in base.__subclasses__():
    found.update({kind.__name__: kind, **_kinds(kind)})
  return found
