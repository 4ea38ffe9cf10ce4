# SPDX-License-Identifier: Apache-2.0
"""Refuses plans with private sizes, and plans that cannot be accounted for."""

from __future__ import annotations

from typing import Optional, Sequence, TYPE_CHECKING
import warnings

import dp_accounting

from tfdp_adaptive import checks
from tfdp_adaptive import errors
from tfdp_adaptive import mechanisms
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import private_search
from tfdp_adaptive.accounting import sampling as sampling_lib
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.batches import tags
from tfdp_adaptive.privacy import entry as entry_lib

if TYPE_CHECKING:
  from tfdp_adaptive import contract


UNITS = ('example', 'user')
_COMMITTED = sampling_seed.COMMITTED.partition('{')[0]


def kinds(plan: terms_lib.Terms) -> None:
  """Checks every field of a plan by itself."""
  checks.positive(batch_size=plan.batch_size)
  if plan.l2_norm_clip is not None:
    checks.positive(l2_norm_clip=plan.l2_norm_clip)
  checks.not_negative(noise_multiplier=plan.noise_multiplier)
  checks.probability(target_delta=plan.target_delta)
  checks.one_of(UNITS, unit=plan.unit)
  terms_lib.check_adjacency(plan.adjacency)
  checks.instance(sampling_lib.Sampling, 'a scheme of `tfdp.sampling`, such as '
                  '`tfdp.sampling.Poisson()`', sampling=plan.sampling)
  checks.instance(mechanisms.Mechanism, 'a mechanism of `tfdp.mechanisms`, such as '
                  '`IndependentGaussian()`', mechanism=plan.mechanism)
  if plan.seed is not None:
    checks.whole(0, seed=plan.seed)
  checks.instance((tuple, list), 'a tuple of noise multipliers', extra_releases=plan.extra_releases)
  for relative_noise in plan.extra_releases:
    checks.positive(extra_releases=relative_noise)


def published(plan: terms_lib.Terms) -> None:
  """Refuses a private number of records, before anything prints it or follows from it."""
  if plan.population_size is not None and not plan.population_is_public:
    raise ValueError(
        'The sampling probability, the batch size and the number of records the data must have '
        'come from `population_size`, so it must be public. Declare it with '
        'population_is_public=True, use adjacency="zero_out", or leave it out and give '
        '`Poisson(sampling_probability=...)`. Received: a population_size, which is not printed '
        f'here, adjacency={plan.adjacency!r}, population_is_public=False.')


def population(plan: terms_lib.Terms) -> None:
  """Checks the number of records, and delta beside it."""
  q = plan.sampling.sampling_probability
  if plan.population_size is None:
    if q is not None:
      _delta(plan, plan.batch_size / q, 'about N')
    return
  checks.whole(population_size=plan.population_size)
  checks.require(plan.batch_size <= plan.population_size, 'be at most the population size',
                 batch_size=plan.batch_size, population_size=plan.population_size)
  _delta(plan, plan.population_size, 'N')


def reachable(plan: terms_lib.Terms, target_epsilon: float) -> None:
  """Refuses a target that a search exceeds even if its runs were trained without data."""
  if plan.search is None:
    return
  least = cost.epsilon(
      plan.search.event(dp_accounting.GaussianDpEvent(1e6)), plan.target_delta)
  if least >= target_epsilon:
    raise ValueError(
        f'The scores and the number of runs alone cost an epsilon of {least:.4g}. Received: '
        f'target_epsilon={target_epsilon:g}, search={plan.search}. Take a larger score_noise '
        '(or public validation data, score_noise=None), fewer runs or a smaller shape.')


def _delta(plan: terms_lib.Terms, size: float, name: str) -> None:
  if plan.target_delta * size >= 1:
    warnings.warn(  # The place is this line, so Python shows it once for all callers.
        f'`target_delta` should be well below 1/N = {1 / size:g} for the {name} = {size:g} '
        'records of the plan: delta is the probability with which nothing at all is promised, '
        'and a delta of 1/N permits publishing a record outright. '
        f'Received: target_delta={plan.target_delta:g}.', errors.Caution, stacklevel=1)


def accountable(plan: terms_lib.Terms) -> None:
  """Checks that adjacency, sampling and mechanism fit together."""
  scheme = type(plan.sampling).__name__
  if plan.adjacency not in plan.sampling.adjacencies:
    raise ValueError(
        f'{scheme} cannot be accounted for under {plan.adjacency!r} adjacency; it can under '
        f'{plan.sampling.adjacencies}. Received: adjacency={plan.adjacency!r}.')
  if plan.mechanism.steps is not None and plan.mechanism.steps < plan.steps:
    raise ValueError(
        f'The mechanism was designed for {plan.mechanism.steps} steps; design it for at least '
        f'as many as the plan has. Received: steps={plan.steps}.')
  if plan.sampling.amplified and not plan.amplified:
    raise ValueError(
        f'{scheme} amplifies privacy only for {plan.sampling.amplifies}'
        f' Received: mechanism={type(plan.mechanism).__name__} with '
        f'bands={plan.mechanism.bands}, sampling={plan.sampling!r}.')
  if plan.extra_releases and (plan.sampling.amplified or plan.mechanism.bands != 1):
    raise ValueError(
        '`extra_releases`, of past clean data, are accounted for with independent noise and '
        'batches that claim no amplification, such as sampling=tfdp.sampling.FixedOrder(). '
        f'Received: sampling={plan.sampling!r}, mechanism={plan.mechanism!r}.')
  claims = plan.amplified
  without_renyi = claims and (plan.adjacency == 'replace' or not plan.sampling.renyi)
  if plan.search is not None:
    checks.instance(private_search.Search, 'a `tfdp.privacy.Search`, such as `Search(runs=10)`',
                    search=plan.search)
    cost.needs_current_library('A private search')
    if without_renyi:
      raise ValueError(
          'A private search is accounted for by Renyi divergences, which are not known of Poisson '
          'sampling under replace, of truncated batches, bins, allocation, users by their '
          'examples, nor of what only draws bound. Received: '
          f'adjacency={plan.adjacency!r}, sampling={plan.sampling!r}.')
  if claims and plan.adjacency == 'replace':
    cost.needs_current_library('Poisson sampling under replace adjacency')
  if plan.sampling.max_batch_size is not None:
    cost.needs_current_library('TruncatedPoisson')


def participation(plan: terms_lib.Terms) -> None:
  """Checks that the sampling keeps the claimed participations."""
  min_sep, max_participations = plan.sampling.participation(plan, plan.steps)
  if plan.min_sep is not None:
    checks.whole(min_sep=plan.min_sep)
    checks.require(plan.min_sep <= min_sep,
                   f'be at most {min_sep}, what {plan.sampling!r} keeps to', min_sep=plan.min_sep)
  if plan.max_participations is not None:
    checks.whole(max_participations=plan.max_participations)
    checks.require(plan.max_participations >= max_participations,
                   f'be at least {max_participations}, what {plan.sampling!r} can reach in '
                   f'{plan.steps} steps', max_participations=plan.max_participations)
  if not plan.amplified:
    cost.sensitivity(plan.mechanism, *plan.participation(),
                     plan.fixed_order)  # Raises where there is no cost.


def shares_bins(entry: entry_lib.Entry, others: Sequence[entry_lib.Entry]) -> bool:
  """Returns whether another run may have had the secret bins of a run.

  Bins are drawn once for the batches of a plan, by a seed of their own, and a step takes those
  batches only whose tags are those of its plan. So runs can share bins only if their plans have
  the same tags, or fixed seeds; or if somebody else drew the batches of one of them.

  Args:
    entry: An entry of a ledger, with a plan.
    others: All others that took steps.
  """
  plan = entry.plan
  return not plan.sampling.drawn_each_step and any(
      not other.plan.sampling.drawn_each_step and (
          tags.coefficients(other.plan) == tags.coefficients(plan)
          or entry.own_sampler or other.own_sampler or entry.has_seed and other.has_seed)
      for other in others if other.plan is not None)


def shares_batches(entry: entry_lib.Entry, others: Sequence[entry_lib.Entry]) -> bool:
  """Returns whether another run of a ledger may have taken steps on the batches of a run.

  Runs with a fixed seed may have the same one, which draws the same records at every step. Runs
  with copies of one file of coins draw them, too.
  """
  run_of = lambda one: one.run.split('.')[0]
  committed = lambda one: {note for note in one.notes if note.startswith(_COMMITTED)}
  return any(run_of(other) in entry.shared or run_of(entry) in other.shared
             or committed(entry) & committed(other)
             or entry.has_seed and other.has_seed and entry.amplified and other.amplified
             for other in others)


def serves(plan: Optional[terms_lib.Terms], rule: contract.Rule) -> bool:
  """Does `PrivacyPlan.check_rule`. Without a plan, returns only whether the rule is private."""
  statistics = [ask.second for ask in rule.asks if ask.second is not None]
  if not all(s.private for s in statistics):
    return False
  if plan is None:
    return True
  past = tuple(s.relative_noise for s in statistics if not s.amplifiable)
  if past != plan.extra_releases:
    raise ValueError(
        f'`extra_releases` of the plan must be {past} for the rule {rule.name!r}'
        + (', which releases statistics of past clean data; sampling does not amplify them, so '
           'the plan also needs sampling=tfdp.sampling.FixedOrder().' if past else '.')
        + f' Received: extra_releases={plan.extra_releases}, sampling={plan.sampling!r}.')
  _, most = plan.participation()
  if any(0 < s.participations < most for s in statistics):
    raise ValueError(
        f'The rule {rule.name!r} must be made for participations={most}, as often as a record '
        f'takes part in this plan. Received: {[s.participations for s in statistics]}.')
  if plan.amplified and plan.adjacency == 'replace' and (
      statistics or len(rule.asks) > 1 or any(ask.side_query is not None for ask in rule.asks)):
    raise ValueError(
        'Poisson sampling under replace adjacency is accounted for one clipped sum per step '
        f'only, and the rule {rule.name!r} releases more. Use adjacency="zero_out", or '
        'sampling=tfdp.sampling.FixedOrder().')
  return True
