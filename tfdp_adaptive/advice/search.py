# SPDX-License-Identifier: Apache-2.0
"""Searches settings of private training on PUBLIC examples, beside training on these alone.

The examples are split into four folds. A training judges one fold, which it does not see. A start
from public weights learns these weights from two folds, and the other one stands for the private
examples. Few examples overfit, and the many private ones will not: with s the mean loss of the
examples that were trained on, and u that of the others, a setting is charged `(s + u) / 2`. What
overfitting adds to u, it takes from s. What the noise adds is in both.
"""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privacy
from tfdp_adaptive import rules
from tfdp_adaptive import terms
from tfdp_adaptive.advice import inputs as inputs_lib
from tfdp_adaptive.advice import outputs as outputs_lib
from tfdp_adaptive.advice import trial as trial_lib
from tfdp_adaptive.clipping import bookkeeping

FOLDS = 4
NOTCH = 10**.5  # Between learning rates.
_SEARCHED = 0, 2  # Folds of the search; all folds judge what it finds.
_CLIMB = 5  # Learning rates of one climb at most.
_ALONE_STEPS = tuple(2**i for i in range(3, 13))  # Steps of training on the public examples alone,
_PATIENCE = 2  # which ends when so many of these numbers were no better.
_ALONE_RATES = (.3, 3.0)  # In the unit of `Search.unit`.
_KINDS = inputs_lib.SCALED, inputs_lib.AS_GIVEN, inputs_lib.WHITENED  # The likely best first.
# Fractions of the seconds at the end of each part; `first`: one rate on public examples alone.
_SHARES = dict(first=.6, alone=.25, search=.75, finals=.95)
_HUGE = 1e6  # In place of a loss that is not finite.
_TRAININGS = 100  # About so many are wanted.
_SLOWEST = 64  # The most steps of a plan that one step of a trial stands for.
_CLIPS = {'DPSGD': (3.0, 12.0, 1.0, .3), 'DPAdam': (1.0, 3.0, 12.0, .3),
          'DPAdamSTP': (1.0, .25, 4.0), 'DPKFC': (1.0, 3.0, .3)}
_SCALE_EPSILON = .03  # Over the root mean square of a gradient's coordinates.


class OutOfTime(Exception):
  """Ends a part of the search."""


class Setting(NamedTuple):
  """Settings of private training, in units of the gradients at its start.

  Attributes:
    inputs: A kind of `inputs`.
    warm: Whether it starts at weights that were trained on the public examples.
    optimizer: Name of the class.
    momentum: Of DPSGD and DPKFC.
    clip: Clip norm, over the median norm of a gradient (see `Search.base`).
    rate: Learning rate, in the unit of `Search.unit`.
    averaged: Whether the rate is constant and the weights are averaged; else the rate falls
      linearly to zero.
    noise: Index of the plan.
  """

  inputs: str = inputs_lib.AS_GIVEN
  warm: bool = False
  optimizer: str = 'DPSGD'
  momentum: float = 0.0
  clip: float = 3.0
  rate: float = 1.0
  averaged: bool = False
  noise: int = 0

  @property
  def rule(self) -> str:
    return f'{self.optimizer} {self.momentum:g}'


class Judged(NamedTuple):
  """What trainings came to.

  Attributes:
    losses: {(fold, seed): [n] losses of the judged examples, charged as the module says}.
    metrics: {(fold, seed): metric, larger is better}.
  """

  losses: Dict[Any, np.ndarray]
  metrics: Dict[Any, float]

  @property
  def loss(self) -> float:
    return float(np.mean(np.concatenate([*self.losses.values()])))

  @property
  def metric(self) -> float:
    return float(np.mean([*self.metrics.values()]))

  def above(self, other: Judged) -> Tuple[float, float]:
    """(mean, standard error) of the losses above the other ones, over examples of both."""
    return _mean_and_error(np.concatenate([
        _by_fold(self.losses, fold) - _by_fold(other.losses, fold)
        for fold in _folds(self, other)]))

  def metric_above(self, other: Judged) -> Tuple[float, float]:
    """The same for metrics, over folds."""
    return _mean_and_error(np.array([
        _by_fold(self.metrics, fold) - _by_fold(other.metrics, fold)
        for fold in _folds(self, other)]))


def _folds(one: Judged, other: Judged) -> List[int]:
  return sorted({fold for fold, _ in one.losses} & {fold for fold, _ in other.losses})


def _by_fold(values: Dict[Any, Any], fold: int) -> Any:
  return np.mean([value for key, value in values.items() if key[0] == fold], 0)


def _mean_and_error(values: np.ndarray) -> Tuple[float, float]:
  error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
  return float(values.mean()), float(error)


def better(one: Judged, other: Judged) -> bool:
  """Whether the metric is better by more than a standard error, or level and the loss is less."""
  more, error = one.metric_above(other)
  if abs(more) > error:
    return more > 0
  return one.above(other)[0] < 0


def rules_for(model: Any, x: Any, norm: float, size: int) -> Dict[str, contract.Rule]:
  """Returns the rules to try by `Setting.rule`, for gradients of this norm and size."""
  coordinate = norm / math.sqrt(size)
  found = {
      'DPSGD 0': rules.dp_sgd(), 'DPSGD 0.9': rules.dp_sgd(.9),
      'DPAdam 0': rules.dp_adam(epsilon=1e-3 * coordinate),
      'DPAdamSTP 0': rules.scale_then_privatize(
          epsilon=1e-8 * coordinate, scale_epsilon=_SCALE_EPSILON * coordinate),
      'DPKFC 0': rules.dp_kfc()}
  if not bookkeeping.supports(model, tf.nest.map_structure(lambda part: part[:2], x))[0]:
    del found['DPKFC 0']  # It needs the factors of gradients.
  return found


class Search:
  """Trains with many settings, within seconds.

  Args:
    trial: The model.
    x, y: PUBLIC examples.
    plans: Plans that differ in noise, sampling, batch size or steps; the first is searched with.
    metrics: As in `compile`.
    began: The time (`time.monotonic`) at which the seconds began.
    seconds: Wall-clock time.
    seed: Fixes folds, batches and noise.
    progress: Is called with a text before every training.
  """

  def __init__(
      self, trial: trial_lib.Trial, x: Any, y: Any, plans: Sequence[privacy.PrivacyPlan],
      loss: Any, metrics: Sequence[Any], began: float, seconds: float, seed: int,
      progress: Callable[[str, float], None]) -> None:
    self.trial, self.plans, self._seed, self._progress = trial, list(plans), seed, progress
    self._x, self.y = x, tf.nest.map_structure(np.asarray, y)
    self.count = len(tf.nest.flatten(self.y)[0])
    self._began, self._seconds = began, seconds
    self._ends = self._began + seconds
    self._parts = np.array_split(np.random.default_rng(seed).permutation(self.count), FOLDS)
    self._cache: Dict[Any, Any] = {}
    self.kinds = sorted(inputs_lib.all_of(x), key=_KINDS.index)
    self.untrained = Judged({}, {})
    outputs, losses = trial.judge(self.inputs(inputs_lib.AS_GIVEN, None), self.y, trial.start)
    self.judge = outputs_lib.Judge(loss, metrics, outputs)
    for fold, rows in enumerate(self._parts):
      self.untrained.losses[fold, 0] = losses[rows]
      self.untrained.metrics[fold, 0] = self._metric(outputs, rows)
    self.alone: Dict[str, Judged] = {}
    self.recipes: Dict[str, Tuple[float, int]] = {}  # Kind of inputs -> (rate, steps).
    self.judged: Dict[Setting, Judged] = {}
    self.coarse = 1
    self._searched: Tuple[int, ...] = _SEARCHED[:1]

  # Data, starts and units.

  def _rows(self, fold: Optional[int], warm: bool) -> np.ndarray:
    """Returns the rows that stand for the private examples when this fold judges."""
    if fold is None:
      return np.arange(self.count)
    others = [(fold + i) % FOLDS for i in range(1, FOLDS)]
    return np.concatenate([self._parts[i] for i in (others[:1] if warm else others)])

  def inputs(self, kind: str, fold: Optional[int]) -> Any:
    """Returns all inputs, by statistics of the examples outside the fold."""
    def make() -> Any:
      return tf.nest.map_structure(tf.convert_to_tensor, self.map(kind, fold)(self._x))
    return self._once(('inputs', kind, fold), make)

  def map(self, kind: str, fold: Optional[int] = None) -> inputs_lib.Inputs:
    if kind == inputs_lib.AS_GIVEN:
      return inputs_lib.Inputs()
    known = inputs_lib.all_of(self._x[self._rows(fold, False)])
    return known.get(kind, inputs_lib.Inputs())

  def norm(self, kind: str, warm: bool, fold: Optional[int], rule: str) -> float:
    """Returns the median norm of a gradient at the start, in the units of a rule."""
    def make() -> float:
      norms = self.trial.norms(
          self.inputs(kind, fold), self.y, self.weights(kind, warm, fold), rule)
      norms = norms[self._rows(fold, warm)]
      return float(np.median(norms)) or float(norms.max()) or 1.0
    return self._once(('norm', kind, warm, fold, rule), make)

  def base(self, setting: Setting, fold: Optional[int]) -> float:
    """Returns the clip norm of `clip=1`."""
    if setting.optimizer == 'DPAdamSTP':  # The geometric mean of what examples may need.
      return math.sqrt(self.trial.size) * self.plans[0].batch_size**.25
    return self.norm(setting.inputs, setting.warm, fold, setting.rule)

  def unit(self, setting: Setting, fold: Optional[int]) -> float:
    """Returns the learning rate of `rate=1`, at which weights may move by about 1 / norm."""
    plain = self.norm(setting.inputs, setting.warm, fold, 'DPSGD 0')
    unit = 1 / (plain * math.sqrt(self.steps(setting)))
    if setting.optimizer in ('DPSGD', 'DPKFC'):
      own = self.norm(setting.inputs, setting.warm, fold, setting.rule)
      unit *= (1 - setting.momentum) / (own * min(1.0, setting.clip))
    return unit

  def steps(self, setting: Setting) -> int:
    return max(1, self.plans[setting.noise].steps // self.coarse)

  def weights(self, kind: str, warm: bool, fold: Optional[int]) -> trial_lib.Weights:
    """Returns the weights that training starts from."""
    if not warm:
      return self.trial.start
    def make() -> trial_lib.Weights:
      rate, steps = self.recipes[kind]
      rows = self._rows(None, False) if fold is None else np.setdiff1d(
          self._rows(fold, False), self._rows(fold, True))
      return tuple(np.asarray(t) for t in next(self._plainly(kind, rate, fold, rows, (steps,))))
    return self._once(('warm', kind, fold), make)

  # Trainings.

  def _plainly(self, kind: str, rate: float, fold: Optional[int], rows: np.ndarray,
               until: Sequence[int]) -> Iterator[trial_lib.Weights]:
    """Trains without privacy, by Adam; yields the averaged weights after some numbers of steps."""
    unit = 1 / (self.norm(kind, False, fold, 'DPSGD 0') * 16)
    course = trial_lib.Course('DPAdam 0', _HUGE, np.full(until[-1], rate * unit), 0.0,
                              mechanisms.IndependentGaussian(), self._seed)
    state = self.trial.begin(course, self.trial.start)
    for step in until:
      self._tick(f'public examples alone, {kind} inputs')
      state = self.trial.advance(course, state, self.inputs(kind, fold), self.y, rows, step, .9)
      yield state.average

  def _train(self, setting: Setting, fold: int, seed: int, noise: float = 1.0) -> Any:
    """Trains privately in simulation; returns outputs and losses of all examples."""
    plan, steps = self.plans[setting.noise], self.steps(setting)
    clip = setting.clip * self.base(setting, fold)
    shape = np.ones(steps) if setting.averaged else 1 - np.arange(steps) / steps
    course = trial_lib.Course(
        setting.rule, clip, setting.rate * self.unit(setting, fold) * shape,
        noise * floor(plan) / math.sqrt(self.coarse), _shortened(plan.mechanism, steps),
        1000 * self._seed + 10 * fold + seed)
    x = self.inputs(setting.inputs, fold)
    state = self.trial.begin(course, self.weights(setting.inputs, setting.warm, fold))
    state = self.trial.advance(course, state, x, self.y, self._rows(fold, setting.warm), steps,
                               decay_of(steps))
    return self.trial.judge(x, self.y, state.average if setting.averaged else state.weights)

  def enough(self, setting: Setting, loss: float) -> float:
    """Returns the factor on the noise at which a setting has this loss; 0 if none has.

    What noise adds to a loss is taken to grow with its square.
    """
    clean = np.mean([self._charged(fold, setting.warm, self._train(setting, fold, 1, 0.0)[1]).mean()
                     for fold in self._searched])
    more = self.judged[setting].loss - clean
    return math.sqrt(max(0.0, loss - clean) / more) if more > 0 else 0.0

  def _charged(self, fold: int, warm: bool, losses: np.ndarray) -> np.ndarray:
    """Returns the losses of the judged examples, charged as the module says."""
    seen, unseen = self._rows(fold, warm), self._parts[fold]
    return losses[unseen] + (losses[seen].mean() - losses[unseen].mean()) / 2

  def measure(self, setting: Setting, folds: Sequence[int], seeds: Sequence[int] = (0,)) -> Judged:
    """Returns the judgement of a setting, of what is not known yet."""
    known = self.judged.setdefault(setting, Judged({}, {}))
    for key in [(fold, seed) for fold in folds for seed in seeds]:
      if key in known.losses:
        continue
      self._tick(f'{setting.optimizer}, {setting.inputs} inputs'
                 + (', public start' if setting.warm else ''))
      fold = key[0]
      outputs, losses = self._train(setting, *key)
      losses = np.nan_to_num(losses, nan=_HUGE, posinf=_HUGE)
      seen, unseen = self._rows(fold, setting.warm), self._parts[fold]
      known.losses[key] = self._charged(fold, setting.warm, losses)
      known.metrics[key] = (self._metric(outputs, seen) + self._metric(outputs, unseen)) / 2
      if key[1]:  # Finals, for `calibrated`.
        self._cache['outputs', setting, key] = outputs
    return known

  def _metric(self, outputs: Any, rows: np.ndarray) -> float:
    if not self.judge:
      return 0.0
    values = self.judge(outputs[rows], _part(self.y, rows))
    return values if math.isfinite(values) else -_HUGE

  def calibrated(self, setting: Setting, activation: str) -> Judged:
    """Returns the judgement with outputs fitted on public examples: on each half for the other."""
    before, after = self.judged[setting], Judged({}, {})
    for key, losses in before.losses.items():
      rows, outputs = self._parts[key[0]], self._cache['outputs', setting, key]
      outputs, raw = np.array(outputs), np.zeros(self.count)
      old = self.trial.loss(_part(self.y, rows), tf.constant(outputs[rows])).numpy()
      metric = self._metric(outputs, rows)
      for i in range(2):
        fitted = outputs_lib.fit(activation, self.trial.loss, _part(self.y, rows[1 - i::2]),
                                 outputs[rows[1 - i::2]])
        half = rows[i::2]
        moved = outputs_lib.apply(activation, self._cache['outputs', setting, key][half], fitted)
        raw[half] = self.trial.loss(_part(self.y, half), tf.constant(moved)).numpy()
        outputs[half] = moved
      after.losses[key] = losses + raw[rows] - old
      after.metrics[key] = before.metrics[key] + self._metric(outputs, rows) - metric
    return after

  def has_outputs(self, setting: Setting) -> bool:
    return all(('outputs', setting, key) in self._cache for key in self.judged[setting].losses)

  # The search.

  def public_alone(self) -> None:
    """Finds how to train on the public examples alone, for all kinds of inputs."""
    self._ends = self._began + _SHARES['first'] * self._seconds
    try:
      for kind in self.kinds:
        self._alone(kind)
    except OutOfTime:
      pass

  def _alone(self, kind: str) -> None:
    for rate in _ALONE_RATES:
      runs = [self._plainly(kind, rate, fold, self._rows(fold, False), _ALONE_STEPS)
              for fold in range(FOLDS)]
      least, late = math.inf, 0
      for steps in _ALONE_STEPS:
        judged = Judged({}, {})
        for fold, run in enumerate(runs):
          outputs, losses = self.trial.judge(self.inputs(kind, fold), self.y, next(run))
          rows = self._parts[fold]
          judged.losses[fold, 0] = np.nan_to_num(losses[rows], nan=_HUGE, posinf=_HUGE)
          judged.metrics[fold, 0] = self._metric(outputs, rows)
        late = 0 if judged.loss < least else late + 1
        if judged.loss < least:
          least = judged.loss
          if kind not in self.alone or least < self.alone[kind].loss:
            self.alone[kind], self.recipes[kind] = judged, (rate, steps)
        if late == _PATIENCE:
          break
      self._ends = self._began + _SHARES['alone'] * self._seconds  # One rate has been tried.

  def run(self) -> None:
    """Searches by successive halving: first inputs and starts, then optimizers and clip norms."""
    try:
      self._ends = self._began + _SHARES['search'] * self._seconds
      folds = self._set_fidelity()
      starts = [(kind, warm) for warm in (True, False) for kind in self.kinds
                if not warm or kind in self.recipes]
      self._searched = folds[:1]
      for kind, warm in starts:
        self.climb(Setting(kind, warm, 'DPAdam', clip=1.0, rate=.1 if warm else 1.0))
      ranked = sorted((self.best(inputs=kind, warm=warm) for kind, warm in starts),
                      key=lambda one: self.judged[one].loss)
      self._searched = folds
      for one in ranked[:-(-len(ranked) // 2)]:
        self.climb(one)
        self.climb(one._replace(optimizer='DPSGD', clip=_CLIPS['DPSGD'][0]))
      best = self.best()
      for rule in list(self.trial.rules):
        optimizer, momentum = rule.split()
        for clip in _CLIPS[optimizer]:
          self.climb(best._replace(optimizer=optimizer, momentum=float(momentum), clip=clip,
                                   rate=self._known_rate(best, rule)))
      for noise in range(1, len(self.plans)):
        self.climb(self.best()._replace(noise=noise))
      self.climb(self.best()._replace(averaged=True))
      for factor in (NOTCH**.5, NOTCH**-.5):
        self.measure(self.best()._replace(rate=self.best().rate * factor), self._searched)
    except OutOfTime:
      pass

  def _known_rate(self, best: Setting, rule: str) -> float:
    """Returns the best rate of the rule with these inputs so far, or that of the best setting."""
    alike = [(self.judged[one].loss, one.rate) for one in self._complete()
             if one.rule == rule and one[:2] == best[:2]]
    return min(alike)[1] if alike else best.rate

  def _set_fidelity(self) -> Tuple[int, ...]:
    """Lets a step of the trial stand for several of the plan, if the model is slow.

    Returns:
      The folds of the search.
    """
    probe = Setting()
    for _ in range(2):  # The first one traces.
      began = time.monotonic()
      self._train(probe, 0, 0)
      seconds = time.monotonic() - began
    left = self._ends - time.monotonic()
    while _TRAININGS * seconds / self.coarse > left and self.coarse < _SLOWEST and (
        self.steps(probe) > 50):
      self.coarse *= 2
    return _SEARCHED[:2 if 2 * _TRAININGS * seconds / self.coarse < left else 1]

  def climb(self, setting: Setting) -> None:
    """Moves the learning rate in the direction in which the loss falls."""
    loss = lambda one: self.measure(one, self._searched).loss
    at, least, tried = setting, loss(setting), 1
    for factor in (NOTCH, 1 / NOTCH):
      moved = False
      while tried < _CLIMB:
        further = at._replace(rate=at.rate * factor)
        value, tried = loss(further), tried + 1
        if not value < least:
          break
        at, least, moved = further, value, True
      if moved:
        return

  def _complete(self) -> List[Setting]:
    return [one for one, judged in self.judged.items()
            if all((fold, 0) in judged.losses for fold in self._searched)]

  def best(self, **alike: Any) -> Setting:
    """Returns the setting of the least loss so far, of those with these fields."""
    some = [one for one in self._complete()
            if all(getattr(one, name) == value for name, value in alike.items())]
    if not some:
      raise OutOfTime()
    return min(some, key=lambda one: self.judged[one].loss)

  def finals(self) -> List[Setting]:
    """Judges the best settings again, on all folds and with other noise, the best one first."""
    self._ends = self._began + _SHARES['finals'] * self._seconds
    some: List[Setting] = []
    if not self._complete():  # Time was up when the second fold began.
      self._searched = self._searched[:1]
    ranked = sorted(self._complete(), key=lambda one: self.judged[one].loss)
    accurate = sorted(ranked, key=lambda one: -self.judged[one].metric)
    for one in (*ranked[:3], *(accurate[:2] if self.judge else ())):
      some += [one] * (one not in some)
    for kind in self.kinds:
      for warm in (False, True):
        some += [one for one in ranked if one[:2] == (kind, warm) and one not in some][:1]
    done = []
    try:
      for one in some:
        self.judged[one] = Judged({}, {})  # The noise that was lucky counts no more.
        self.measure(one, range(FOLDS), (1,))
        done.append(one)
    except OutOfTime:
      pass
    best = done[:1]
    for one in done[1:]:
      if better(self.judged[one], self.judged[best[0]]):
        best = [one]
    known = dict(self.judged)
    try:  # The best of many was lucky, too: other noise says how good it is.
      for one in best:
        self.judged[one] = Judged({}, {})
        self.measure(one, range(FOLDS), (2, 3))
    except OutOfTime:
      self.judged = known
    return best + [one for one in done if one not in best]

  def settled(self, setting: Setting) -> Tuple[float, float]:
    """Returns clip norm and learning rate for training on the private examples."""
    per_step = self.coarse if setting.optimizer in ('DPSGD', 'DPKFC') else math.sqrt(self.coarse)
    return (rounded(setting.clip * self.base(setting, None)),
            rounded(setting.rate * self.unit(setting, None) / per_step))

  def finish(self) -> None:
    """Lets what is handed over be trained, whatever the time."""
    self._ends = math.inf

  def _tick(self, text: str) -> None:
    now = time.monotonic()
    if now > self._ends:
      raise OutOfTime()
    self._progress(text, self._began + self._seconds - now)

  def _once(self, key: Any, make: Callable[[], Any]) -> Any:
    if key not in self._cache:
      self._cache[key] = make()
    return self._cache[key]


def floor(plan: privacy.PrivacyPlan) -> float:
  """Returns the noise per coordinate of a mean over the clip norm, before it is correlated."""
  return plan.noise_multiplier * terms.record_distance(plan.adjacency) / plan.batch_size


def decay_of(steps: int) -> float:
  """Returns the decay of a moving average over the last fifteenth of the steps."""
  return max(.5, 1 - 15 / steps)


def _shortened(mechanism: mechanisms.Mechanism, steps: int) -> mechanisms.Mechanism:
  if mechanism.steps in (None, steps) or not isinstance(mechanism, mechanisms.BandedToeplitz):
    return mechanism
  return mechanisms.BandedToeplitz(min(mechanism.bands, steps), steps)


def _part(tree: Any, rows: Any) -> Any:
  return tf.nest.map_structure(lambda values: values[rows], tree)


def rounded(value: float) -> float:
  return float(f'{value:.3g}')
