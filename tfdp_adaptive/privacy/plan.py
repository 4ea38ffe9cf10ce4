# SPDX-License-Identifier: Apache-2.0
"""The privacy of a training run as one public constant: what runs is what is accounted."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, Callable, Iterator, Optional, Sequence, TYPE_CHECKING, Union

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import gate
from tfdp_adaptive import mechanisms
from tfdp_adaptive import terms
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import private_search
from tfdp_adaptive.accounting import sampling as sampling_lib
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.privacy import ledger
from tfdp_adaptive.privacy import plan_checks
from tfdp_adaptive.privacy import statement as statement_lib

if TYPE_CHECKING:
  import dp_accounting

  from tfdp_adaptive import contract

_Path = Union[str, 'os.PathLike[str]']
_FORMAT, _VERSION = 'tfdp_adaptive.plan', 1


@dataclasses.dataclass(frozen=True)
class PrivacyPlan(terms.Terms):
  """All settings that decide the privacy of a run. They are fixed before it starts.

  The noise on a clipped sum has standard deviation `noise_multiplier *
  l2_norm_clip` (twice that under replace) times the mechanism's row norm. The sum is divided by
  `batch_size`, never by the actual number of records.

  Attributes:
    batch_size: Expected batch size B, in units of privacy; a public constant.
    steps: Number T of steps (rounds) that the run may take; or `sampling.Epochs(3)`, the steps of 3
      passes over the records.
    l2_norm_clip: Clip norm of a record. Epsilon does not depend on it. If None, the optimizer's
      clip norm counts. If the optimizer has none, the clip norm adapts to the records, starting at
      1, see `tfdp.clipping.Automatic`.
    noise_multiplier: Standard deviation of the noise in units of one record's
      sensitivity. 0 is allowed for experiments: epsilon is then infinite.
    target_delta: The delta at which epsilon is reported.
    population_size: Number N of records (users, if `unit` is 'user').
    population_is_public: Whether N may be known. By default True for zero_out and replace, under
      which neighbors have the same size. Under add_remove, give it, or
      `Poisson(sampling_probability=...)` instead.
    unit: 'example' or 'user', what one record is.
    adjacency: 'zero_out' (a record against an empty one), 'add_remove', or
      'replace' (a record against any other).
    sampling: A scheme of `tfdp.sampling`.
    min_sep: Smallest distance between two participations of a record; at most
      the smallest distance under `sampling`, which is the default.
    max_participations: Largest number of participations; at least the largest number under
      `sampling`, which is the default.
    mechanism: A mechanism of `tfdp.mechanisms`.
    extra_releases: One noise multiplier, relative to the plan's, for every
      statistic of past clean data that the rule releases at each step in addition to
      its means (`Statistic.relative_noise`); they concern every record at every
      step. `check_rule` says what a rule needs; () for almost all.
    search: A `tfdp.privacy.Search`, where the model is the best of a random number of runs
      under this plan (`tfdp.tune`); its epsilon then covers all of these runs.
    seed: Fixes all random choices, FOR TESTS ONLY. The statement says so.
    public: PUBLIC inputs x, such as those that `tfdp.recommend` has used. `batches` raises an error
      if one of them is among private examples in memory. Plans are equal whatever it is, and
      `to_json` leaves it out.

  Examples:
    >>> plan = PrivacyPlan.calibrate(
    ...     target_epsilon=2.0, target_delta=1e-5, population_size=10_000,
    ...     batch_size=100, steps=1000, l2_norm_clip=1.0)
    >>> 1.98 <= plan.epsilon() <= 2.0
    True
  """

  # The other fields are those of `Terms`; `steps` may be `sampling.Epochs` until the plan is made.
  sampling: sampling_lib.Sampling = sampling_lib.Poisson()
  mechanism: mechanisms.Mechanism = dataclasses.field(
      default_factory=mechanisms.IndependentGaussian)
  search: Optional[private_search.Search] = None
  public: Any = dataclasses.field(default=None, compare=False, repr=False)

  def __post_init__(self) -> None:
    plan_checks.kinds(self)
    if self.population_is_public is None:
      object.__setattr__(self, 'population_is_public', self.adjacency != 'add_remove')
    plan_checks.published(self)
    # NumPy's float32 stays one in products with Python's numbers: epsilon would be rounded.
    for name in ('batch_size', 'l2_norm_clip', 'noise_multiplier', 'target_delta'):
      if isinstance(getattr(self, name), np.generic):
        object.__setattr__(self, name, getattr(self, name).item())
    if isinstance(self.steps, sampling_lib.Epochs):
      object.__setattr__(self, 'steps', self.steps.in_steps(
          self.batch_size, self.population_size, self.sampling))
    checks.whole(steps=self.steps)
    object.__setattr__(self, 'steps', int(self.steps))
    # The noise multiplier is float64, whatever it was given as.
    object.__setattr__(self, 'noise_multiplier', float(self.noise_multiplier))
    # Integers of NumPy have no negative powers.
    object.__setattr__(self, 'extra_releases', tuple(map(float, self.extra_releases)))
    plan_checks.population(self)
    self.sampling.check(self)
    plan_checks.accountable(self)
    plan_checks.participation(self)

  def __add__(self, other: Union[PrivacyPlan, ledger.Ledger]) -> ledger.Ledger:
    """Returns the ledger of both runs, each with all its steps, on the same records."""
    return ledger.of(self) + other

  def __str__(self) -> str:
    """Returns a table of the plan, with its epsilon."""
    return statement_lib.table(self, self.epsilon())

  @classmethod
  def calibrate(
      cls, *, target_epsilon: float, target_delta: float, accountant: str = 'pld',
      spent: Union[PrivacyPlan, ledger.Ledger, None] = None, **fields: Any) -> 'PrivacyPlan':
    """Returns the plan with the least noise whose epsilon is at most `target_epsilon`.

    Args:
      target_epsilon: Never exceeded; `plan.epsilon(accountant=accountant)` is
        within 1% below it.
      target_delta: See the class.
      accountant: 'pld' (tight) or 'rdp'.
      spent: A ledger of the same records, such as the ledger that `tfdp.estimates.adapt` returns,
        or another plan. The ledger and the new plan together then cost at most `target_epsilon`:
        `(spent + plan).epsilon(target_delta)`.
      **fields: The other attributes, without `noise_multiplier`.
    """
    if 'noise_multiplier' in fields:
      raise ValueError('`noise_multiplier` is what `calibrate` finds: leave it out. '
                       f'Received: noise_multiplier={fields["noise_multiplier"]}.')
    checks.positive(target_epsilon=target_epsilon)
    checks.one_of(cost.ACCOUNTANTS, accountant=accountant)
    plan = cls(noise_multiplier=1.0, target_delta=target_delta, **fields)
    plan_checks.reachable(plan, target_epsilon)
    before = ledger.Ledger()
    if spent is not None:
      checks.instance((ledger.Ledger, terms.Terms), 'a `tfdp.Ledger` or a `tfdp.PrivacyPlan`',
                      spent=spent)
      before = ledger.of(spent)
    least = before.epsilon(plan.target_delta, accountant)
    if least >= target_epsilon:
      raise ValueError(
          f'`spent` must cost less than `target_epsilon` at delta {plan.target_delta:g}. Received: '
          f'target_epsilon={target_epsilon:g} and a ledger of epsilon {least:.4g}. Take a larger '
          'target, or spend less before.')
    both = lambda sigma: before + dataclasses.replace(plan, noise_multiplier=sigma)
    delta = plan.target_delta - sum(entry.delta for entry in before.entries if entry.steps)
    return dataclasses.replace(plan, noise_multiplier=cost.calibrate(
        lambda sigma: both(sigma).event(), target_epsilon, delta, accountant, both(1.0).relation()))

  def _run(self, steps: Optional[int], rule: Optional[contract.Rule] = None) -> ledger.Ledger:
    """Returns the ledger of this run alone, after `steps` steps."""
    return ledger.Ledger().begin(self, rule).done(self.steps if steps is None else steps)

  def event(self, steps: Optional[int] = None) -> dp_accounting.DpEvent:
    """Returns the dp_accounting DpEvent of the first `steps` steps (default: all)."""
    return self._run(steps).event()

  def epsilon(
      self, steps: Optional[int] = None, accountant: str = 'pld',
      rule: Optional[contract.Rule] = None) -> float:
    """Returns epsilon at `target_delta` after `steps` steps, by default after all.

    Args:
      steps: Steps (rounds) done so far.
      accountant: 'pld' (tight) or 'rdp'.
      rule: The rule of the run. Epsilon is infinite for a rule without a guarantee.
    """
    return self._run(steps, rule).epsilon(accountant=accountant)

  def delta(self, epsilon: float, steps: Optional[int] = None, accountant: str = 'pld') -> float:
    """Returns delta at `epsilon` after `steps` steps."""
    return self._run(steps).delta(epsilon, accountant)

  def check_rule(self, rule: contract.Rule) -> bool:
    """Raises an error for a rule whose releases this plan cannot account for.

    Returns:
      Whether the rule has a guarantee at all; False for the noiseless
      diagnostics, which the optimizer gates.
    """
    return plan_checks.serves(self, rule)

  def index_batches(
      self, size: Optional[int] = None, start_step: int = 0,
      coins: Union[_Path, sampling_seed.SamplingSeed, None] = None) -> Iterator[np.ndarray]:
    """Yields the record indices of steps `start_step`, ..., `steps - 1`, drawn at every call.

    Args:
      size: Number of records. If the plan has a `population_size`, both must be equal.
      start_step: Steps done so far, when a run is resumed.
      coins: Path of a SECRET file with the random choices of one run, for schemes in which the
        steps of a record depend on each other. It is written when the run begins, and read when it
        resumes.
    """
    return sampling_seed.drawn(self, size, start_step, coins)

  def batches(
      self, data: Any, *more: Any, users: Any = None, examples_per_user: Optional[int] = None,
      record: str = 'mean', cache: Optional[str] = None,
      start_step: Union[int, Callable[[], int]] = 0,
      pad_to: Optional[int] = None, coins: Optional[_Path] = None,
      digests_to: Optional[_Path] = None,
      columns: Optional[Sequence[str]] = None, changing: Optional[str] = None,
      augment: Optional[Callable[..., Any]] = None, views: int = 1, strategy: Any = None) -> Any:
    """Returns the run's padded batches as a `tf.data.Dataset`; see `batches.batches.of_plan`.

    If the rows of `data` are dicts, `columns` names what `fit` takes, such as
    `('image', 'label')`.
    """
    if more:
      raise ValueError('`data` must be one argument: a tuple `(x, y)` or `(x, y, sample_weight)`. '
                       f'Received: {1 + len(more)} arguments, as for `fit`.')
    from tfdp_adaptive.batches import batches  # pylint: disable=g-import-not-at-top
    from tfdp_adaptive.batches import sources
    from tfdp_adaptive.independence import disclosures  # pylint: disable=g-import-not-at-top
    data = data if columns is None else sources.columns_of(data, columns)
    if self.public is not None and isinstance(data, tuple):
      sources.check_apart(self.public, data[:1])
    made = batches.of_plan(
        self, data, users=users, examples_per_user=examples_per_user, record=record, cache=cache,
        start_step=start_step, pad_to=pad_to, coins=coins, digests_to=digests_to,
        changing=changing, augment=augment, views=views, strategy=strategy)
    if augment is not None:  # It has been called by now, and would hold what it keeps.
      disclosures.check_alone(augment)
    return made

  def statement(
      self, *, steps: Optional[int] = None, rule: Optional[contract.Rule] = None,
      accountant: str = 'pld') -> str:
    """Returns the privacy statement of the model, in plain text.

    Args:
      steps: Steps done, if fewer than planned.
      rule: The rule of the run, which the statement names.
      accountant: 'pld' (tight) or 'rdp'.
    """
    return statement_lib.of(self._run(steps, rule).card(accountant=accountant, plots=False))

  def to_json(self) -> str:
    """Returns all fields as text without secrets. `from_json` restores them."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.compare}
    scheme = self.sampling
    fields['sampling'] = {
        'kind': type(scheme).__name__,
        'config': {f.name: getattr(scheme, f.name) for f in dataclasses.fields(scheme) if f.init}}
    fields['mechanism'] = mechanisms.to_config(self.mechanism)
    if self.search is None:
      del fields['search']
    else:
      fields['search'] = dataclasses.asdict(self.search)
    return json.dumps({'format': _FORMAT, 'version': _VERSION, 'plan': fields},
                      default=lambda number: number.item())

  @classmethod
  def from_json(cls, text: str) -> 'PrivacyPlan':
    """Returns the plan that `to_json` described, after all checks."""
    content = checks.read_json(text, 'a plan', _FORMAT, _VERSION)
    try:
      fields = {**content['plan']}  # A mapping, or a TypeError.
      kind, config = fields['sampling']['kind'], fields['sampling']['config']
      checks.one_of(list(sampling_lib.SCHEMES), kind=kind)
      fields['mechanism'] = mechanisms.from_config(fields['mechanism'])
      with gate.loading():
        fields['sampling'] = sampling_lib.SCHEMES[kind](**config)
      if fields.get('search') is not None:
        fields['search'] = private_search.Search(**fields['search'])
      return cls(**fields)
    except (KeyError, TypeError) as error:
      raise ValueError('The plan in `text` must be what `to_json` wrote. Received: '
                       f'{str(content.get("plan"))[:60]} ({error!r}).') from error
