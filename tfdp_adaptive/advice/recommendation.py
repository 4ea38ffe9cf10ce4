# SPDX-License-Identifier: Apache-2.0
"""`tfdp.recommend`: method, noise and settings for a task, tried in simulation on public gradients.

It trains nothing but the model of `advice.trial`. It reads public constants and, if given, PUBLIC
gradients.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from tfdp_adaptive import checks
from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import sampling as sampling_lib
from tfdp_adaptive.advice import best
from tfdp_adaptive.advice import budget
from tfdp_adaptive.advice import choice
from tfdp_adaptive.advice import methods
from tfdp_adaptive.advice import trial
from tfdp_adaptive.advice import user_level
from tfdp_adaptive.privacy import plan as plan_lib

_BANDS = (2, 4, 8, 16, 32)
_COORDINATES = 2048  # Of a simulation at most; so many are drawn from more.
_FEWEST = 20  # Public records that a simulation can say something about.
_LOSES_LEAST = 'DPAdamSTP'  # Over many tasks: it is taken where it is level with the best.
_BLIND_RATE = .17  # Times 1 / sqrt(T), without public gradients.


class Tried(NamedTuple):
  """A method, at the setting chosen for it.

  Attributes:
    method: Name of the class.
    noise: 'independent', or the kind of the mechanism.
    loss: Mean loss of the public records after training.
    more: By how much that is above the loss of the recommended method. It may be less than
      zero, by a standard error at most.
    interval: Half the 95% interval of `more`, over records.
  """

  method: str
  noise: str
  loss: float
  more: float
  interval: float


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """The result of `recommend`. Print it to read it.

  Attributes:
    method: Name of the optimizer class.
    plan: A `PrivacyPlan` for it: sampling, mechanism, noise and a clip norm.
    settings: Arguments of the class, besides `plan`.
    ranges: `{setting: (lowest, highest)}` to tune within, if you tune.
    tried: What was tried, the recommended method first, then by loss; empty without public
      gradients.
    start: Mean loss of the public records before training; None without.
    reasons: Sentences that say what was done and how sure the result is.
  """

  method: str
  plan: plan_lib.PrivacyPlan
  settings: Dict[str, Any]
  ranges: Dict[str, methods.Range]
  tried: Tuple[Tried, ...]
  start: Optional[float]
  reasons: Tuple[str, ...]

  def to_dict(self) -> Dict[str, Any]:
    """JSON-serializable; the learning rate is the initial one."""
    rate = self.settings['learning_rate'].initial_learning_rate
    return dict(vars(self), plan=self.plan.to_json(),
                settings=dict(self.settings, learning_rate=rate),
                tried=[one._asdict() for one in self.tried])

  def __str__(self) -> str:
    rate = self.settings['learning_rate']
    sampling = repr(self.plan.sampling).replace('(sampling_probability=None)', '')
    others = ''.join(f', {name}={value:.3g}' for name, value in self.settings.items()
                     if name != 'learning_rate')
    lines = [
        f'Use tfdp.{self.method} with {_kind(self.plan.mechanism)} noise, '
        f'{sampling} sampling and clip norm {self.plan.l2_norm_clip:.3g}:', '',
        '  schedule = keras.optimizers.schedules.PolynomialDecay('
        f'{rate.initial_learning_rate:.3g}, {self.plan.steps}, 0.0)',
        f'  tfdp.{self.method}(schedule, plan=found.plan{others})', '', *self.reasons]
    if self.tried:
      lines += ['', f'{"method":10} {"noise":17} {"loss":>8}']
      lines += [f'{one.method:10} {one.noise:17} {one.loss:8.4g}' + (
          f'  {one.more:+.3g} +- {one.interval:.2g}' if i else '')
                for i, one in enumerate(self.tried)]
    return '\n'.join(lines)


def recommend(
    *, population_size: int, batch_size: Optional[float] = None, steps: Optional[int] = None,
    target_epsilon: float, parameters: int, examples: Optional[float] = None,
    seconds: Optional[float] = None, step_seconds: Optional[Tuple[float, float]] = None,
    largest_batch: Optional[int] = None, target_delta: Optional[float] = None,
    sampling: Optional[sampling_lib.Sampling] = None,
    mechanism: Optional[mechanisms.Mechanism] = None,
    gradients: Optional[npt.ArrayLike] = None, losses: Optional[npt.ArrayLike] = None,
    squared: bool = False, look: Optional[Callable[..., Any]] = None,
    gradient_norm: Optional[float] = None, examples_per_user: Optional[int] = None,
    likeness: Optional[float] = None, **fields: Any) -> Recommendation:
  """Recommends a private optimizer, noise and settings, with reasons.

  With public gradients, DP-SGD, DP-Adam and scale-then-privatize are trained in simulation, each
  with independent noise and with banded noise where that has less error, over 30 settings. See
  `advice.trial` for the model. Half of the records trains it, and both halves judge it. A setting
  is judged together with three times its learning rate, and proposed only if the simulated loss of
  records that were not trained on is below the loss before training. With `look`, the best setting
  of each method then trains the model itself on half of the public records, also at smaller rates,
  and at larger rates and clip norms as long as these make it better. A rate is proposed if the
  other half of the records becomes better with it, and with 1.8 times less and more. This takes
  half a minute for small models, and two or three for models with several layers.

  Args:
    population_size: Number N of records (users), public.
    batch_size: Expected batch size B. With None and a budget, a batch size is proposed.
    steps: Number of steps. With None and a budget, a number is proposed.
    target_epsilon: Epsilon of the plan.
    parameters: Number m of trainable parameters.
    examples: A budget instead of both: how many examples to process, batch size times steps. See
      `batch_and_steps` for the table of choices.
    seconds: A budget in seconds instead, with `step_seconds`.
    step_seconds: `(overhead, per example)`: measured seconds of a step.
    largest_batch: With a budget: the largest batch that fits into memory.
    target_delta: None for the largest power of ten below 1 / N.
    sampling: The sampling scheme, if you cannot choose it; as in `PrivacyPlan`.
    mechanism: The noise, if you cannot choose it.
    gradients: Gradients [n, parameters] of 20 or more PUBLIC records at the weights that training
      starts from. Of a large model, fewer columns will do, if they are drawn at random.
    losses: [n] losses of the same records at the same weights.
    squared: Whether the loss is a squared error; by default it is a cross-entropy.
    look: The function of `public_gradients` that computes gradients and losses at other weights.
      Without it, the gradients at the first weights stand for all others. That is exact for
      linear models only, and can propose harmful rates for others.
    gradient_norm: Without public gradients: the typical norm of a record's gradient. Made-up
      records in the units of the real ones can give it.
    examples_per_user: With unit='user': the number of examples of a user. The result then says
      whether to sample examples one by one (`PoissonExamples`).
    likeness: PUBLIC mean cosine of the gradients of two examples of one user.
    **fields: Other fields of the plan, such as `adjacency` or `unit`, but no clip norm.

  Returns:
    A `Recommendation`. It costs no privacy if its arguments are public.

  Examples:
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.normal(size=[100, 5]), rng.integers(2, size=100)  # A PUBLIC sample.
    >>> found = recommend(
    ...     population_size=10_000, batch_size=100, steps=100, target_epsilon=1.0, parameters=5,
    ...     gradients=(.5 - y)[:, None] * x, losses=np.full(100, np.log(2)))
    >>> found.method in ('DPSGD', 'DPAdam', 'DPAdamSTP')
    True
  """
  budgeted = ''
  limits: Dict[str, Any] = {name: value for name, value in dict(
      examples=examples, seconds=seconds, step_seconds=step_seconds,
      largest_batch=largest_batch).items() if value is not None}
  if limits and batch_size is None and steps is None:
    table = budget.batch_and_steps(
        population_size=population_size, target_epsilon=target_epsilon,
        target_delta=target_delta, parameters=parameters, **limits, **fields)
    batch_size, steps, budgeted = table.best.batch_size, table.best.steps, table.reason
  elif limits or batch_size is None or steps is None:
    raise ValueError('Give `batch_size` and `steps`, or neither and a budget: `examples`, or '
                     '`seconds` and `step_seconds`. '
                     f'Received: batch_size={batch_size}, steps={steps}, {limits}.')
  checks.whole(parameters=parameters)
  if 'l2_norm_clip' in fields:
    raise ValueError('`l2_norm_clip` is recommended, not given. '
                     f'Received: l2_norm_clip={fields["l2_norm_clip"]}.')
  if gradient_norm is not None:
    checks.positive(gradient_norm=gradient_norm)
  if (gradients is None) != (losses is None) or (gradients is None) == (gradient_norm is None):
    raise ValueError(
        'Give `gradients` and `losses` of public records, as `tfdp.public_gradients` computes '
        'them, or `gradient_norm`, for example of made-up records in the same units: without '
        'either, settings could make the model worse. '
        f'Received: gradients: {gradients is not None}, losses: {losses is not None}, '
        f'gradient_norm={gradient_norm}.')
  if target_delta is None:
    target_delta = budget.default_delta(population_size)
  plans = _plans(
      dict(fields, population_size=population_size, batch_size=batch_size, steps=steps,
           target_epsilon=target_epsilon, target_delta=target_delta, l2_norm_clip=1.0),
      sampling, mechanism)
  if gradients is None or losses is None:
    found = _blind(plans[0], float(gradient_norm or 0))
  else:
    public = _records(gradients, losses, squared, parameters)
    if look is not None and np.shape(gradients)[1] != parameters:
      raise ValueError('With `look`, `gradients` must have one column per parameter. Received: '
                       f'{np.shape(gradients)[1]} columns, parameters={parameters}.')
    full = None if look is None else trial.Records(
        np.asarray(gradients), np.asarray(losses), squared, look)
    found = _simulated(plans, public, parameters, full)
  compared = '' if examples_per_user is None else user_level.compare(
      population_size=population_size, batch_size=batch_size, steps=steps,
      examples_per_user=examples_per_user, likeness=likeness, target_epsilon=target_epsilon,
      target_delta=target_delta, **fields).reason
  return dataclasses.replace(
      found, reasons=tuple(filter(None, (budgeted, *found.reasons, compared))))


def _records(gradients: npt.ArrayLike, losses: npt.ArrayLike, squared: bool, parameters: int
             ) -> trial.Records:
  """Returns the public records, or raises a ValueError that says what is wrong with them."""
  found = _numbers(gradients, 'gradients')
  if (found.ndim != 2 or len(found) < _FEWEST or not np.all(np.isfinite(found))
      or not found.any()):
    raise ValueError(
        '`gradients` must be finite, of shape [records, parameters] with at least '
        f'{_FEWEST} records, and not all zero. Received: shape {found.shape}.')
  if found.shape[1] > parameters:
    raise ValueError('`gradients` must have one column per parameter, or fewer of a large model. '
                     f'Received: {found.shape[1]} columns and parameters={parameters}.')
  values = _numbers(losses, 'losses')
  if values.shape != found.shape[:1] or not np.all(np.isfinite(values)) or (values < 0).any() or (
      not values.any()):
    raise ValueError('`losses` must be one number per row of `gradients`, not negative, and not '
                     f'all zero. Received: shape {values.shape} for {len(found)} rows.')
  if found.shape[1] > _COORDINATES:
    found = found[:, np.random.default_rng(0).permutation(found.shape[1])[:_COORDINATES]]
  # So that norms, products, and the noise in these, are those of all coordinates.
  found = found * math.sqrt(parameters / found.shape[1])
  return trial.Records(found, np.maximum(values, 1e-6 * values.mean()), squared)


def _numbers(values: npt.ArrayLike, name: str) -> npt.NDArray[np.float64]:
  """Returns the values as an array, or raises a ValueError that names the argument."""
  try:
    return np.asarray(values, np.float64)
  except (TypeError, ValueError, OverflowError) as error:
    raise ValueError(f'`{name}` must be an array of numbers. '
                     f'Received: {values!r:.60} ({error}).') from error


def _kind(mechanism: mechanisms.Mechanism) -> str:
  if isinstance(mechanism, mechanisms.IndependentGaussian):
    return 'independent'
  if isinstance(mechanism, mechanisms.BandedToeplitz):
    return f'banded ({mechanism.bands})'
  return type(mechanism).__name__


def _plans(shared: Dict[str, Any], sampling: Optional[sampling_lib.Sampling],
           mechanism: Optional[mechanisms.Mechanism]) -> List[plan_lib.PrivacyPlan]:
  """Returns the plans to try: independent noise, and the bands of least error if that is less."""
  calibrate = plan_lib.PrivacyPlan.calibrate
  if sampling is not None or mechanism is not None:
    given: Dict[str, Any] = {} if sampling is None else dict(sampling=sampling)
    if mechanism is None:
      mechanism = choice.choose(calibrate(**shared, **given))
    return [calibrate(**shared, **given, mechanism=mechanism)]
  plans = [calibrate(**shared)]
  most = min(int(shared['population_size'] // shared['batch_size']), shared['steps'])
  if plans[0].adjacency == 'zero_out':
    plans += [calibrate(**shared, sampling=sampling_lib.CyclicPoisson(cycle=bands),
                        mechanism=mechanisms.BandedToeplitz(bands, shared['steps']))
              for bands in _BANDS if bands <= most]
  errors = [plan.noise_multiplier * plan.mechanism.rmse(plan.steps) for plan in plans]
  best = int(np.argmin(errors))
  return plans[:1] + plans[best:best + 1] * (best > 0)


def _blind(plan: plan_lib.PrivacyPlan, clip: float) -> Recommendation:
  """Returns DP-Adam, whose steps have a size of their own, whatever the gradients are."""
  rate = _BLIND_RATE / math.sqrt(plan.steps)
  return Recommendation(
      'DPAdam', dataclasses.replace(plan, l2_norm_clip=clip),
      dict(learning_rate=methods.decay(rate, plan), epsilon=clip * methods.floor(plan)),
      dict(learning_rate=(rate / 10, 10 * rate), l2_norm_clip=(.1 * clip, clip)), (), None,
      ('There are no public gradients to try settings on: this is a guess. DP-Adam is proposed '
       'since the size of its steps does not depend on the gradients.',))


def _difference(one: best.Outcome, other: best.Outcome) -> Tuple[float, float]:
  """(mean over records, its standard error) of how much the losses are above the other ones."""
  more = one.losses - other.losses
  return float(more.mean()), float(more.std(ddof=1) / math.sqrt(len(more)))


def _preferred(outcomes: Sequence[best.Outcome]) -> best.Outcome:
  """Returns scale-then-privatize if it is within one standard error of the best, else the best.

  Over many tasks it loses least (docs/evidence.md). The rule of one standard error is that of
  Breiman et al., Classification and Regression Trees, 1984.
  """
  for one in outcomes:
    more, error = _difference(one, outcomes[0])
    if one.method.name == _LOSES_LEAST and one.helps and more <= error:
      return one
  return outcomes[0]


def _simulated(plans: Sequence[plan_lib.PrivacyPlan], public: trial.Records, parameters: int,
               full: Optional[trial.Records]) -> Recommendation:
  """Returns the method with the least loss in simulation, or that of the model itself."""
  shrunk = math.sqrt(parameters / public.gradients.shape[1])
  outcomes = sorted((best.in_simulation(method, public) for plan in plans
                     for method in methods.of(plan, public, shrunk)), key=lambda one: one.rank)
  if full is not None:
    outcomes, public, shrunk = best.of_the_model(outcomes, full), full, 1.0
  first, count = _preferred(outcomes), len(public.losses)
  tried = []
  for one in (first, *(other for other in outcomes if other is not first)):
    more, error = _difference(one, first)
    tried.append(Tried(one.method.name, _kind(one.method.plan.mechanism),
                       float(one.losses.mean()), more, 1.96 * error))
  start = float(public.losses.mean())
  reasons = [
      (f'Trained in simulation with this noise, on {count} public records, their mean loss goes '
       f'from {start:.4g} to {tried[0].loss:.4g}. The model itself was not trained: unless it is '
       'linear, smaller rates can be better.' if full is None else
       f'Trained with this noise on half of {count} public records, the mean loss of all goes from '
       f'{start:.4g} to {tried[0].loss:.4g}.')]
  if first is not outcomes[0]:
    reasons.append(f'{tried[1].method} has less loss, but by less than one standard error: then '
                   f'{first.method} is taken, which loses least over many tasks.')
  if first.helps:
    close = [f'{one.method} with {one.noise} noise' for one in tried[1:]
             if one.more <= one.interval]
    reasons.append(
        'Every other choice below is worse, by more than its 95% interval.' if not close else
        f'Within the 95% interval of the difference, {" and ".join(close)} may be as good; more '
        'public records would tell.')
  else:
    reasons.append('Records that were not trained on get worse with every setting: the least bad '
                   'is shown. A larger batch, more records or a larger epsilon are needed.')
  settled = methods.settled(first.method, first.setting, public, shrunk)
  return Recommendation(first.method.name, *settled, tuple(tried), start, tuple(reasons))
