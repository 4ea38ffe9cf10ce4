# SPDX-License-Identifier: Apache-2.0
"""Trains on PUBLIC examples with many settings, and judges by the examples that were left out.

The examples are split into five folds. A training judges one fold, which it does not see, and sees
the others. A start from public weights learns these weights from half of all examples; the
others stand for the private ones. Few examples overfit, and the many private ones will not. With s
the mean loss of the examples that were trained on, and u that of the others, a setting is charged

    u - (u - s) / 2 * min(1, s / u)**.5.

What a little overfitting adds to u, it takes from s; what the noise adds is in both. Examples that
are known by heart, s << u, tell nothing of others.

In the end all public examples are trained on, not half of them or four fifths, and many private
ones. With n examples a model is taken to lose L + a / n. From h at half and f at four fifths of the
public ones it is A = f - (h - f) / 3 with all of them: see `Search.judged`.
"""

from __future__ import annotations

import functools
import math
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privacy
from tfdp_adaptive import rules
from tfdp_adaptive import terms
from tfdp_adaptive import trees
from tfdp_adaptive.advice import inputs as inputs_lib
from tfdp_adaptive.advice import outputs as outputs_lib
from tfdp_adaptive.advice import settings as settings_lib
from tfdp_adaptive.advice import trial as trial_lib
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.trees import Tree

FOLDS = 5
_START = .5  # Share of the examples that public weights are learned from.
# Numbers of steps of training on the public examples alone,
_ALONE_STEPS = tuple(round(2**(i / 2)) for i in range(6, 25))
_PATIENCE = 3  # which ends when so many of these numbers were no better.
_LATER = 4  # It also ends after so many times the way (rate * steps) of a better training.
_LEAST_STEPS = 64  # Steps on the public examples alone before time may end them.
_FIRST = .6  # Share of the time at which the first of these trainings ends,
_ALONE = .35  # and at which the others end.
ALONE_RATES = (.5, 3.0, .1)  # In the unit of `Experiment.plain_unit`.
_KINDS = inputs_lib.SCALED, inputs_lib.AS_GIVEN, inputs_lib.WHITENED  # The likely best first.
_USUAL = 1 / 30, 30.0  # Losses of untrained models for which the rates were chosen.
PRIVATE = 2.0  # Time of a private step over that of a plain one.
_MEASURED = 512  # Examples whose gradients have their norms taken.
SCALE_EPSILON = .03  # In units of the root mean square of a gradient's coordinates.
_PLAIN = 'DPSGD'


class Experiment:
  """A model, public examples, and what trainings came to so far.

  Args:
    model: The part of a model that trains.
    layers: The layers that it applies one after the other; () if it is no chain.
    loss, metrics: As in `compile`.
    x, y: PUBLIC examples.
    plans: Plans that differ in noise, sampling, batch size or steps.
    seed: Fixes folds, batches and noise.
    clock: Ends trainings in time.

  Attributes:
    untrained: The judgement of the model as it is.
    alone: {kind of inputs: judgement of the model trained on the public examples alone}.
    recipes: {kind of inputs: (rate, steps) of that training}.
    halves: {(kind of inputs, fold): losses of the public weights of half of the examples}.
    judged: {setting: its judgement}.
    coarse: The number of steps of a plan that one step of a trial stands for.
  """

  def __init__(
      self, model: compat.Model, layers: Sequence[compat.Layer], loss: object,
      metrics: Sequence[object], x: Tree, y: Tree, plans: Sequence[privacy.PrivacyPlan],
      seed: int, clock: settings_lib.Clock) -> None:
    for name in ('part', 'inputs', '_public_weights', 'norm', '_loss_of'):  # Computed once each.
      setattr(self, name, functools.lru_cache(None)(getattr(self, name)))
    self.plans, self._seed, self._clock, self._x = list(plans), seed, clock, x
    self._loss, self._layers = loss, list(layers)
    self.y = tf.nest.map_structure(np.asarray, y)
    self.count = len(tf.nest.flatten(self.y)[0])
    self._parts = _folds((x, self.y), np.random.default_rng(seed))
    self.kinds = sorted(inputs_lib.all_of(x), key=_KINDS.index)
    self.trial = self._trial_of(model, tf.nest.map_structure(tf.convert_to_tensor, x))
    outputs, losses = self.trial.judge(x, self.y, self.trial.start)
    wrong = np.flatnonzero(np.isnan(losses))
    if len(wrong) and all(np.isfinite(part).all() for part in tf.nest.flatten(outputs)):
      raise ValueError(
          '`loss` must have a value for the targets of `public`. Received: NaN for the examples '
          f'{wrong[:10].tolist()}, where the outputs of the model are finite.')
    self.judge = outputs_lib.Judge(loss, metrics, outputs, self.y)
    self.untrained = settings_lib.Judged()
    for fold, rows in enumerate(self._parts):
      self.untrained.note((fold, 0), losses[rows], *self._metric(outputs, rows))
    self.alone: Dict[str, settings_lib.Judged] = {}
    self.recipes: Dict[str, Tuple[float, int]] = {}
    self.halves: Dict[Tuple[str, int], np.ndarray] = {}
    self._curves: Dict[Tuple[str, float], Dict[int, Dict[int, settings_lib.One]]] = {}
    self._ahead: Dict[Tuple[int, ...], Tuple[float, float]] = {}  # Folds -> best loss and its way.
    self.judged: Dict[settings_lib.Setting, settings_lib.Judged] = {}
    self.coarse = 1

  def _trial_of(self, model: compat.Model, x: Tree) -> trial_lib.Trial:
    """Returns a trial with the rules to try by the names of their optimizers."""
    trial = trial_lib.Trial(model, self._loss, {_PLAIN: rules.dp_sgd(), 'DPKFC': rules.dp_kfc()})
    trial.compare(x, self.y)
    coordinate = self._typical_norm(trial, x, np.arange(self.count), trial.start, _PLAIN
                                    ) / math.sqrt(trial.size)
    trial.coordinate = coordinate
    adam = rules.dp_adam(epsilon=1e-3 * coordinate)
    trial.rules.update({
        'DPAdam': adam, trial_lib.ADAM: adam,
        'DPAdamSTP': rules.scale_then_privatize(
            epsilon=1e-8 * coordinate, scale_epsilon=SCALE_EPSILON * coordinate)})
    if not bookkeeping.supports(model, tf.nest.map_structure(lambda part: part[:2], x))[0]:
      del trial.rules['DPKFC']  # It needs the factors of gradients.
    return trial

  # Data, starts and units.

  @property
  def starts(self) -> List[str]:
    """The possible start weights of a training, the likely best first."""
    last = outputs_lib.last_dense(self.trial.model)
    has_front = self._layers[1:] and self._layers[-1] is last and any(
        layer.trainable_variables for layer in self._layers[:-1])
    return [settings_lib.PUBLIC, *([settings_lib.LAST] if has_front else []), settings_lib.GIVEN]

  def rows(self, fold: Optional[int], start: str) -> np.ndarray:
    """Returns the rows that stand for the private examples when this fold judges."""
    if fold is None:
      return np.arange(self.count)
    others = np.concatenate([self._parts[(fold + i) % FOLDS] for i in range(1, FOLDS)])
    return others if start == settings_lib.GIVEN else others[round(_START * self.count):]

  def part(self, start: str) -> trial_lib.Trial:
    """Returns the trial of what is trained."""
    if start != settings_lib.LAST:
      return self.trial
    x = self.inputs(min(self.alone, key=lambda kind: self.alone[kind].loss), start, 0)
    model = compat.keras.Sequential([compat.keras.layers.Input(x.shape[1:]), self._layers[-1]])
    return self._trial_of(model, x)

  def inputs(self, kind: str, start: str, fold: Optional[int]) -> Tree:
    """Returns what the trained part reads, by statistics of the examples outside the fold."""
    value = tf.nest.map_structure(tf.convert_to_tensor, self.map(kind, fold)(self._x))
    if start == settings_lib.LAST:
      self.trial.assign(self._public_weights(kind, fold))
      front = functools.partial(
          functools.reduce, lambda inputs, layer: layer(inputs), self._layers[:-1])
      value = tf.concat([front(value[first:first + trial_lib.CHUNK])
                         for first in range(0, self.count, trial_lib.CHUNK)], 0)
    return value

  def map(self, kind: str, fold: Optional[int] = None) -> inputs_lib.Inputs:
    if kind == inputs_lib.AS_GIVEN:
      return inputs_lib.Inputs()
    known = inputs_lib.all_of(self._x[self.rows(fold, settings_lib.GIVEN)])
    return known.get(kind, inputs_lib.Inputs())

  def weights(self, kind: str, start: str, fold: Optional[int]) -> trial_lib.Weights:
    """Returns the weights that training starts from, of the trained part."""
    if start == settings_lib.GIVEN:
      return self.trial.start
    weights = self._public_weights(kind, fold)
    return weights if start == settings_lib.PUBLIC else weights[-len(self.part(start).variables):]

  def _public_weights(self, kind: str, fold: Optional[int]) -> trial_lib.Weights:
    rate, steps = self.recipes[kind]
    rows = self.rows(fold, settings_lib.GIVEN)
    if fold is not None:
      rows = np.setdiff1d(rows, self.rows(fold, settings_lib.PUBLIC))
    weights = tuple(np.asarray(t) for t in next(self.plainly(kind, rate, fold, rows, (steps,))))
    if fold is not None:
      self.halves[kind, fold] = self._looked(kind, fold, weights)[0]
    return weights

  def norm(self, kind: str, start: str, fold: Optional[int], rule: str) -> float:
    """Returns the median norm of a gradient at the start, in the units of a rule."""
    return self._typical_norm(self.part(start), self.inputs(kind, start, fold),
                              self.rows(fold, start), self.weights(kind, start, fold), rule)

  def _typical_norm(self, trial: trial_lib.Trial, x: Tree, rows: np.ndarray,
                    weights: trial_lib.Weights, rule: str) -> float:
    x, y = trial_lib.rows_of((x, self.y), rows[:_MEASURED])
    norms = trial.norms(x, y, weights, rule)
    return float(np.median(norms)) or float(norms.max()) or 1.0

  def base(self, setting: settings_lib.Setting, fold: int) -> float:
    """Returns the clip norm that a setting with `clip=1` stands for."""
    if setting.optimizer == 'DPAdamSTP':  # The geometric mean of what examples may need.
      return math.sqrt(self.part(setting.start).size) * self.plans[0].batch_size**.25
    return self._own_norm(setting, fold)

  def _own_norm(self, setting: settings_lib.Setting, fold: int) -> float:
    rule = 'DPKFC' if setting.optimizer == 'DPKFC' else _PLAIN  # The others scale nothing yet.
    return self.norm(*setting[:2], fold, rule)

  def _way(self, kind: str, start: str, fold: Optional[int]) -> float:
    """Returns how far weights may move: a loss over the norm of a gradient.

    Losses of a usual size count as one, others as the geometric mean of those of the given weights
    and of the start. So targets and losses may have any unit.
    """
    given, size = self._loss_of(kind, settings_lib.GIVEN, None), 1.0  # The same for all folds.
    if not _USUAL[0] < given < _USUAL[1]:
      size = math.sqrt(given * self._loss_of(kind, start, fold))
    return size / self.norm(kind, start, fold, _PLAIN)

  def _loss_of(self, kind: str, start: str, fold: Optional[int]) -> float:
    """Returns the mean size of a loss at the start; 1 if it is zero or not finite."""
    rows = self.rows(fold, start)[:_MEASURED]
    x, y = trial_lib.rows_of((self.inputs(kind, start, fold), self.y), rows)
    _, losses = self.part(start).judge(x, y, self.weights(kind, start, fold))
    size = float(np.mean(np.abs(losses)))
    return size if 0 < size < math.inf else 1.0

  def unit(self, setting: settings_lib.Setting, fold: int) -> float:
    """Returns the learning rate of `rate=1`, at which weights may move by about `_way`."""
    unit = self._way(*setting[:2], fold) / math.sqrt(self.steps(setting))
    if setting.optimizer in ('DPSGD', 'DPKFC'):
      unit *= (1 - setting.momentum) / (self._own_norm(setting, fold) * min(1.0, setting.clip))
    return unit

  def steps(self, setting: settings_lib.Setting) -> int:
    return max(1, self.plans[setting.noise].steps // self.coarse)

  # Trainings.

  def _advance(self, trial: trial_lib.Trial, course: trial_lib.Course, state: trial_lib.State,
               x: Tree, rows: np.ndarray, until: int, decay: float, text: str) -> trial_lib.State:
    """Trains if there is time for it."""
    steps, known = max(1, until - state.step), trial.pace.get(course.rule)
    self._clock.check(text, steps * (known or PRIVATE * trial.pace.get(trial_lib.ADAM, 0.0)))
    began = settings_lib.now()
    state = trial.advance(course, state, x, self.y, rows, until, decay)
    pace = (settings_lib.now() - began) / steps
    trial.pace[course.rule] = min(pace, known or pace)
    return state

  def plain_unit(self, kind: str, fold: Optional[int]) -> float:
    return self._way(kind, settings_lib.GIVEN, fold) / 16

  def plainly(self, kind: str, rate: float, fold: Optional[int], rows: np.ndarray,
              until: Sequence[int]) -> Iterator[Tree]:
    """Trains without privacy, by Adam; yields the averaged weights after some numbers of steps."""
    course = trial_lib.Course(
        trial_lib.ADAM, 1.0, np.full(until[-1], rate * self.plain_unit(kind, fold)), 0.0,
        mechanisms.IndependentGaussian(), self._seed)
    state = self.trial.begin(course, self.trial.start)
    x = self.inputs(kind, settings_lib.GIVEN, fold)
    for step in until:
      state = self._advance(self.trial, course, state, x, rows, step, .9,
                            f'public examples alone, {kind} inputs')
      yield state.average

  def try_alone(self, kind: str, rate: float, folds: Sequence[int]) -> None:
    """Trains on the public examples alone until more steps are no better on average.

    A training that time ends counts if it is the first one of its kind of inputs. The first
    training of all takes the time that it needs, since it may be the best.

    Args:
      kind: Kind of the inputs.
      rate: In the unit of `plain_unit`.
      folds: The folds to judge by; those that did so before are left out.
    """
    known = self._curves.setdefault((kind, rate), {})
    curves: Dict[int, Dict[int, settings_lib.One]] = {fold: {} for fold in folds
                                                      if fold not in known}
    if not curves:
      return
    runs = {fold: self.plainly(kind, rate, fold, self.rows(fold, settings_lib.GIVEN), _ALONE_STEPS)
            for fold in curves}
    least, late, done = (math.inf, 0.0), 0, False
    ahead, soon = self._ahead.get(tuple(curves), (math.inf, 0.0))
    equal = max((max(curve) for curve in known.values()), default=0)  # All folds go as far.
    try:
      for steps in _ALONE_STEPS:
        for fold, run in runs.items():
          curves[fold][steps] = self._looked(kind, fold, next(run))
        loss = float(np.mean([curve[steps][0].mean() for curve in curves.values()]))
        late = 0 if loss < least[0] else late + 1
        least = min(least, (loss, rate * steps))
        if steps >= _LEAST_STEPS or self.alone:
          self._clock.allow(_ALONE if self.alone else _FIRST)
        if steps >= equal and (
            late >= _PATIENCE or rate * steps >= _LATER * soon and least[0] > ahead):
          break
      done = True
    finally:
      if done or all(curves.values()) and kind not in self.alone:
        self._ahead[tuple(curves)] = min((ahead, soon), least)
        known.update(curves)
        self._choose_alone(kind)

  def _choose_alone(self, kind: str) -> None:
    """Notes the smallest rate that is not clearly worse than the best, and its best steps.

    Trainings at a large rate vary. The folds average over that, the training of the model cannot.
    """
    known = {rate: folds for (one, rate), folds in self._curves.items() if one == kind}
    found: Dict[float, Tuple[settings_lib.Judged, int]] = {}
    for rate, folds in known.items():
      if len(folds) == max(map(len, known.values())):
        for steps in sorted(set.intersection(*map(set, folds.values()))):
          judged = settings_lib.Judged()
          for fold, curve in folds.items():
            judged.note((fold, 0), *curve[steps])
          if rate not in found or judged.loss < found[rate][0].loss:
            found[rate] = judged, steps
    best, _ = min(found.values(), key=lambda one: one[0].loss)

    def alike(rate: float) -> bool:
      more, error = found[rate][0].above(best)
      return more <= error

    rate = min(filter(alike, found))
    self.alone[kind], steps = found[rate]
    self.recipes[kind] = rate, steps

  def _looked(self, kind: str, fold: int, weights: Tree) -> settings_lib.One:
    """Returns what some weights come to on a fold."""
    x, rows = self.inputs(kind, settings_lib.GIVEN, fold), self._parts[fold]
    x, y = trial_lib.rows_of((x, self.y), rows)
    outputs, losses = self.trial.judge(x, y, weights)
    return losses, self.judge(outputs, _part(self.y, rows)), outputs

  def train(self, setting: settings_lib.Setting, fold: int, seed: int, noise: float = 1.0
            ) -> Tuple[Tree, np.ndarray]:
    """Trains privately in simulation; returns outputs and losses of all examples."""
    plan, steps, kind, start = self.plans[setting.noise], self.steps(setting), *setting[:2]
    shape = np.ones(steps) if setting.averaged else 1 - np.arange(steps) / steps
    course = trial_lib.Course(
        setting.optimizer, setting.clip * self.base(setting, fold),
        setting.rate * self.unit(setting, fold) * shape,
        noise * floor(plan) / math.sqrt(self.coarse), _shortened(plan.mechanism, steps),
        1000 * self._seed + 10 * fold + seed, setting.momentum)
    trial, x = self.part(start), self.inputs(kind, start, fold)
    state = self._advance(
        trial, course, trial.begin(course, self.weights(kind, start, fold)), x,
        self.rows(fold, start), steps, decay_of(steps), f'{setting.optimizer}, {kind} inputs'
        + (', public start' if start != settings_lib.GIVEN else ''))
    return trial.judge(x, self.y, state.average if setting.averaged else state.weights)

  def charged(self, setting: settings_lib.Setting, fold: int, outputs: Tree, losses: np.ndarray
              ) -> settings_lib.One:
    """Returns losses, metric and outputs of the judged examples, charged as the module says."""
    seen, unseen = self.rows(fold, setting.start), self._parts[fold]
    least, most = losses[seen].mean(), losses[unseen].mean()
    credit = .5 * math.sqrt(min(1.0, max(0.0, least / most))) if most > 0 else .5
    metric, held = self._metric(outputs, unseen)
    return (losses[unseen] - credit * (most - least),
            metric + credit * (self._metric(outputs, seen)[0] - metric), held)

  def measure(self, setting: settings_lib.Setting, folds: Sequence[int],
              seed: int = 0) -> settings_lib.Judged:
    """Returns the judgement of a setting, of what is not known yet."""
    known = self.judged.setdefault(setting, settings_lib.Judged())
    for fold in folds:
      if (fold, seed) not in known:
        known.note((fold, seed), *self.charged(setting, fold, *self.train(setting, fold, seed)))
    return known

  def clean(self, setting: settings_lib.Setting, fold: int) -> np.ndarray:
    """Returns the losses of a setting without noise."""
    return self.charged(setting, fold, *self.train(setting, fold, 1, 0.0))[0]

  def gained(self, kind: str) -> float:
    """Returns h - f, by which four fifths of the public examples are better than half of them."""
    more = [half - self.alone[kind].of(fold) for (one, fold), half in self.halves.items()
            if one == kind and fold in self.alone[kind].folds]
    loss = self.alone[kind].loss
    most = .6 * loss if loss > 0 else math.inf  # So that L is not negative.
    return min(most, max(0.0, float(np.mean(np.concatenate(more))))) if more else 0.0

  def calibrated(self, before: settings_lib.Judged, activation: str) -> settings_lib.Judged:
    """Returns the judgement with outputs fitted on public examples: on each half for the other."""
    after = settings_lib.Judged()
    for key, (charged, metric, old) in before.items():
      rows, moved = self._parts[key[0]], np.array(old)
      y = _part(self.y, rows)
      for i in range(2):
        fitted = outputs_lib.fit(
            activation, self.trial.loss, _part(y, slice(1 - i, None, 2)), old[1 - i::2])
        moved[i::2] = outputs_lib.apply(activation, old[i::2], fitted)
      losses, metrics = [[judge(values) for values in (moved, old)] for judge in (
          lambda values: self.trial.loss(y, tf.constant(values)).numpy(),
          lambda values: self.judge(values, y))]
      after.note(key, charged + losses[0] - losses[1], metric + metrics[0] - metrics[1], moved)
    return after

  def settled(self, setting: settings_lib.Setting) -> Tuple[float, float]:
    """Returns clip norm and learning rate for training on the private examples.

    They are typical of the folds, where weights had not learned the examples whose gradients count.
    """
    per_step = self.coarse if setting.optimizer in ('DPSGD', 'DPKFC') else math.sqrt(self.coarse)
    typical = lambda value: float(np.exp(np.mean([
        math.log(value(setting, fold)) for fold in self.judged[setting].folds])))
    return (rounded(setting.clip * typical(self.base)),
            rounded(setting.rate * typical(self.unit) / per_step))

  def _metric(self, outputs: Tree, rows: np.ndarray) -> Tuple[float, Tree]:
    """Returns the metric of some examples, and their outputs."""
    outputs = _part(outputs, rows)
    return self.judge(outputs, _part(self.y, rows)), outputs


def _folds(examples: Tree, rng: np.random.Generator) -> List[np.ndarray]:
  """Returns the rows of every fold; equal examples are in one fold, if none is empty then."""
  numbers: Dict[Tuple[bytes, ...], int] = {}
  group = np.array([numbers.setdefault(content, len(numbers))
                    for content in trees.contents(examples)])
  group = rng.permutation(len(numbers))[group]
  order = np.argsort(group, kind='stable')
  first = np.searchsorted(group[order], group[order])
  parts = [order[first * FOLDS // len(order) == fold] for fold in range(FOLDS)]
  return parts if all(map(len, parts)) else np.array_split(order, FOLDS)


def floor(plan: privacy.PrivacyPlan) -> float:
  """Returns the noise per coordinate of a mean over the clip norm, before it is correlated."""
  return plan.noise_multiplier * terms.record_distance(plan.adjacency) / plan.batch_size


def decay_of(steps: int) -> float:
  """Returns the decay of a moving average over the last fifteenth of the steps."""
  return max(.5, 1 - 15 / steps)


def rounded(value: float) -> float:
  return float(f'{value:.3g}')


def _shortened(mechanism: mechanisms.Mechanism, steps: int) -> mechanisms.Mechanism:
  if mechanism.steps in (None, steps) or not isinstance(mechanism, mechanisms.BandedToeplitz):
    return mechanism
  return mechanisms.BandedToeplitz(min(mechanism.bands, steps), steps)


def _part(tree: Tree, rows: np.ndarray | slice) -> Tree:
  return tf.nest.map_structure(lambda values: values[rows], tree)
