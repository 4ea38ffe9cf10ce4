# SPDX-License-Identifier: Apache-2.0
"""`tfdp.recommend`: tries on public examples how good a model can be at an epsilon."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privacy
from tfdp_adaptive.accounting import sampling as sampling_lib
from tfdp_adaptive.advice import choice
from tfdp_adaptive.advice import experiment as experiment_lib
from tfdp_adaptive.advice import inputs as inputs_lib
from tfdp_adaptive.advice import outputs as outputs_lib
from tfdp_adaptive.advice import recommendation
from tfdp_adaptive.advice import search as search_lib
from tfdp_adaptive.advice import settings as settings_lib
from tfdp_adaptive.independence import validation
from tfdp_adaptive.trees import Tree

_FEWEST = 20  # Public examples.
_BLIND_RATE = .17  # Times 1 / sqrt(T), without public examples.
_ERRORS = 1.0  # Standard errors by which private training must be better to be proposed.
_ALONE = 'public examples alone, without privacy'
_BELOW = (
    'Rows with a smaller loss than the proposal were judged by fewer examples, or their metric or '
    'the error of their loss is larger.')
_EXTRAPOLATED = (
    'Losses of private rows are extrapolated from the public examples to the number of private '
    'ones. They order the rows; the loss after training may be far from them.')


def recommend(
    model: compat.Model, public: Optional[Tuple[Tree, Tree]] = None, *, loss: object = None,
    metrics: Sequence[object] = (),
    population_size: int, target_epsilon: float, target_delta: Optional[float] = None,
    batch_size: Optional[float] = None, steps: Optional[int] = None, seconds: float = 120.0,
    sampling: Optional[sampling_lib.Sampling] = None,
    mechanism: Optional[mechanisms.Mechanism] = None, gradient_norm: Optional[float] = None,
    seed: int = 0, verbose: int = 1, **fields: Any) -> recommendation.Recommendation:
  """Recommends how to train a model privately, or says that public examples alone are better.

  It trains the model on the public examples with the noise of the plan, and compares: the model as
  it is; the model trained on the public examples alone, without privacy; private training as the
  model is, with inputs scaled or whitened by public statistics, from weights that were trained on
  the public examples, and of the last layer alone; and outputs that are calibrated on the public
  examples afterwards. It tries DP-SGD, DP-Adam, scale-then-privatize and DP-KFC, clip norms,
  learning rates, schedules and correlated noise. Private training is proposed only if it beats the
  public examples alone by more than the error of the comparison.

  Args:
    model: A Keras model with the weights that training starts from. It does not change until you
      read `found.model`.
    public: PUBLIC examples `(x, y)`, 20 or more; a few hundred are better. None for a rough guess
      from `gradient_norm`.
    loss: As in `compile`; by default that of the compiled model.
    metrics: As in `compile`. The first metric decides. If two settings are equal, the loss decides.
      A larger value is better, unless its name contains a word such as 'error', 'loss' or 'false'.
    population_size: Number N of private examples (users), which is taken as public.
    target_epsilon: Epsilon of the plan.
    target_delta: None for the largest power of ten below 1 / N.
    batch_size: Expected batch size. By default a tenth of N or more.
    steps: Number of steps; 300 by default.
    seconds: The time to search for.
    sampling: The sampling scheme, if you cannot choose it; as in `PrivacyPlan`.
    mechanism: The noise, if you cannot choose it.
    gradient_norm: The typical norm of a gradient, if there are no public examples. You can compute
      it on made-up examples in the units of the real ones. With such a guess, the loss was up to
      1.5 times that of settings that were tried on 300 public examples.
    seed: Fixes the random numbers of the search. The same seed gives the same answer, unless the
      time limit (`seconds`) ends the search earlier.
    verbose: 0 prints no progress.
    **fields: Other fields of the plan, such as `adjacency` or `unit`, but no clip norm.

  Returns:
    A `Recommendation`. It costs no privacy. Ctrl-C returns the best found so far.

  Examples:
    >>> model = compat.keras.Sequential([compat.keras.layers.Dense(1, activation='sigmoid')])
    >>> x = np.random.default_rng(0).normal(size=[80, 4]).astype(np.float32)  # A PUBLIC sample.
    >>> found = recommend(
    ...     model, (x, (x[:, 0] > 0).astype(np.float32)), loss='binary_crossentropy',
    ...     population_size=10_000, target_epsilon=1.0, seconds=5, verbose=0)
    >>> [row.name for row in found.rows][:2]
    ['not trained', 'public examples alone, without privacy']
  """
  clock = settings_lib.Clock(seconds, verbose)
  checks.whole(population_size=population_size)
  checks.positive(target_epsilon=target_epsilon, seconds=seconds)
  checks.require('l2_norm_clip' not in fields, 'be recommended, not given',
                 l2_norm_clip=fields.get('l2_norm_clip'))
  if (public is None) == (gradient_norm is None):
    raise ValueError('Give `public=(x, y)`, or `gradient_norm` of made-up examples in the units of '
                     'the real ones: without either, settings could make the model worse. '
                     f'Received: public: {public is not None}, gradient_norm={gradient_norm}.')
  target_delta = target_delta or choice.default_delta(population_size)
  if public is None:  # Nothing tells plans apart.
    checks.positive(gradient_norm=gradient_norm)
    sampling = sampling or sampling_lib.Poisson()
  else:
    public, loss = _checked(model, public), _loss(model, loss)
  plans = choice.candidates(
      population_size, batch_size, steps, sampling, mechanism, target_epsilon=target_epsilon,
      target_delta=target_delta, **fields)
  plan = next(plans)
  if public is None:
    return _blind(model, plan, float(gradient_norm or 0))
  return _searched(model, *public, loss, metrics, plan, plans, seed, clock)


def _loss(model: compat.Model, loss: object) -> object:
  loss = getattr(model, 'loss', None) or None if loss is None else loss  # Keras 2 has {}.
  checks.require(loss, 'be given, as in `compile`, for a model that is not compiled', loss=loss)
  return loss


def _checked(model: compat.Model, public: Any) -> Tuple[Tree, Tree]:
  """Returns the public examples as arrays, or raises a ValueError; builds the model."""
  checks.require(isinstance(public, (tuple, list)) and len(public) == 2,
                 'be a pair `(x, y)` of arrays', public=type(public).__name__)
  x, y = (tf.nest.map_structure(recommendation.array, part) for part in public)
  if any(not part.ndim or part.dtype.kind not in 'biuf' for part in tf.nest.flatten(y)) or any(
      not part.ndim for part in tf.nest.flatten(x)):
    raise ValueError('`public` must hold arrays, and targets that are numbers. Received: lists, '
                     'single values or targets that are no numbers.')
  counts = {len(part) for part in tf.nest.flatten((x, y))}
  if len(counts) != 1 or min(counts) < _FEWEST:
    raise ValueError(f'`public` must hold {_FEWEST} examples or more, as many inputs as targets. '
                     f'Received: arrays of {sorted(counts)} examples. Collect or make up more, or '
                     'pass `gradient_norm` instead.')
  for part in tf.nest.flatten((x, y)):
    if part.dtype.kind == 'f' and not np.isfinite(part).all():
      raise ValueError('`public` must be finite. Received: NaN or infinity in an array of shape '
                       f'{part.shape}.')
  try:
    model(tf.nest.map_structure(lambda part: part[:2], x))
  except Exception as error:
    raise ValueError('`model` must take the inputs of `public`. Received: inputs of shape '
                     f'{tf.nest.map_structure(np.shape, x)} ({str(error)[:200]}).') from error
  checks.require(model.trainable_variables, 'have trainable variables', model=model.name)
  return x, y


def _blind(model: compat.Model, plan: privacy.PrivacyPlan, clip: float
           ) -> recommendation.Recommendation:
  """Returns DP-Adam, whose steps have a size of their own, whatever the gradients are."""
  return recommendation.Recommendation(
      dataclasses.replace(plan, l2_norm_clip=clip), 'DPAdam',
      dict(learning_rate=experiment_lib.rounded(_BLIND_RATE / math.sqrt(plan.steps)),
           epsilon=clip * experiment_lib.floor(plan)), (),
      ('There are no public examples to try settings on: this is a guess. DP-Adam is proposed '
       'since the size of its steps does not depend on the gradients. A few hundred public '
       'examples would also tell whether private training is worth it.',), '',
      recommendation.Origin(model))


def _searched(model: compat.Model, x: Tree, y: Tree, loss: object, metrics: Sequence[object],
              plan: privacy.PrivacyPlan, others: Iterator[privacy.PrivacyPlan], seed: int,
              clock: settings_lib.Clock) -> recommendation.Recommendation:
  """Searches, and puts the model back as it was."""
  specs = tf.nest.map_structure(lambda part: tf.TensorSpec(
      [None, *part.shape[1:]], tf.as_dtype(part.dtype)), x)
  validation.validate_model(model, specs)
  layers = inputs_lib.chain(model, x)
  part, features, front = inputs_lib.behind_frozen(layers, model, x)
  experiment = experiment_lib.Experiment(
      part, layers[front:], loss, metrics, features, y, [plan], seed, clock)
  search = search_lib.Search(experiment, clock)
  try:
    try:
      search.public_alone()
      search.run(others)
      search.finals()
    except KeyboardInterrupt:
      if not experiment.alone:  # There is no result yet.
        raise
    clock.allow(math.inf)  # The proposed model is trained, whatever the time.
    return proposed(
        recommendation.Origin(model, experiment.trial.loss, x, y, layers, front), search)
  finally:
    experiment.trial.restore()
    clock.end()


def proposed(origin: recommendation.Origin, search: search_lib.Search
             ) -> recommendation.Recommendation:
  """Returns the best of the private settings, of the public examples alone, and of no training."""
  experiment, finals = search.experiment, search.judged()
  alone = _best(experiment.alone)
  rows = {'not trained': experiment.untrained,
          _ALONE: experiment.alone[alone].shifted(-experiment.gained(alone) / 3)}
  winner, chosen = _best(rows), None
  reason = 'Private training could not be tried in time: give more `seconds`.'
  if finals:
    first = next(iter(finals))
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
      winner, chosen = best, first
    else:
      reason = _needed(experiment.plans[first.noise], finals[first], rows[winner])
  plan, method = None, None
  settings: Dict[str, float | bool] = {}
  if chosen is not None:
    clip, settings = _settings(experiment, chosen)
    plan = dataclasses.replace(
        experiment.plans[chosen.noise], l2_norm_clip=clip, public=tuple(tf.nest.flatten(origin.x)))
    method = chosen.optimizer
    origin = origin._replace(inputs=experiment.map(chosen.inputs),
                             last=chosen.start == settings_lib.LAST)
  if winner == _ALONE or chosen is not None and chosen.start != settings_lib.GIVEN:
    kind = alone if chosen is None else chosen.inputs
    rate, steps = experiment.recipes[kind]
    origin = origin._replace(
        inputs=experiment.map(kind), recipe=(rate * experiment.plain_unit(kind, None), steps),
        weights=experiment.weights(kind, settings_lib.PUBLIC, None))
  shown = []
  for name, one in rows.items():
    more, error = one.above(rows[winner])
    metric = experiment.judge.sign * one.metric if experiment.judge else None
    shown.append(recommendation.Row(name, rows[winner].loss + more, metric, more, 1.96 * error))
  below = any(row.more < 0 for row in shown)
  return recommendation.Recommendation(
      plan, method, settings, tuple(shown),
      (f'Proposed: {winner}.', *[reason] * bool(reason), *[_BELOW] * below,
       *[_EXTRAPOLATED] * bool(finals)), experiment.judge.name, origin)


def _best(judged: Dict[str, settings_lib.Judged]) -> str:
  """Returns the name of the best one."""
  return functools.reduce(lambda found, name: (
      name if settings_lib.better(judged[name], judged[found]) else found), judged)


def _needed(plan: privacy.PrivacyPlan, final: search_lib.Final, winner: settings_lib.Judged) -> str:
  """Returns what would make the best private setting as good as the proposal, in words.

  What noise adds to a loss is taken to grow with its square.
  """
  noise, (more, _) = final.judged.loss - final.clean, final.judged.above(winner)
  if more <= 0:
    return 'Nothing private that was tried is better by more than the error of this comparison.'
  if more >= noise:
    return ('Nothing private that was tried is better, nor would it be without any noise: these '
            'trials do not show that more private examples would help.')
  factor = math.sqrt(1 - more / noise)
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
