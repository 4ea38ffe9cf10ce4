# SPDX-License-Identifier: Apache-2.0
"""`tfdp.recommend`: method, noise and ranges of settings for a task, with reasons.

It looks up what was best on the most similar tasks of `advice.evidence`. It never trains. It reads
public constants and, if given, PUBLIC gradients.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import sampling as sampling_lib
from tfdp_adaptive.advice import advice
from tfdp_adaptive.advice import budget
from tfdp_adaptive.advice import choice
from tfdp_adaptive.advice import evidence
from tfdp_adaptive.advice import task_facts
from tfdp_adaptive.advice import user_level
from tfdp_adaptive.privacy import plan as plan_lib

_FAR = 2.0  # Distance to the nearest task from which on there is no evidence.
_BANDS = 16
_ROBUST = ('DPSGD', 'DPAdam')  # What remains where a step is more noise than signal.
_SAVING = 1.5  # Error of independent noise over that of banded noise, from which on it is worth it.
_EVEN = .5  # Evenness from which on second moments have little to find.
_DEGENERATE = 10.0  # Times the noise floor, from which on epsilon scales most coordinates.
Range = Tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """The result of `recommend`. Print it to read it.

  Attributes:
    method: Name of the optimizer class to start with.
    plan: A `PrivacyPlan` for it: sampling, mechanism, noise and a clip norm.
    settings: Arguments of the class to start with, besides `plan`.
    ranges: `{setting: (lowest, highest)}` to tune within, on public data.
    expected: `{(method, whether its noise is correlated): share}`: which share of the best
      method's gain each choice loses on similar tasks.
    like: `(task, epsilon, distance)` of the most similar evidence.
    reasons: The reasons, as sentences.
    warnings: Likely problems, and unknown facts.
  """

  method: str
  plan: plan_lib.PrivacyPlan
  settings: Dict[str, float]
  ranges: Dict[str, Range]
  expected: Dict[Tuple[str, bool], float]
  like: Tuple[Tuple[str, float, float], ...]
  reasons: Tuple[str, ...]
  warnings: Tuple[str, ...]

  def to_dict(self) -> Dict[str, Any]:
    """JSON-serializable."""
    return dict(
        dataclasses.asdict(dataclasses.replace(self, plan=None)),  # type: ignore[arg-type]
        plan=self.plan.to_json(),
        expected=[[*key, value] for key, value in self.expected.items()])

  def __str__(self) -> str:
    lines = [f'Begin with tfdp.{self.method}, {type(self.plan.sampling).__name__} sampling and '
             f'{type(self.plan.mechanism).__name__} noise.', *self.reasons, '']
    lines += [f'  {name}: {low:.3g} to {high:.3g}' + (
        f', begin with {self.settings[name]:.3g}' if name in self.settings else
        f', begin with {self.plan.l2_norm_clip:.3g}' if name == 'l2_norm_clip' else '')
              for name, (low, high) in self.ranges.items()]
    return '\n'.join(lines + ['', *(f'WARNING: {text}' for text in self.warnings)]).rstrip()


def lost(row: evidence.Row, loss: float) -> float:
  """Returns the share of the best method's gain that a method with this `loss` does not reach."""
  best = min(one.loss for one in row.results)
  return min((loss - best) / max(row.start - best, 1e-12), 1.0)


def _drowned(facts: task_facts.Facts) -> Optional[bool]:
  """Returns whether a step has more noise than signal; None if that is not known."""
  ratio = facts.noise_to_signal
  return None if ratio is None else ratio >= 1


def expected_losses(
    facts: task_facts.Facts, rows: Sequence[evidence.Row]
    ) -> Tuple[Dict[Tuple[str, bool], float], List[Tuple[float, evidence.Row]]]:
  """Returns the mean share of the gain that each choice loses, weighted by similarity; the weights.

  If a step is known to have more noise than signal, only evidence of such tasks counts, and only
  methods that do not need correct second moments are left. Otherwise only other tasks count.
  """
  drowned = _drowned(facts)
  rows = [row for row in rows if drowned in (None, _drowned(task_facts.Facts(*row.facts)))] or rows
  distances = [facts.distance(task_facts.Facts(*row.facts)) for row in rows]
  nearest = min(distances)
  weights = [math.exp(-.5 * (d**2 - nearest**2)) for d in distances]  # The nearest counts 1.
  totals: Dict[Tuple[str, bool], float] = {}
  for weight, row in zip(weights, rows):
    for one in row.results:
      key = one.method, one.correlated
      if drowned and one.method not in _ROBUST:
        continue
      totals[key] = totals.get(key, 0.0) + weight * lost(row, one.loss)
  expected = {key: total / sum(weights) for key, total in totals.items()}
  return expected, sorted(zip(weights, rows), key=lambda pair: -pair[0])


def best_of(facts: task_facts.Facts, expected: Dict[Tuple[str, bool], float]) -> Tuple[str, bool]:
  """Returns (method, whether its noise is correlated) of `expected_losses`.

  Banded noise has smaller sums and larger steps. If it saves much in sums, it is chosen for methods
  without second moments, and for methods that subtract the noise from them. For other methods it
  is chosen only if coordinates are even, since noisier second moments then cost little.
  """
  method, correlated = min(expected, key=lambda key: expected[key])
  spared = method in ('DPSGD', 'DPAdamBC') or (facts.evenness or 0) >= _EVEN
  if facts.correlation >= _SAVING and spared and (method, True) in expected:
    correlated = True
  return method, correlated


def recommend(
    *, population_size: int, batch_size: Optional[float] = None, steps: Optional[int] = None,
    target_epsilon: float, parameters: int, examples: Optional[float] = None,
    target_delta: Optional[float] = None,
    sampling: Optional[sampling_lib.Sampling] = None,
    mechanism: Optional[mechanisms.Mechanism] = None,
    gradients: Optional[npt.ArrayLike] = None, gradient_norm: Optional[float] = None,
    input_sizes: Optional[npt.ArrayLike] = None,
    class_frequencies: Optional[npt.ArrayLike] = None,
    epsilon: Optional[float] = None, examples_per_user: Optional[int] = None,
    likeness: Optional[float] = None, **fields: Any) -> Recommendation:
  """Recommends a private optimizer, noise and settings to start with, with reasons.

  Args:
    population_size: Number N of records (users), public.
    batch_size: Expected batch size B. With None and `examples`, a batch size is proposed.
    steps: Number of steps. With None and `examples`, a number is proposed.
    target_epsilon: Epsilon of the plan.
    parameters: Number m of trainable parameters.
    examples: A budget of examples to process (batch size times steps) instead of both. See
      `batch_and_steps` for the table of choices.
    target_delta: None for the largest power of ten below 1 / N.
    sampling: The sampling scheme, if you cannot choose it; as in `PrivacyPlan`.
    mechanism: The noise, if you cannot choose it.
    gradients: Gradients [n, parameters] of PUBLIC records at the weights that training starts
      from. The choice is better with them.
    gradient_norm: Typical norm of a record's gradient. By default computed from `gradients`.
    input_sizes: Without gradients: PUBLIC root mean squares of the inputs of the last layer, see
      `evenness_of`.
    class_frequencies: Without gradients: PUBLIC shares of the classes.
    epsilon: Adam's stability constant that you want to use. It is checked.
    examples_per_user: With unit='user': the number of examples of a user. The result then says
      whether to sample examples one by one (`PoissonExamples`).
    likeness: PUBLIC mean cosine of the gradients of two examples of one user.
    **fields: Other fields of the plan, such as `adjacency` or `unit`, but no clip norm.

  Returns:
    A `Recommendation`. It costs no privacy if its arguments are public.
  """
  budgeted = ''
  if batch_size is None and steps is None and examples is not None:
    table = budget.batch_and_steps(
        population_size=population_size, target_epsilon=target_epsilon, examples=examples,
        target_delta=target_delta, parameters=parameters, **fields)
    batch_size, steps, budgeted = table.best.batch_size, table.best.steps, table.reason
  elif batch_size is None or steps is None or examples is not None:
    raise ValueError('Give `batch_size` and `steps`, or neither and `examples`, the budget. '
                     f'Received: batch_size={batch_size}, steps={steps}, examples={examples}.')
  checks.whole(population_size=population_size, steps=steps, parameters=parameters)
  checks.positive(batch_size=batch_size, target_epsilon=target_epsilon)
  if epsilon is not None:
    checks.positive(epsilon=epsilon)
  if batch_size > population_size:
    raise ValueError('`batch_size` must be at most `population_size`. '
                     f'Received: {batch_size} of {population_size}.')
  if 'l2_norm_clip' in fields:
    raise ValueError('`l2_norm_clip` is recommended, not given. '
                     f'Received: l2_norm_clip={fields["l2_norm_clip"]}.')
  known: Dict[str, float] = {}
  evenness = task_facts.evenness_of(input_sizes, class_frequencies)
  if evenness is not None:
    if gradients is not None:
      raise ValueError('`gradients` say what `input_sizes` and `class_frequencies` only guess: '
                       'give one or the other. Received: both.')
    known = dict(evenness=evenness)
  if gradients is not None:
    gradients = task_facts.numbers(gradients)
    known = task_facts.facts_of(gradients)
    if gradients.shape[1] != parameters:
      raise ValueError('`gradients` must have one column per parameter. Received: '
                       f'{gradients.shape[1]} columns and parameters={parameters}.')
    if gradient_norm is None:
      gradient_norm = float(np.median(np.linalg.norm(gradients, axis=1)))
  norm = 1.0 if gradient_norm is None else gradient_norm
  checks.positive(gradient_norm=norm)
  if target_delta is None:
    target_delta = budget.default_delta(population_size)
  shared = dict(fields, population_size=population_size, batch_size=batch_size, steps=steps,
                target_epsilon=target_epsilon, target_delta=target_delta, l2_norm_clip=1.0)
  plans = _plans(shared, sampling, mechanism)
  first = plans.get(False) or plans[True]
  errors = {key: _error(plan) for key, plan in plans.items()}
  facts = task_facts.Facts(_noise(first) * math.sqrt(parameters),
                errors[False] / errors[True] if len(errors) == 2 else 1.0,
                batch_size=batch_size, **known)
  expected, weighted = expected_losses(facts, evidence.ROWS)
  unstable = {correlated for correlated, plan in plans.items()
              if _largest_scaled_clip(plan) <= math.sqrt(parameters)}
  expected = {key: value for key, value in expected.items() if key[1] in plans
              and not (key[0] == 'DPAdamSTP' and key[1] in unstable)}
  best = best_of(facts, expected)
  warnings = _warnings(facts, weighted, gradient_norm is None)
  if unstable:
    kinds = ' and with '.join(_kind(correlated) for correlated in sorted(unstable))
    warnings.append(f'Scale-then-privatize with {kinds} noise is left out: its noise would feed '
                    'itself at the clip norm sqrt(m). Larger batches help.')
  result = _described(
      best, plans[best[1]], facts, norm, expected, weighted, parameters, warnings, epsilon)
  compared = '' if examples_per_user is None else user_level.compare(
      population_size=population_size, batch_size=batch_size, steps=steps,
      examples_per_user=examples_per_user, likeness=likeness, target_epsilon=target_epsilon,
      target_delta=target_delta, **fields).reason
  return dataclasses.replace(
      result, reasons=tuple(filter(None, (budgeted, *result.reasons, compared))))


def _noise(plan: plan_lib.PrivacyPlan) -> float:
  """Returns the noise per coordinate of the mean, in clip norms; doubled under replace."""
  return plan.noise_multiplier * contract.record_distance(plan.adjacency) / plan.batch_size


def _error(plan: plan_lib.PrivacyPlan) -> float:
  """Returns the error of prefix sums, in clip norms."""
  return plan.noise_multiplier * plan.mechanism.rmse(plan.steps)


def _largest_scaled_clip(plan: plan_lib.PrivacyPlan) -> float:
  """Returns the clip norm up to which the noise of scale-then-privatize does not feed itself."""
  return advice.STABLE / (_noise(plan) * float(np.max(plan.mechanism.row_norms(plan.steps))))


def _plans(shared: Dict[str, Any], sampling: Optional[sampling_lib.Sampling],
           mechanism: Optional[mechanisms.Mechanism]) -> Dict[bool, plan_lib.PrivacyPlan]:
  """Returns `{whether noise is correlated: plan}` of the possible choices."""
  calibrate = plan_lib.PrivacyPlan.calibrate
  if sampling is not None or mechanism is not None:
    given: Dict[str, Any] = {} if sampling is None else dict(sampling=sampling)
    if mechanism is None:
      mechanism = choice.choose(calibrate(**shared, **given))
    plan = calibrate(**shared, **given, mechanism=mechanism)
    return {not isinstance(mechanism, mechanisms.IndependentGaussian): plan}
  plans = {False: calibrate(**shared)}
  groups = min(_BANDS, int(shared['population_size'] // shared['batch_size']), shared['steps'])
  if groups > 1 and plans[False].adjacency == 'zero_out':
    banded = calibrate(
        **shared, sampling=sampling_lib.CyclicPoisson(cycle=groups),
        mechanism=mechanisms.BandedToeplitz(groups, shared['steps']))
    if _error(banded) < _error(plans[False]):
      plans[True] = banded
  return plans


def _warnings(facts: task_facts.Facts, weighted: Sequence[Tuple[float, evidence.Row]],
              assumed: bool) -> List[str]:
  warnings = []
  if facts.evenness is None:
    warnings.append('No public gradients were given: the choice knows sizes alone, not whether '
                    'coordinates differ, which decides most. `gradients=` takes some; else '
                    '`input_sizes=` and `class_frequencies=` help.')
  elif facts.agreement is None:
    warnings.append('No public gradients were given: how even coordinates are is a guess from '
                    'sizes and frequencies, and how far records agree is not known.')
  if assumed:
    warnings.append('The norm of a record\'s gradient is not known: ranges are for 1. Multiply '
                    'clip norms and epsilons by it (but not those of scaled records).')
  far = facts.distance(task_facts.Facts(*weighted[0][1].facts))
  if far > _FAR:
    warnings.append(f'The nearest task of the evidence, {weighted[0][1].task}, is {far:.1f} widths '
                    'away: this is a guess.')
  return warnings


def _described(
    best: Tuple[str, bool], plan: plan_lib.PrivacyPlan, facts: task_facts.Facts, norm: float,
    expected: Dict[Tuple[str, bool], float], weighted: Sequence[Tuple[float, evidence.Row]],
    parameters: int, warnings: List[str], epsilon: Optional[float]) -> Recommendation:
  method, correlated = best
  # Of the rows that count, in the units of `evidence.Result`.
  used = [one for weight, row in weighted if weight > .1 for one in row.results
          if (one.method, one.correlated) == best]
  rates, clips, floors = (_around([getattr(one, name) for one in used])
                          for name in ('rate', 'clip', 'floor'))
  settings: Dict[str, float] = {}
  ranges: Dict[str, Range] = {}
  if method == 'DPAdamSTP':
    largest = _largest_scaled_clip(plan)
    clip_range = math.sqrt(parameters), min(math.sqrt(parameters * plan.batch_size), largest)
    clip = min(clips[1] * math.sqrt(parameters), largest)
    unit = norm / math.sqrt(parameters)
    ranges['scale_epsilon'] = .003 * unit, .1 * unit
    settings['scale_epsilon'] = floors[1] * unit
  else:
    clip_range, clip = (.1 * norm, norm), clips[1] * norm
  noise_floor = clip * _noise(plan)
  if method == 'DPSGD':
    rates = tuple(rate / clip for rate in rates)  # type: ignore[assignment]
    settings['momentum'] = .9
  elif method != 'DPAdamSTP':
    ranges['epsilon'] = .01 * noise_floor, noise_floor
    settings['epsilon'] = max(floors[1], .01) * noise_floor
  ranges = dict(learning_rate=(rates[0] / 3, rates[2] * 3), l2_norm_clip=clip_range, **ranges)
  settings = dict(learning_rate=rates[1], **settings)
  names = ', '.join(f'{row.task} at epsilon {row.epsilon:g}' for _, row in weighted[:3])
  runner = sorted((value, key) for key, value in expected.items() if key != best)
  reasons = [f'On the tasks most like this one ({names}) it lost {expected[best]:.1%} of the best '
             'method\'s gain in the mean'
             + ('' if not runner else '; next is {}, {} noise, with {:.1%}'.format(
                 runner[0][1][0], _kind(runner[0][1][1]), runner[0][0])) + '.',
             f'Noise of all coordinates over the clip norm is {facts.noise:.3g}.']
  if facts.correlation != 1.0:
    reasons.append(f'Prefix sums of independent noise have {facts.correlation:.2f} times the error '
                   'of banded noise with cyclic sampling'
                   + (', and little is lost by its larger steps.' if correlated else '.'))
  if facts.evenness is not None:
    reasons.append(f'Evenness of the coordinates is {facts.evenness:.2g} (1: all of one size)' + (
        '.' if facts.agreement is None else f', agreement of the records {facts.agreement:.2g}.'))
  if facts.noise_to_signal is not None:
    reasons.append(f'Noise over signal of a step, in the best geometry, is '
                   f'{facts.noise_to_signal:.2g}' + (
                       ': second moments are mostly noise, so methods that scale or correct by '
                       'them are left out.' if _drowned(facts) else '.'))
  if epsilon is not None and method in ('DPAdam', 'DPAdamBC') and (
      epsilon > _DEGENERATE * noise_floor):
    warnings.append(f'epsilon={epsilon:g} is {epsilon / noise_floor:.3g} times the noise floor '
                    f'{noise_floor:.3g}: second moments drop out, and this is DP-SGD with '
                    f'momentum and learning rate {rates[1] / epsilon:.3g}.')
  return Recommendation(
      method, dataclasses.replace(plan, l2_norm_clip=clip), settings, ranges, expected,
      tuple((row.task, row.epsilon, facts.distance(task_facts.Facts(*row.facts)))
            for _, row in weighted[:3]), tuple(reasons), tuple(warnings))


def _kind(correlated: bool) -> str:
  return 'correlated' if correlated else 'independent'


def _around(values: Iterable[float]) -> Tuple[float, float, float]:
  """Returns (least, geometric mean, largest)."""
  listed = [max(value, 1e-12) for value in values]
  return min(listed), math.exp(sum(map(math.log, listed)) / len(listed)), max(listed)
