# SPDX-License-Identifier: Apache-2.0
"""Searches settings of private training within seconds, the likely best ones first."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Dict, Iterable, List, NamedTuple, Sequence, Tuple

import numpy as np

from tfdp_adaptive import privacy
from tfdp_adaptive.advice import experiment as experiment_lib
from tfdp_adaptive.advice import settings as settings_lib
from tfdp_adaptive.advice import trial as trial_lib

NOTCH = 10**.5  # Between learning rates.
_CLIMB = 5  # Learning rates of one climb at most.
_CLIPS = {'DPSGD': (3.0, 12.0, 1.0, .3), 'DPAdam': (1.0, 3.0, 12.0, .3),
          'DPKFC': (1.0, 3.0), 'DPAdamSTP': (1.0, .25)}
_PUBLIC_RATE = .1  # First learning rate from public weights.
_SMALLER = (1, NOTCH**-1, NOTCH**-2)  # Rates for weights that more examples learned.
_ENOUGH = 200  # Public examples that judge what is learned from the others.
_WORSE = 3.0  # Standard errors by which inputs are worse that are tried last.
_KEPT = 3  # Inputs and starts that are searched closely.
_SEARCHED = 0,  # The first fold of the search; all folds judge what it finds.
_AGAIN = 1  # Seed of the last judgement.
_TRAININGS = 60  # Approximate number of trainings of a search.
_SLOWEST = 64  # The most steps of a plan that one step of a trial stands for.
_SEARCH, _END = .7, .92  # Shares of the time at which parts end.


class Final(NamedTuple):
  """Estimates for training with all public examples, and on the private ones."""

  judged: settings_lib.Judged
  clean: float  # Loss without noise.


class Search:
  """Finds the best settings.

  Args:
    experiment: Trains and judges.
    clock: Ends the search in time.
  """

  def __init__(
      self, experiment: experiment_lib.Experiment, clock: settings_lib.Clock) -> None:
    self.experiment, self._clock = experiment, clock
    self.folds: Sequence[int] = _SEARCHED
    self._clean: Dict[settings_lib.Setting, Dict[int, np.ndarray]] = {}  # Clean losses by fold.

  def public_alone(self) -> None:
    """Finds how to train on the public examples alone, for all kinds of inputs.

    Each training judges several folds, so that few examples do not fix its number of steps.
    """
    experiment, tried = self.experiment, self.experiment.try_alone
    few = range(min(experiment_lib.FOLDS, -(-_ENOUGH * experiment_lib.FOLDS // experiment.count)))
    self._clock.allow(math.inf)
    with contextlib.suppress(settings_lib.OutOfTime):
      for rate in experiment_lib.ALONE_RATES:
        tried(experiment.kinds[0], rate, few)
      for kind in experiment.kinds[1:]:
        tried(kind, experiment.recipes[experiment.kinds[0]][0], few)
      for kind in self.kinds:
        tried(kind, experiment.recipes[kind][0], range(experiment_lib.FOLDS))

  @property
  def kinds(self) -> List[str]:
    """Kinds of inputs that were tried with the public examples alone, the best one first."""
    alone = self.experiment.alone
    return sorted(alone, key=lambda kind: alone[kind].above(alone[self.experiment.kinds[0]])[0])

  def run(self, plans: Iterable[privacy.PrivacyPlan] = ()) -> None:
    """Searches inputs and starts first, then optimizers, clip norms and other plans."""
    experiment = self.experiment
    self._clock.reserve(
        experiment.recipes[self.kinds[0]][1] * experiment.trial.pace.get(trial_lib.ADAM, 0.0))
    self._clock.allow(_SEARCH)
    with contextlib.suppress(settings_lib.OutOfTime):
      folds, likely, others = self._set_fidelity(), *self._split_kinds()
      for kind in likely:
        self._climb_all(kind, ('DPAdam', 'DPSGD')[:2 if kind == likely[0] else 1])
      kept = self._alike(self.ranked())[:_KEPT]
      self.folds = folds
      for one in kept:
        self._climb(one)
      for optimizer, clips in _CLIPS.items():
        if optimizer in experiment.part(self._best().start).rules:
          for clip in clips:
            self._climb_from(optimizer=optimizer, clip=clip)
      self._climb_from(optimizer='DPSGD', momentum=.9)
      self._climb_from(averaged=True)
      for plan in plans:
        experiment.plans.append(plan)
        self._climb_from(noise=len(experiment.plans) - 1)
      for factor in (NOTCH**.5, NOTCH**-.5):
        best = self._best()
        experiment.measure(best._replace(rate=best.rate * factor), self.folds)
      for kind in others:
        self._climb_all(kind, ('DPAdam',))

  def _split_kinds(self) -> Tuple[List[str], List[str]]:
    """Returns the likely kinds of inputs, and those with which the public examples teach less."""
    alone = self.experiment.alone
    more = {kind: alone[kind].above(alone[self.kinds[0]]) for kind in self.kinds}
    worse = [kind for kind, (mean, error) in more.items() if mean > _WORSE * error]
    return [kind for kind in self.kinds if kind not in worse], worse

  def _climb_all(self, kind: str, optimizers: Sequence[str]) -> None:
    for optimizer in optimizers:
      for start in self.experiment.starts:
        self._climb(settings_lib.Setting(
            kind, start, optimizer, clip=_CLIPS[optimizer][0],
            rate=1.0 if start == settings_lib.GIVEN else _PUBLIC_RATE))

  def finals(self) -> None:
    """Judges the best settings again, with other noise: that of the search was lucky.

    The next fold judges the setting that leads so far. If it was lucky before, others follow.
    """
    self._clock.allow(_END)
    if not self.ranked():  # Time was up when the second fold began.
      self.folds = self.folds[:1]
    ranked, groups = self.ranked(), self._alike(self.ranked(_SEARCHED))
    public = [one for one in groups if one.start != settings_lib.GIVEN][:1]
    smaller = [one._replace(rate=one.rate * factor) for one in public for factor in _SMALLER]
    rest = list(dict.fromkeys([*ranked[:1], *smaller, *ranked[1:3], *groups]))
    with contextlib.suppress(settings_lib.OutOfTime):
      for one in rest:
        self._again(one)
      while waiting := list(filter(self._unjudged, self._clean)):
        found = self.judged()
        self._again(min(waiting, key=lambda one: self._lead(found[one])))

  def _unjudged(self, setting: settings_lib.Setting) -> List[int]:
    """Returns the folds that can judge a setting again and have not."""
    alone = self.experiment.alone
    return sorted(alone[self.kinds[0]].folds & alone[self._kind(setting)].folds
                  - set(self._clean.get(setting, ())))

  def _again(self, setting: settings_lib.Setting) -> None:
    for fold in self._unjudged(setting)[:1]:
      self.experiment.measure(setting, [fold], _AGAIN)
      self._clean.setdefault(setting, {})[fold] = self.experiment.clean(setting, fold)

  def _lead(self, final: Final) -> float:
    """Returns by how much a loss is above that of the public examples alone, on the same folds."""
    return final.judged.above(self.experiment.alone[self.kinds[0]])[0]

  def _kind(self, setting: settings_lib.Setting) -> str:
    """Returns the kind of inputs of the public training that a setting is compared with."""
    return self.kinds[0] if setting.start == settings_lib.GIVEN else setting.inputs

  def judged(self) -> Dict[settings_lib.Setting, Final]:
    """Returns the estimates of the best settings, the best one first.

    Settings that fewer folds have judged come later: a fold that left them out was less lucky.

    Let A be the loss of n public examples (`experiment` defines A, h and f), and G the gain of N
    private examples without noise over A. Let q be the loss of a setting without noise, and Q the
    smallest q. G is the mean of two estimates: 4 / 3 (h - f) (1 - n / N), if losses fall as
    L + a / n, and A - Q, from the charged losses. Training from public weights gains
    G (h - q) / (h - Q), other training G - (q - Q). The cost of noise is the one measured here.
    """
    experiment, found = self.experiment, {}
    if not self._clean:  # Without a second judgement, the first one is all there is.
      return {one: Final(experiment.judged[one], experiment.judged[one].loss)
              for one in self.ranked()[:1]}
    reference = experiment.alone[self.kinds[0]]

    def level(losses: Dict[int, np.ndarray]) -> float:
      """Returns a mean loss; some settings were judged on easier folds than others."""
      more = [losses[fold] - reference.of(fold) for fold in losses]
      return reference.loss + float(np.mean(np.concatenate(more)))

    cleans = {one: level(clean) for one, clean in self._clean.items()}
    least = min(cleans.values())
    fresh = max(0.0, 1 - experiment.count / (experiment.plans[0].population_size or math.inf))
    for one, clean in self._clean.items():
      kind = self._kind(one)
      alone, more, halves = experiment.alone[kind], experiment.gained(kind), experiment.halves
      gain = .5 * max(0.0, alone.loss - more / 3 - least)
      judged, part, lost = settings_lib.Judged(), 1.0, cleans[one] - least
      if one.start != settings_lib.GIVEN:
        half = level({fold: halves[kind, fold] for fold in clean})
        part = max(0.0, half - cleans[one]) / max(half - least, 1e-12)
        lost = max(0.0, cleans[one] - half)
      for (fold, seed), (losses, metric, outputs) in experiment.judged[one].items():
        if seed == _AGAIN and fold in clean:
          public = alone.of(fold)
          own = halves[kind, fold] - public if more and (kind, fold) in halves else more
          judged.note((fold, 0), public - more / 3 - part * (gain + 2 / 3 * fresh * own) + lost
                      + losses - clean[fold], metric, outputs)
      noise = level({fold: experiment.judged[one][fold, _AGAIN][0] for fold in clean}) - cleans[one]
      found[one] = Final(judged, judged.loss - noise)
    ahead = lambda one: (-len(found[one].judged.folds), self._lead(found[one]))
    order: List[settings_lib.Setting] = []
    for one in sorted(found, key=ahead):
      leads = order and len(found[one].judged.folds) == len(found[order[0]].judged.folds) and (
          settings_lib.better(found[one].judged, found[order[0]].judged))
      order.insert(0 if leads else len(order), one)
    return {one: found[one] for one in order}

  def _climb(self, setting: settings_lib.Setting) -> None:
    """Moves the learning rate in the direction in which the loss falls."""
    loss = lambda one: self.experiment.measure(one, self.folds).loss
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

  def _climb_from(self, **change: Any) -> None:
    """Changes the best setting, and its rate to the best one of this optimizer so far."""
    one = self._best()._replace(**change)
    known = self.ranked(inputs=one.inputs, start=one.start, optimizer=one.optimizer)
    self._climb(one._replace(rate=known[0].rate) if known else one)

  def _set_fidelity(self) -> Sequence[int]:
    """Lets a step of the trial stand for several of the plan, if the model is slow.

    Returns:
      The folds of the search.
    """
    experiment, probe = self.experiment, settings_lib.Setting()
    pace = experiment_lib.PRIVATE * experiment.trial.pace.get(trial_lib.ADAM, math.inf)
    wanted = lambda: _TRAININGS * pace * experiment.steps(probe)
    while wanted() > self._clock.left and experiment.coarse < _SLOWEST and (
        experiment.steps(probe) > 50):
      experiment.coarse *= 2
    count = min(self._clock.left / max(wanted(), 1e-9), len(experiment.alone[self.kinds[0]].folds))
    return range(max(1, int(count)))

  def _best(self) -> settings_lib.Setting:
    return self.ranked()[0]

  def _alike(self, settings: Sequence[settings_lib.Setting]) -> List[settings_lib.Setting]:
    """Returns the first setting of each kind of inputs and start."""
    first: Dict[Any, settings_lib.Setting] = {}
    for one in settings:
      first.setdefault(one[:2], one)
    return list(first.values())

  def ranked(self, folds: Sequence[int] = (), **alike: str) -> List[settings_lib.Setting]:
    """Returns the settings with these values that the folds have judged, the best one first."""
    judged = self.experiment.judged
    return sorted((one for one in judged
                   if all((fold, 0) in judged[one] for fold in folds or self.folds)
                   and all(getattr(one, name) == value for name, value in alike.items())),
                  key=lambda one: judged[one].loss)
