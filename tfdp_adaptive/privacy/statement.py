# SPDX-License-Identifier: Apache-2.0
"""The privacy statement: a card in sentences, so that the two cannot differ.

It follows the reporting list of "How to DP-fy ML" (arXiv 2303.00654, section 5.3):
setting and unit, what is covered, adjacency, sampling, mechanism, accountant,
hyperparameters, and what the guarantee leaves out. It holds no secret.
"""

from __future__ import annotations

import decimal
from typing import Dict, Sequence, Tuple, TYPE_CHECKING

from tfdp_adaptive.accounting import cost
from tfdp_adaptive.accounting import monte_carlo
from tfdp_adaptive.accounting import private_search
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import entry as entry_lib
from tfdp_adaptive.privacy import plan_checks

if TYPE_CHECKING:
  from tfdp_adaptive import contract
  from tfdp_adaptive import terms

UNITS = {'example': 'one training example', 'user': 'one user, with all their data'}
_ADJACENCY = {
    'zero_out': 'one {unit} has a record, or an empty one in its place (zero-out)',
    'add_remove': 'one {unit} is added or removed (add-or-remove)',
    'replace': 'one {unit}\'s record is replaced by any other (replace-one)',
}
_LEFT_OUT = (
    'the choice of hyperparameters, if other settings were tried on the same data',
    'exact metrics and losses computed on the training data, and early stopping by them',
    'vocabulary, normalisation and other preprocessing that looked at the data',
    'anything else computed from the same records; training that left no record on these weights, '
    'such as that of values which were copied by hand (get_weights, set_weights, assign)',
)
COVERED = (
    'Covered: the final weights, all intermediate weights, and every noised statistic the '
    'optimizer released, together. '
    'The noise state, random keys and per-example diagnostics are not released and must stay '
    'secret.')
_TRUST = {'central': 'the central model of a trusted curator',
          'federated': 'the central model of a trusted server',
          'silo': 'the model of a silo, which keeps its records and trusts nobody else'}


def of(card: card_lib.Card) -> str:
  """Returns the plain text of a card."""
  runs = steps_taken(card)
  lines = [guarantee(card)]
  if len(runs) == 1 and runs[0].plan is not None:
    texts = described(runs[0])
    lines += [f'Unit and adjacency: {neighbours(card)} {texts.pop("Records")}',
              f'Sampling: {texts.pop("Sampling")}', f'Mechanism: {texts.pop("Mechanism")}',
              f'Accounting: {accounting(card, runs[0])}', *texts.values()]
  else:
    lines += [_one_of_many(runs, number) for number in range(1, len(runs) + 1)]
    lines.append('Accounting: ' + (_versions(card) + 'of all runs together.' if runs else
                                   'no release.'))
  if runs:
    lines.append(COVERED)
  lines.append('Not covered: ' + '; '.join(not_covered(card)) + '.')
  if runs:
    lines.append('Caveats: ' + caveats(card))
  lines += card.notes
  lines += [f'In the words of whoever trained the model, on {own.about}: {own.text}'
            for own in card.words]
  return '\n\n'.join(lines) + '\n'


def steps_taken(card: card_lib.Card) -> Tuple[entry_lib.Entry, ...]:
  """Returns the runs with a cost, or the planned run if there are none."""
  return tuple(run for run in card.runs if run.steps) or card.runs[-1:]


def guarantee(card: card_lib.Card) -> str:
  """Returns the guarantee in numbers and in words."""
  runs = steps_taken(card)
  if card.epsilon is None and all(run.guaranteed for run in runs):
    return f'NO PRIVACY GUARANTEE: no epsilon of all runs together can be stated. {card.reason}'
  if card.epsilon is None:
    return (f'NO PRIVACY GUARANTEE: {card.reason}. Epsilon is infinite, whatever noise was added '
            'elsewhere.')
  if not runs or runs[-1].plan is None:
    return 'Guarantee: no step has been taken, and nothing of the data is in the weights.'
  pair = lambda epsilon: f'({rounded_up(epsilon)}, {card.delta:g})'
  last = runs[-1]
  text = f'Guarantee: {pair(card.epsilon)}-differential privacy '
  if len(runs) > 1:
    text += (f'of all {len(runs)} run(s) together, which are counted as if every '
             'record had been in each of them')
  elif last.steps == last.plan.steps:
    text += f'after all {last.steps} steps'
  else:
    text += f'after {last.steps} of the {last.plan.steps} planned steps'
  if last.steps < last.plan.steps and card.planned_epsilon is not None:
    text += f'; {pair(card.planned_epsilon)} at the end'
  text += f'. It holds at the level of {UNITS[card.unit]}, in {_TRUST[card.trust]}.'
  if len(runs) > 1:
    text += f' {neighbours(card)}'
  return text + _in_words(card) + _large_delta(card)


def neighbours(card: card_lib.Card) -> str:
  """Returns the unit of privacy, and which data sets are neighbors."""
  return (f'The unit of privacy is {UNITS[card.unit]}. Neighbouring data sets differ in that '
          f'{_ADJACENCY[card.adjacency].format(unit=card.unit)}.')


def not_covered(card: card_lib.Card) -> Sequence[str]:
  """Returns what epsilon does not cover. A search covers its own choices."""
  return _LEFT_OUT[any(plan.search is not None for plan in card.plans):]


def _large_delta(card: card_lib.Card) -> str:
  """Returns a warning if delta is so large that it promises nothing to some record."""
  most = max((plan.population_size or 0 for plan in card.plans), default=0)
  if card.delta * most < 1:
    return ''
  return (f' WARNING: delta is not below 1/{most}, one over the number of records; such a delta '
          'permits publishing a record outright.')


def _in_words(card: card_lib.Card) -> str:
  """Explains the guarantee by an attacker's rates; returns nothing before the first step."""
  if not card.epsilon or card.mu is None:
    return ''
  return (f' In words: an attacker who knows everything except whether one {card.unit} was used '
          f'detects it with probability at most {percent(card.rate):.4g}% at a 1% false-positive '
          'rate. At this epsilon and delta the protection is that of one Gaussian mechanism with '
          f'mu = {rounded_up(card.mu)}.')


def percent(rate: float) -> float:
  """Returns a rate in percent, rounded up."""
  return min(100.0, float(rounded_up(100 * rate)))


def _one_of_many(runs: Sequence[entry_lib.Entry], number: int) -> str:
  run = runs[number - 1]
  plan = run.plan
  text = f'Run {number} of {len(runs)}: {run.steps} steps'
  if plan is None:
    return (f'{text} without a plan: how its batches were drawn, and what they cost, is not '
            'known.')
  return ' '.join([f'{text} of {plan.steps} planned.', *described(run).values(),
                   added_up(run, [*runs[:number - 1], *runs[number:]])]).strip()


def added_up(run: entry_lib.Entry, others: Sequence[entry_lib.Entry]) -> str:
  """Describes a run that costs more together with others than alone."""
  if not run.amplified:
    return ''
  if plan_checks.shares_bins(run, others):
    return ('Another run may have had the same secret bins, so this run is added up without '
            'amplification by sampling.')
  if plan_checks.shares_batches(run, others):
    return ('Another run may have taken its steps on the same batches, so this run is added up '
            'without amplification by sampling.')
  if not run.plan.sampling.renyi and any(
      private_search.selects(cost.event(other.plan, other.steps)) for other in others):
    return ('Another run is accounted for by Renyi divergences, which are not known of this '
            'sampling, so this run is added up without amplification by it.')
  if isinstance(cost.event(run.plan, run.steps), monte_carlo.MonteCarloDpEvent):
    return ('Bounds from draws do not add up, so this run is added up by a bound without draws, '
            'which is larger.')
  return ''


def described(run: entry_lib.Entry) -> Dict[str, str]:
  """Returns the texts on a run with a plan, by name, for statements, pages and Markdown."""
  plan = run.plan
  found = {
      'Records': 'The number of records is not used and stays private.'
                 if plan.population_size is None else
                 f'The number of records, {plan.population_size}, is treated as public, and so are '
                 'the constants derived from it.',
      'Sampling': plan.sampling.describe(plan),
      'Mechanism': _mechanism(run)}
  if plan.search is not None:
    found['Private search'] = plan.search.describe()
  if run.examples_per_user:
    found['Users'] = (
        f'A record was a user: a step took at most {run.examples_per_user} example(s) of each, '
        'and what they gave together was clipped once. The guarantee does not depend on how many '
        'examples a user has, provided that every one of them bore the id of its user.')
  if run.own_sampler:
    found['Own sampling'] = (
        'THE BATCHES WERE NOT DRAWN BY THE PLAN. Whoever trained the model says of them: '
        f'{run.own_sampler!r}. The guarantee above holds only if this is the sampling it '
        'describes; nothing checked it.')
  return found


def rounded_up(epsilon: float) -> str:
  """Returns four digits of a number, rounded up."""
  four_digits = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
  return f'{four_digits.create_decimal(repr(float(epsilon))):f}'


def _mechanism(run: entry_lib.Entry) -> str:
  """Describes the noise on a sum of clipped records, and the rule."""
  plan = run.plan
  clip, unit = ('not fixed', ' clip norms') if plan.l2_norm_clip is None else (
      f'{plan.l2_norm_clip:g}', '')
  text = (f'{plan.mechanism!r}, noise multiplier {plan.noise_multiplier:.6g}, clip norm {clip}: '
          f'noise of standard deviation {plan.noise_stddev:.6g}{unit} '
          'before correlation on the sum of clipped records, ')
  if plan.adjacency == 'replace':
    text += 'twice the clip norm per unit of noise multiplier because of replacement, '
  text += (f'divided by the constant {plan.batch_size:g}, the expected batch size; '
           f'{plan.steps} steps planned.')
  text += ''.join(f' {detail}' for detail in run.clipping)
  if run.engines:
    text += f' Gradients of single examples were clipped by: {", ".join(run.engines)}.'
  if run.rule:
    text += f' Update rule: {run.rule}, by post-processing of the noised releases.'
  return text


def clipping(rule: contract.Rule) -> Tuple[str, ...]:
  """Returns sentences about how a rule clips, where that is not the usual way."""
  found = []
  weights = sorted({str(ask.weight) for ask in rule.asks if not ask.weight.passes})
  if weights:
    found.append(f'A record is weighted by a function of its norm, {", ".join(weights)}, '
                 'which leaves it at most the clip norm.')
  if any(ask.groups for ask in rule.asks):
    found.append('Groups of variables are clipped by themselves; the squares of their clip norms '
                 'add up to that of the clip norm.')
  if any(ask.side_query is not None for ask in rule.asks):
    found.append('The clip norm given is the first; it follows noised statistics of the norms of '
                 'records, which are part of the same release and of its cost.')
  return tuple(found)


def _versions(card: card_lib.Card) -> str:
  found = dict(card.versions)
  return (f'tfdp_adaptive {found.get("tfdp_adaptive", "?")}, dp_accounting '
          f'{found.get("dp-accounting", "?")}, ')


def accounting(card: card_lib.Card, run: entry_lib.Entry) -> str:
  """Describes how epsilon of a run was computed, and its assumptions."""
  plan, steps, text = run.plan, run.steps, _versions(card)
  if not steps:
    return text + 'of no release: no step has been taken.'
  if not plan.noise_multiplier:
    return text + 'of releases without noise.'
  event = cost.event(plan, steps)
  draws = event.draws if isinstance(event, monte_carlo.MonteCarloDpEvent) else 0
  selects = private_search.selects(event)
  renyi = card.accountant == 'rdp' or selects
  method = ('Renyi differential privacy' if renyi else
            f'{draws} draws of the privacy loss' if run.amplified and draws else
            'privacy loss distributions' if run.amplified else 'the exact Gaussian trade-off')
  if run.amplified:
    luck = (f' Epsilon and delta are upper bounds of confidence 1 - {monte_carlo.BETA:g}: the '
            "guarantee holds unless the accountant's own draws were that unlucky." if draws else '')
    return text + (
        f'{method}, of {event}.{luck} Amplification by sampling is claimed; it holds '
        'only if the batches were the ones this plan drew, and if nobody learns who was in them.')
  min_sep, participations = run.participation
  several = plan.fixed_order and participations > 1
  extra = (f' {len(plan.extra_releases)} further statistic(s) of all records so far are released '
           'at every step and counted in full.' if plan.extra_releases else '')
  return text + (
      f'{method}, of one Gaussian mechanism{" in each run" if selects else ""}. '
      f'A record takes part at most {participations} times, '
      f'{"a multiple of" if several else "at least"} {min_sep} steps apart: sensitivity '
      f'{run.sensitivity:.6g} clip norms, effective noise multiplier '
      f'{plan.noise_multiplier / run.sensitivity:.6g}. No amplification is claimed.{extra}')


def caveats(card: card_lib.Card) -> str:
  """Attacks that are outside of the guarantee."""
  text = ('noise and coins come from Philox and PCG64 generators keyed by the '
          'operating system\'s entropy; they are not cryptographic, and noise is added in '
          'floating point. Attacks on either are outside the guarantee.')
  if any(run.seeded_batches for run in card.runs):
    text += (' A FIXED SEED was used for sampling: whoever knows it knows the batches, so this '
             'run is a test and the guarantee above does not hold against them.')
  return text


def table(plan: terms.Terms, epsilon: float) -> str:
  """Returns the fields of a plan and its epsilon, one a line."""
  size = 'not given' if plan.population_size is None else f'{plan.population_size:,}'
  rows = {
      'unit': f'one {plan.unit}, {plan.adjacency} adjacency',
      'population size': size,
      'batch size': f'{plan.batch_size:,}',
      'steps': f'{plan.steps:,}',
      'sampling': type(plan.sampling).__name__,
      'noise': type(plan.mechanism).__name__,
      'noise multiplier': f'{plan.noise_multiplier:.4g}',
      'clip norm': 'not fixed' if plan.l2_norm_clip is None else f'{plan.l2_norm_clip:g}',
      'epsilon': f'{rounded_up(epsilon)} at delta {plan.target_delta:g}'}
  if plan.search is not None:
    rows['search'] = f'the best of {plan.search.runs:g} expected runs'
  return '\n'.join(f'{name:18}{value}' for name, value in rows.items())
