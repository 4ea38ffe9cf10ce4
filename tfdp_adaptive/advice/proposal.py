# SPDX-License-Identifier: Apache-2.0
"""Compares what was tried, and proposes the best of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, Tuple

from tfdp_adaptive import privacy
from tfdp_adaptive.advice import experiment as experiment_lib
from tfdp_adaptive.advice import inputs as inputs_lib
from tfdp_adaptive.advice import outputs as outputs_lib
from tfdp_adaptive.advice import recommendation
from tfdp_adaptive.advice import search as search_lib
from tfdp_adaptive.advice import settings as settings_lib

_ERRORS = 1.0  # Standard errors by which private training must be better to be proposed.
_ALONE = 'public examples alone, without privacy'


def made(origin: recommendation.Origin, search: search_lib.Search
         ) -> recommendation.Recommendation:
  """Returns the best of the private settings, of the public examples alone, and of no training."""
  experiment, finals = search.experiment, search.judged()
  alone = _best(experiment.alone)
  rows = {'not trained': experiment.untrained}
  if alone:
    rows[_ALONE] = experiment.alone[alone].shifted(-experiment.gained(alone) / 3)
  winner = _best(rows)
  first = next(iter(finals), None) if alone else None  # Private ones are compared with it.
  if first is None:
    reason = ('The public examples alone, or private training, could not be tried in time: give '
              'more `seconds`.')
  else:
    most = len(finals[first].judged.folds)
    first = next((one for one, final in finals.items() if len(final.judged.folds) == most
                  and settings_lib.better(final.judged, rows[winner], _ERRORS)), first)
    for one in (first, *finals):  # The first of settings that differ in numbers alone.
      rows.setdefault(_name(experiment, one), finals[one].judged)
    best, last = _name(experiment, first), outputs_lib.last_dense(origin.model)
    reason = ''
    # The public examples cannot calibrate weights that learned them.
    if last is not None and first.start == settings_lib.GIVEN:
      name = f'{best}, calibrated'
      rows[name] = experiment.calibrated(finals[first].judged, last.activation.__name__)
      if settings_lib.better(rows[name], rows[best]):
        best, reason = name, 'Call `found.calibrate(model)` after the training.'
    if settings_lib.better(rows[best], rows[winner], _ERRORS):
      winner = best
    else:
      reason = _needed(experiment.plans[first.noise], finals[first], rows[winner].loss)
      first = None
  plan, method = None, None
  settings: Dict[str, float | bool] = {}
  if first is not None:
    clip, settings = _settings(experiment, first)
    plan = dataclasses.replace(experiment.plans[first.noise], l2_norm_clip=clip)
    method = first.optimizer
    origin = origin._replace(inputs=experiment.map(first.inputs),
                             last=first.start == settings_lib.LAST)
  kind = first.inputs if first is not None and first.start != settings_lib.GIVEN else alone
  if winner == _ALONE or first is not None and first.start != settings_lib.GIVEN:
    rate, steps = experiment.recipes[kind]
    origin = origin._replace(
        inputs=experiment.map(kind), recipe=(rate * experiment.plain_unit(kind, None), steps),
        weights=experiment.weights(kind, settings_lib.PUBLIC, None))
  shown = []
  for name, one in rows.items():
    more, error = one.above(rows[winner])
    metric = experiment.judge.sign * one.metric if experiment.judge else None
    shown.append(recommendation.Row(name, rows[winner].loss + more, metric, more, 1.96 * error))
  return recommendation.Recommendation(
      plan, method, settings, tuple(shown), (f'Proposed: {winner}.', *[reason] * bool(reason)),
      experiment.judge.name, origin)


def _best(judged: Dict[str, settings_lib.Judged]) -> str:
  """Returns the name of the best one; '' of none."""
  found = ''
  for name, one in judged.items():
    if not found or settings_lib.better(one, judged[found]):
      found = name
  return found


def _needed(plan: privacy.PrivacyPlan, final: search_lib.Final, loss: float) -> str:
  """Returns what would make the best private setting as good as the proposal, in words.

  What noise adds to a loss is taken to grow with its square.
  """
  more, room = final.judged.loss - final.clean, loss - final.clean
  if room >= more:
    return 'Nothing private that was tried is better by more than the error of this comparison.'
  if room <= 0:
    return ('Nothing private that was tried is better, and without any noise it is not: more '
            'private examples would not help this model.')
  factor = math.sqrt(room / more)
  less = dataclasses.replace(plan, noise_multiplier=factor * plan.noise_multiplier)
  return ('Nothing private that was tried is better: more private examples or a larger epsilon '
          f'are needed, about {(plan.population_size or 0) / factor:.2g} examples or epsilon '
          f'{less.epsilon():.2g}.')


def _settings(experiment: experiment_lib.Experiment, setting: settings_lib.Setting
              ) -> Tuple[float, Dict[str, float | bool]]:
  """Returns the clip norm, and the other arguments of the optimizer class."""
  clip, rate = experiment.settled(setting)
  settings: Dict[str, float | bool] = dict(learning_rate=rate)
  coordinate, rounded = experiment.part(setting.start).coordinate, experiment_lib.rounded
  if setting.momentum:
    settings['momentum'] = setting.momentum
  if setting.optimizer == 'DPAdam':
    settings['epsilon'] = rounded(1e-3 * coordinate)
  if setting.optimizer == 'DPAdamSTP':
    settings.update(epsilon=rounded(1e-8 * coordinate),
                    scale_epsilon=rounded(experiment_lib.SCALE_EPSILON * coordinate))
  if setting.averaged:
    steps = experiment.plans[setting.noise].steps
    settings.update(use_ema=True, ema_momentum=rounded(experiment_lib.decay_of(steps)))
  return clip, settings


def _name(experiment: experiment_lib.Experiment, setting: settings_lib.Setting) -> str:
  plan, first = experiment.plans[setting.noise], experiment.plans[0]
  parts = [
      (setting.optimizer, True),
      ('momentum .9', setting.momentum),
      (f'inputs {setting.inputs}', setting.inputs != inputs_lib.AS_GIVEN),
      ('from public weights', setting.start == settings_lib.PUBLIC),
      ('last layer alone, from public weights', setting.start == settings_lib.LAST),
      ('averaged', setting.averaged),
      ('banded noise', plan.mechanism.bands != 1),
      (f'{plan.steps} steps', plan.steps != first.steps)]
  return ', '.join(text for text, there in parts if there)
