# SPDX-License-Identifier: Apache-2.0
"""The privacy statement: what can honestly be said of a trained model.

Follows the reporting list of "How to DP-fy ML" (arXiv 2303.00654, section 5.3):
setting and unit, what is covered, adjacency, sampling, mechanism, accountant,
hyperparameters, and what the guarantee leaves out. Holds no secret.
"""

from __future__ import annotations

import decimal
from importlib import metadata
from typing import Any, Callable, Optional, Sequence, TYPE_CHECKING

from tfdp_adaptive import contract
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive import version
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import meaning
from tfdp_adaptive.accounting import monte_carlo
from tfdp_adaptive.accounting import private_search
from tfdp_adaptive.privacy import plan_checks

if TYPE_CHECKING:  # It imports this.
  from tfdp_adaptive.privacy import ledger as ledger_lib

_UNITS = {
    'example': 'one training example',
    'user': 'one user, with all their data',
}
_ADJACENCY = {
    'zero_out': 'one {unit} has a record, or an empty one in its place (zero-out)',
    'add_remove': 'one {unit} is added or removed (add-or-remove)',
    'replace': 'one {unit}\'s record is replaced by any other (replace-one)',
}
_LEFT_OUT = (
    'the choice of hyperparameters, if other settings were tried on the same data',
    'exact metrics and losses computed on the training data, and early stopping by them',
    'vocabulary, normalisation and other preprocessing that looked at the data',
    'anything else computed from the same records; guarantees of several runs add up',
)
_COVERED = (
    'Covered: the final weights, all intermediate weights, and every noised statistic the '
    'optimizer released, together. '
    'The noise state, random keys and per-example diagnostics are not released and must stay '
    'secret.')


def statement(
    plan: terms_lib.Terms, steps: int, rule: Optional[contract.Rule], accountant: str) -> str:
  """Plain text; `steps` of the plan's steps have been taken, with `rule`."""
  private = rule is None or plan_checks.serves(plan, rule)
  lines = [_guarantee(plan, steps, private, rule, accountant)]
  lines.append(
      f'Unit and adjacency: the unit of privacy is {_UNITS[plan.unit]}. Neighbouring data sets '
      f'differ in that {_ADJACENCY[plan.adjacency].format(unit=plan.unit)}. ' + _population(plan))
  lines.append('Sampling: ' + plan.sampling.describe(plan))
  lines.append('Mechanism: ' + _mechanism(plan, rule))
  lines.append('Accounting: ' + _accounting(plan, steps, accountant))
  if plan.search is not None:
    lines.append(plan.search.describe())
  lines.append(_COVERED)
  lines.append('Not covered: ' + '; '.join(_LEFT_OUT[plan.search is not None:]) + '.')
  lines.append(_caveats([plan]))
  return '\n\n'.join(lines) + '\n'


def _guarantee(
    plan: terms_lib.Terms, steps: int, private: bool, rule: Optional[contract.Rule],
    accountant: str) -> str:
  if rule is not None and not private:
    return (f'NO PRIVACY GUARANTEE: the rule {rule.name!r} uses a statistic of the data without '
            'noise. Epsilon is infinite, whatever noise was added elsewhere.')
  if not plan.noise_multiplier:
    return ('NO PRIVACY GUARANTEE: the noise multiplier is 0 and epsilon is infinite. This is an '
            'experiment, not a private model.')
  done = (f'after {steps} of the {plan.steps} planned steps' if steps < plan.steps
          else f'after all {steps} steps')
  event, relation = cost.event(plan, steps), cost.relation(plan)
  epsilon = cost.epsilon(event, plan.target_delta, accountant, relation)
  pair = lambda epsilon: f'({rounded_up(epsilon)}, {plan.target_delta:g})'
  text = f'Guarantee: {pair(epsilon)}-differential privacy {done}'
  if steps < plan.steps:
    whole = cost.epsilon(
        cost.event(plan, plan.steps), plan.target_delta, accountant, relation)
    text += f'; {pair(whole)} at the end'
  text += (f'. It holds at the level of {_UNITS[plan.unit]}, in the central model of a trusted '
           'curator.')
  text += _in_words(
      plan, epsilon, plan.target_delta,
      lambda epsilon: cost.delta(event, epsilon, accountant, relation))
  return text + _large_delta(plan.target_delta, [plan])


def _large_delta(delta: float, plans: Sequence[Any]) -> str:
  """A warning, where delta promises nothing of somebody."""
  most = max((plan.population_size or 0 for plan in plans), default=0)
  if delta * most < 1:
    return ''
  return (f' WARNING: delta is not below 1/{most}, one over the number of records; such a delta '
          'permits publishing a record outright.')


def _in_words(
    plan: terms_lib.Terms, epsilon: float, delta: float,
    delta_of: Callable[[float], float]) -> str:
  """What it means to people; nothing before the first step and without a bound."""
  if not epsilon or epsilon == float('inf'):
    return ''
  rate = meaning.true_positive_rate(delta_of, epsilon)
  percent = min(100.0, float(rounded_up(100 * rate)))
  mu = meaning.gaussian_mu(epsilon, delta)
  return (f' In words: whoever knows everything but whether one {plan.unit} took part, and may '
          'suspect 1% of those who did not, finds at most '
          f'{percent:.4g}% of those who did (1% by guessing). At this epsilon and delta it '
          f'protects like one Gaussian mechanism of mu = {rounded_up(mu)}.')


def of_ledger(ledger: ledger_lib.Ledger, target_delta: Optional[float], accountant: str) -> str:
  """Plain text of all runs of the same weights together."""
  entries = [entry for entry in ledger.entries if entry.steps]
  first = entries[0].plan if entries else None
  if first is not None and len(entries) == 1 and entries[0].guaranteed and target_delta is None:
    return (statement(first, entries[0].steps, None, accountant)
            + of_users(entries[0].examples_per_user) + own_sampling(entries[0].own_sampler))
  lines = [_guarantee_of_ledger(ledger, entries, target_delta, accountant)]
  for number, entry in enumerate(entries, 1):
    text = f'Run {number} of {len(entries)}: {entry.steps} steps'
    if entry.plan is None:
      lines.append(text + ' without a plan: how its batches were drawn, and what they cost, is '
                          'not known.')
      continue
    plan = entry.plan
    lines.append(
        f'{text} of {plan.steps} planned. {_population(plan)} {plan.sampling.describe(plan)} '
        + _mechanism(plan, None) + (f' Update rule: {entry.rule}.' if entry.rule else '')
        + (f' {plan.search.describe()}' if plan.search is not None else '')
        + of_users(entry.examples_per_user).rstrip() + own_sampling(entry.own_sampler).rstrip())
  lines.append(
      'Accounting: ' + ('no release.' if not entries else
                        f'dp_accounting {metadata.version("dp-accounting")}, '
                        f'of {ledger.event()} under {ledger.relation().name}.'))
  if entries:
    lines.append(_COVERED)
  lines.append('Not covered: ' + '; '.join(_LEFT_OUT) + '.')
  if entries:
    lines.append(_caveats([entry.plan for entry in entries if entry.plan is not None]))
  return '\n\n'.join(lines) + '\n'


def of_users(examples: int) -> str:
  """What to say of a run whose records were users; nothing if it had none."""
  if not examples:
    return ''
  return (f'\nA record was a user: a step took at most {examples} example(s) of each, and what '
          'they gave together was clipped once. The guarantee does not depend on how many '
          'examples a user has, provided that every one of them bore the id of its user.\n')


def own_sampling(words: str) -> str:
  """What to say of batches that the plan did not draw; nothing if it did."""
  if not words:
    return ''
  return ('\nTHE BATCHES WERE NOT DRAWN BY THE PLAN. Whoever trained the model says of them: '
          f'{words!r}. The guarantee above holds only if this is the sampling it describes; '
          'nothing checked it.\n')


def _guarantee_of_ledger(
    ledger: ledger_lib.Ledger, entries: Sequence[ledger_lib.Entry], target_delta: Optional[float],
    accountant: str) -> str:
  if not entries:
    return 'Guarantee: no step has been taken, and nothing of the data is in the weights.'
  for number, entry in enumerate(entries, 1):
    if not entry.guaranteed:
      reason = ('had no plan' if entry.plan is None else
                'had a noise multiplier of 0' if entry.private else
                f'used a statistic of the data without noise ({entry.rule})')
      return (f'NO PRIVACY GUARANTEE: run {number} of {len(entries)} on these weights {reason}. '
              'Epsilon is infinite, whatever the other runs did.')
  plan: Any = entries[0].plan  # Without one, nothing is guaranteed.
  delta: Any = ledger.target_delta if target_delta is None else target_delta
  return (f'Guarantee: ({rounded_up(ledger.epsilon(delta, accountant))}, {delta:g})-differential '
          f'privacy of all {len(entries)} run(s) on these weights together, which are counted as '
          'if every record had been in each of them. It holds at the level of '
          f'{_UNITS[plan.unit]}; neighbouring data sets differ in that '
          f'{_ADJACENCY[plan.adjacency].format(unit=plan.unit)}; in the central model of a '
          'trusted curator.' + _in_words(
              plan, ledger.epsilon(delta, accountant), delta,
              lambda epsilon: ledger.delta(epsilon, accountant))
          + _large_delta(delta, [entry.plan for entry in entries]))


def rounded_up(epsilon: float) -> str:
  """Four digits, never below the truth."""
  four_digits = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
  return f'{four_digits.create_decimal(repr(float(epsilon))):f}'


def _population(plan: terms_lib.Terms) -> str:
  if plan.population_size is None:
    return 'The number of records is not used and stays private.'
  return (f'The number of records, {plan.population_size}, is treated as public, and so are the '
          'constants derived from it.')


def _mechanism(plan: terms_lib.Terms, rule: Optional[contract.Rule]) -> str:
  text = (f'{plan.mechanism!r}, noise multiplier {plan.noise_multiplier:.6g}, clip norm '
          f'{plan.l2_norm_clip:g}: noise of standard deviation {cost.noise_stddev(plan):.6g} '
          'before correlation on the sum of clipped records, ')
  if plan.adjacency == 'replace':
    text += 'twice the clip norm per unit of noise multiplier because of replacement, '
  text += (f'divided by the constant {plan.batch_size:g}, the expected batch size; '
           f'{plan.steps} steps planned.')
  if plan.mechanism.rounding is not None:
    text += (' Releases are rounded to a public grid, which adds at most the share '
             f'{plan.mechanism.rounding:g} to what a record moves them and is accounted for, and '
             'noise on it is drawn exactly, from the discrete Gaussian.')
  if rule is not None:
    weights = sorted({str(tuple(ask.weight)) for ask in rule.asks if ask.weight.kind != 'hard'})
    if weights:
      text += (f' A record is weighted by a function of its norm, {", ".join(weights)}, '
               'which leaves it at most the clip norm.')
    if any(ask.groups for ask in rule.asks):
      text += (' Groups of variables are clipped by themselves; the squares of their clip norms '
               'add up to that of the clip norm.')
    if any(ask.rider is not None for ask in rule.asks):
      text += (' The clip norm given is the first; it follows noised statistics of the norms of '
               'records, which are part of the same release and of its cost.')
    text += f' Update rule: {rule.name}, by post-processing of the noised releases.'
  return text


def _accounting(plan: terms_lib.Terms, steps: int, accountant: str) -> str:
  text = f'tfdp_adaptive {version.__version__}, dp_accounting {metadata.version("dp-accounting")}, '
  if not steps:
    return text + 'of no release: no step has been taken.'
  event, amplified = cost.event(plan, steps), cost.claims_amplification(plan)
  draws = getattr(plan.sampling, 'draws', 0)
  selects = private_search.selects(event)
  renyi = accountant == 'rdp' or cost.only_renyi(event)
  method = ('Renyi differential privacy' if renyi else
            f'{draws} draws of the privacy loss' if amplified and draws else
            'privacy loss distributions' if amplified else 'the exact Gaussian trade-off')
  if amplified:
    luck = (f' Epsilon and delta are upper bounds of confidence 1 - {monte_carlo.BETA:g}: the '
            "guarantee holds unless the accountant's own draws were that unlucky." if draws else '')
    return text + (
        f'{method}, of {event}.{luck} Amplification by sampling is claimed; it holds '
        'only if the batches were the ones this plan drew, and if nobody learns who was in them.')
  min_sep, count = cost.participation(plan, steps)
  sensitivity = cost.total_sensitivity(plan, steps)
  kind = '' if plan.mechanism.rounding is None else 'discrete '
  distance = 'a multiple of' if cost.fixed_order(plan) and count > 1 else 'at least'
  extra = (f' {len(plan.extra_releases)} further statistic(s) of all records so far are released '
           'at every step and counted in full.' if plan.extra_releases else '')
  return text + (
      f'{method}, of one {kind}Gaussian mechanism{" in each run" if selects else ""}. '
      f'A record takes part at most {count} times, {distance} '
      f'{min_sep} steps apart: sensitivity {sensitivity:.6g} clip norms, effective noise '
      f'multiplier {plan.noise_multiplier / sensitivity:.6g}. No amplification is claimed.{extra}')


def _caveats(plans: Sequence[Any]) -> str:
  rounded = [getattr(plan, 'mechanism', None) for plan in plans]
  if rounded and all(getattr(one, 'rounding', None) is not None for one in rounded):
    text = ('Caveats: noise comes from the operating system\'s generator and is added in integers; '
            'records are clipped and summed in floating point, and coins of sampling come from a '
            'PCG64 generator keyed by the system, which is not cryptographic. Attacks on these '
            'two are outside the guarantee.')
  else:
    text = ('Caveats: noise and coins come from Philox and PCG64 generators keyed by the '
            'operating system\'s entropy; they are not cryptographic, and noise is added in '
            'floating point. Attacks on either are outside the guarantee.')
  if any(getattr(plan, 'seed', None) is not None for plan in plans):
    text += (' A FIXED SEED was used for sampling: whoever knows it knows the batches, so this '
             'run is a test and the guarantee above does not hold against them.')
  return text
