# SPDX-License-Identifier: Apache-2.0
"""Searches settings of private training by successive halving, within seconds."""

from __future__ import annotations

import math
from typing import List, Sequence

from tfdp_adaptive.advice import experiment as experiment_lib
from tfdp_adaptive.advice import settings as settings_lib
from tfdp_adaptive.advice import trial as trial_lib

NOTCH = 10**.5  # Between learning rates.
_CLIMB = 5  # Learning rates of one climb at most.
_CLIPS = {'DPSGD': (3.0, 12.0, 1.0, .3), 'DPAdam': (1.0, 3.0, 12.0, .3),
          'DPAdamSTP': (1.0, .25, 4.0), 'DPKFC': (1.0, 3.0, .3)}
_LEAST_STEPS = 256  # Steps on the public examples alone before anything else is tried.
_KEPT = 3  # Starts, and then rules, that are looked at closely.
_SEARCHED = 0, 2  # Folds of the search; all folds judge what it finds.
_TRAININGS = 100  # About so many are wanted.
_PRIVATE = 2.0  # Time of a private step over that of a plain one.
_SLOWEST = 64  # The most steps of a plan that one step of a trial stands for.


class Search:
  """Finds the best settings.

  Args:
    experiment: Trains and judges.
    clock: Ends the search in time.
  """

  def __init__(
      self, experiment: experiment_lib.Experiment, clock: settings_lib.Clock) -> None:
    self.experiment, self._clock = experiment, clock
    self.folds: Sequence[int] = _SEARCHED[:1]

  def public_alone(self) -> None:
    """Finds how to train on the public examples alone, for all kinds of inputs."""
    experiment = self.experiment
    self._clock.allow(math.inf)  # One training at least, since it may be the best.
    try:
      for kind in experiment.kinds:
        experiment.try_alone(kind, self._limit, _SEARCHED)
    except settings_lib.OutOfTime:
      pass
    self._clock.allow(.55)
    try:
      for kind in experiment.alone:
        experiment.judge_alone(kind)
    except settings_lib.OutOfTime:
      pass

  def _limit(self, rates: int, steps: int) -> None:
    """Gives the first training on the public examples alone all the time, and others less."""
    self._clock.allow(.3 if rates else .5 if steps >= _LEAST_STEPS else 1.0)

  def run(self) -> None:
    """Searches inputs and starts first, then optimizers and clip norms."""
    self._clock.allow(.7)
    try:
      folds = self._set_fidelity()
      starts = self.experiment.starts
      for kind, start in starts:
        self._climb(settings_lib.Setting(
            kind, start, 'DPAdam', clip=1.0, rate=1.0 if start == settings_lib.GIVEN else .1))
      ranked = sorted((self.ranked(inputs=kind, start=start)[0] for kind, start in starts),
                      key=self._loss)
      self.folds = folds
      for one in ranked[:_KEPT]:
        self._climb(one)
        self._climb(one._replace(optimizer='DPSGD', clip=_CLIPS['DPSGD'][0]))
      best = self._best()
      rules = [one for one in self.experiment.part(best.start).rules if one != trial_lib.ADAM]
      for rule in rules:
        self._climb_rule(best, rule, _CLIPS[rule.split()[0]][:1])
      for rule in sorted(rules, key=lambda one: self._loss(self._of_rule(best, one)))[:_KEPT]:
        self._climb_rule(best, rule, _CLIPS[rule.split()[0]][1:])
      for noise in range(1, len(self.experiment.plans)):
        self._climb(self._best()._replace(noise=noise))
      self._climb(self._best()._replace(averaged=True))
      for factor in (NOTCH**.5, NOTCH**-.5):
        best = self._best()
        self.experiment.measure(best._replace(rate=best.rate * factor), self.folds)
    except settings_lib.OutOfTime:
      pass

  def finals(self) -> List[settings_lib.Setting]:
    """Judges the best settings again, on all folds and with other noise, the best one first.

    The noise that was lucky in the search counts no more.
    """
    self._clock.allow(.9)
    if not self.ranked():  # Time was up when the second fold began.
      self.folds = self.folds[:1]
    ranked = self.ranked()
    accurate = sorted(ranked, key=lambda one: -self.experiment.judged[one].metric)
    best = list(dict.fromkeys(
        ranked[:3] + accurate[:2] * bool(self.experiment.judge)))
    # The best of each kind and start.
    alike = {one[:2]: one for one in reversed(self.ranked(_SEARCHED[:1]))}
    done: List[settings_lib.Setting] = []
    try:
      for one in dict.fromkeys([*best, *alike.values()]):
        self._again(one, range(experiment_lib.FOLDS) if one in best else self.folds, (1,))
        done.append(one)
    except settings_lib.OutOfTime:
      pass
    judged = self.experiment.judged
    for one in list(done):
      if settings_lib.better(judged[one], judged[done[0]]):
        done.remove(one)
        done.insert(0, one)
    try:  # The best of many was lucky, too: other noise says how good it is.
      for one in done[:1]:
        self._again(one, range(experiment_lib.FOLDS), (2, 3))
    except settings_lib.OutOfTime:
      pass
    return done

  def _again(self, setting: settings_lib.Setting, folds: Sequence[int], seeds: Sequence[int]
             ) -> None:
    """Judges a setting anew; what was known stays if there is no time."""
    known = self.experiment.judged.pop(setting)
    try:
      self.experiment.measure(setting, folds, seeds)
    except settings_lib.OutOfTime:
      self.experiment.judged[setting] = known
      raise

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

  def _set_fidelity(self) -> Sequence[int]:
    """Lets a step of the trial stand for several of the plan, if the model is slow.

    Returns:
      The folds of the search.
    """
    experiment, probe = self.experiment, settings_lib.Setting()
    pace = _PRIVATE * experiment.trial.pace.get(trial_lib.ADAM, math.inf)
    wanted = lambda: _TRAININGS * pace * experiment.steps(probe)
    while wanted() > self._clock.left and experiment.coarse < _SLOWEST and (
        experiment.steps(probe) > 50):
      experiment.coarse *= 2
    return _SEARCHED[:2 if 2 * wanted() < self._clock.left else 1]

  def _climb_rule(self, best: settings_lib.Setting, rule: str, clips: Sequence[float]) -> None:
    """Tries clip norms of a rule, from its best rate so far."""
    optimizer, momentum = rule.split()
    for clip in clips:
      self._climb(best._replace(optimizer=optimizer, momentum=float(momentum), clip=clip,
                                rate=self._of_rule(best, rule).rate))

  def _of_rule(self, best: settings_lib.Setting, rule: str) -> settings_lib.Setting:
    """Returns the best setting of a rule with these inputs and start; `best` if there is none."""
    return (self.ranked(inputs=best.inputs, start=best.start, rule=rule) or [best])[0]

  def _best(self) -> settings_lib.Setting:
    return self.ranked()[0]

  def ranked(self, folds: Sequence[int] = (), **alike: str) -> List[settings_lib.Setting]:
    """Returns the settings with these values that the folds have judged, the best one first."""
    return sorted((one for one, judged in self.experiment.judged.items()
                   if all((fold, 0) in judged.losses for fold in folds or self.folds)
                   and all(getattr(one, name) == value for name, value in alike.items())),
                  key=self._loss)

  def _loss(self, setting: settings_lib.Setting) -> float:
    return self.experiment.judged[setting].loss
