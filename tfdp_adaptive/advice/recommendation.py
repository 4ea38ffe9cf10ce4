# SPDX-License-Identifier: Apache-2.0
"""`tfdp.recommend`: the best that a model can be at an epsilon, tried on public examples."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privacy
from tfdp_adaptive.accounting import sampling as sampling_lib
from tfdp_adaptive.advice import choice
from tfdp_adaptive.advice import inputs as inputs_lib
from tfdp_adaptive.advice import outputs as outputs_lib
from tfdp_adaptive.advice import search as search_lib
from tfdp_adaptive.advice import trial as trial_lib
from tfdp_adaptive.advice import user_level
from tfdp_adaptive.independence import validation
from tfdp_adaptive.keras import named_optimizers
from tfdp_adaptive.keras import private

FEWEST = 20  # Public examples.
_BANDS = (2, 4, 8, 16, 32)
_STEPS, _EPOCHS = 300, 30  # Used where batch size and steps are not given.
_LEAST_BATCH = 256
_BLIND_RATE = .17  # Times 1 / sqrt(T), without public examples.


class Row(NamedTuple):
  """A row of the table that a recommendation prints.

  Attributes:
    name: What was tried.
    loss: Mean loss of the public examples.
    metric: Value of the user's first metric; None without one.
    more: By how much the loss is above that of the proposal.
    interval: Half the 95% interval of `more`, over examples.
  """

  name: str
  loss: float
  metric: Optional[float]
  more: float
  interval: float


@dataclasses.dataclass(frozen=True)
class Recommendation:
  """The result of `recommend`. Print it to read it.

  Attributes:
    plan: The `PrivacyPlan` to train with; None if nothing private is better than the model
      trained on the public examples alone, or than the model as it is.
    method: Name of the optimizer class; None without a plan.
    settings: Arguments of the class besides `plan`.
    rows: What was tried, as `Row`s.
    reasons: Sentences that say why, and how sure the result is.
    metric: Name of the metric; '' without one.
  """

  plan: Optional[privacy.PrivacyPlan]
  method: Optional[str]
  settings: Dict[str, Any]
  rows: Tuple[Row, ...]
  reasons: Tuple[str, ...]
  metric: str = ''
  _given: Any = dataclasses.field(default=None, repr=False)  # The user's model.
  _inputs: inputs_lib.Inputs = dataclasses.field(default=inputs_lib.Inputs(), repr=False)
  _weights: Any = dataclasses.field(default=None, repr=False)  # Public ones, or None.
  _public: Any = dataclasses.field(default=None, repr=False)  # `(x, y, loss, recipe)`.
  _frozen: int = dataclasses.field(default=0, repr=False)  # Layers in front of the scales.

  @functools.cached_property
  def model(self) -> Any:
    """The private model to train, or the trained one if there is no plan.

    It is made when it is first read, and shares its layers with the model that was given. Public
    scales of the inputs are layers of it, and weights of a public start are assigned.
    """
    if self._weights is not None:
      for variable, value in zip(self._given.trainable_variables, self._weights):
        variable.assign(tf.cast(value, variable.dtype))
    layers = self._inputs.layers(_source(self._public)) if self._public else []
    if not layers:
      return private.make_private(self._given)
    keras = compat.keras
    entry = keras.layers.Input(np.shape(self._public[0])[1:], dtype=self._public[0].dtype)
    chain = _chain(self._given, self._public[0])
    if chain:
      return private.DPSequential(
          [entry, *chain[:self._frozen], *layers, *chain[self._frozen:]])
    value = entry
    for layer in layers:
      value = layer(value)
    return private.make_private(keras.Model(entry, self._given(value)))

  def optimizer(self) -> Any:
    """Returns a new optimizer for `model`, for one run of the plan."""
    if self.plan is None:
      raise ValueError('There is no private optimizer to use: the model without private training '
                       'is proposed, which `found.model` is. Received: plan=None.')
    settings = dict(self.settings)
    if 'learning_rate' in settings and not settings.get('use_ema'):
      settings['learning_rate'] = compat.keras.optimizers.schedules.PolynomialDecay(
          settings['learning_rate'], self.plan.steps, 0.0)
    if self.method == 'DPKFC':
      settings['public_data'] = self._public[:2]
    made = getattr(named_optimizers, str(self.method))(plan=self.plan, **settings)
    if self._public is not None:
      more = [text for text, there in (
          ('the scales of the inputs', self._inputs.kind != inputs_lib.AS_GIVEN),
          ('the weights that training started from', self._weights is not None)) if there]
      made.run.note(f'{_source(self._public)}, which cost no privacy, were used for '
                    f'{" and ".join(["the settings", *more])}.')
    return made

  def batches(self, data: Any, **kwargs: Any) -> Any:
    """Returns `plan.batches(data)`, if no public example is among the private ones.

    Raises:
      ValueError: If an example of `data`, a tuple of arrays `(x, ...)`, has the inputs of a public
        one. The error names the public examples.
    """
    if self._public is not None and isinstance(data, (tuple, list)):
      public, held = ([tuple(part[i].tobytes() for part in tf.nest.flatten(x))
                       for i in range(len(tf.nest.flatten(x)[0]))]
                      for x in (self._public[0], tf.nest.map_structure(_array, data[0])))
      known = set(held)
      shared = [i for i, example in enumerate(public) if example in known]
      if shared:
        raise ValueError(
            'Public examples must not be among the private ones, which would be used twice. '
            f'Received: {len(shared)} public examples that are in `data`, with the numbers '
            f'{shared[:10]}. Take them out of either.')
    assert self.plan is not None, 'There is no private training in this recommendation.'
    return self.plan.batches(data, **kwargs)

  def calibrate(self, model: Any) -> Tuple[float, np.ndarray]:
    """Fits temperature and bias of a trained model's outputs on the public examples.

    Clipping shrinks the scores of rare classes. The last `Dense` layer takes the new temperature
    and bias. This costs no privacy, because it reads public examples and the model only.

    Returns:
      The temperature and the bias.
    """
    last = outputs_lib.last_dense(self._given)
    if last is None or self._public is None:
      raise ValueError('`model` must end in a `Dense` layer with a bias and the activation linear, '
                       'sigmoid or softmax, and the recommendation must be made of public '
                       f'examples. Received: {model!r}.')
    x, y, loss = self._public[:3]
    fitted = outputs_lib.fit(last.activation.__name__, loss, y, model.predict(x, verbose=0))
    kernel, bias = last.get_weights()
    last.set_weights([fitted[0] * kernel, fitted[0] * bias + fitted[1]])
    return fitted

  def to_dict(self) -> Dict[str, Any]:
    """JSON-serializable."""
    return dict(plan=None if self.plan is None else self.plan.to_json(), method=self.method,
                settings=dict(self.settings), rows=[row._asdict() for row in self.rows],
                reasons=list(self.reasons), metric=self.metric)

  def code(self) -> str:
    """Returns the proposal as lines of Keras, for your own program."""
    lines = ['x, y = public']
    if self._frozen:
      lines.append(f'layers, first = model.layers, {self._frozen}  # Frozen layers come first.')
    if self._inputs.kind != inputs_lib.AS_GIVEN:
      lines += [
          f'scale = keras.layers.Normalization(mean={_listed(self._inputs.mean)},',
          f'                                   variance={_listed(self._inputs.variance)})']
      first = 'scale, '
      if self._inputs.matrix is not None:
        scaled = 'scale(keras.Sequential(layers[:first])(x))' if self._frozen else 'scale(x)'
        lines += [f'covariance = np.cov(np.transpose({scaled}))  # `found.model` adds a ridge.',
                  'values, vectors = np.linalg.eigh(covariance)',
                  'whiten = keras.layers.Dense(len(values), use_bias=False, trainable=False)',
                  'whiten.build([None, len(values)])',
                  'whiten.set_weights([vectors / np.sqrt(values + 1e-3) @ vectors.T])']
        first = 'scale, whiten, '
      lines.append(f'model = keras.Sequential([*layers[:first], {first}*layers[first:]])'
                   if self._frozen else f'model = keras.Sequential([{first}model])')
    if self._weights is not None:
      rate, steps = self._public[3]
      lines += [f'model.compile(keras.optimizers.Adam({search_lib.rounded(rate):g}), loss=loss)',
                f'model.fit(x, y, batch_size={trial_lib.BATCH}, epochs='
                f'{max(1, round(steps * trial_lib.BATCH / _count(self._public)))})']
    if self.plan is not None:
      plan, settings = self.plan, dict(self.settings)
      rate = settings.pop('learning_rate', None)
      lines += [
          f'plan = tfdp.PrivacyPlan.calibrate(target_epsilon={plan.epsilon():.4g}, '
          f'target_delta={plan.target_delta:g},',
          f'    population_size={plan.population_size}, batch_size={plan.batch_size}, '
          f'steps={plan.steps},',
          f'    l2_norm_clip={plan.l2_norm_clip:g}, sampling=tfdp.sampling.{plan.sampling!r},',
          f'    mechanism=tfdp.mechanisms.{_mechanism(plan.mechanism)})',
          'rate = ' + (f'{rate:g}' if settings.get('use_ema') else
                       f'keras.optimizers.schedules.PolynomialDecay({rate:g}, {plan.steps}, 0.0)'),
          f'optimizer = tfdp.{self.method}(rate, plan=plan'
          + ''.join(f', {name}={value!r}' for name, value in settings.items())
          + (', public_data=public)' if self.method == 'DPKFC' else ')'),
          'model = tfdp.make_private(model)', 'model.compile(optimizer, loss=loss)',
          f'model.fit(plan.batches(data), epochs=1, steps_per_epoch={plan.steps})']
    return '\n'.join(lines)

  def __str__(self) -> str:
    lines = []
    if self.rows:
      width = max(len(row.name) for row in self.rows)
      lines.append(f'{"":{width}} {"loss":>9} {self.metric[:10]:>10}   above the proposal')
      for row in self.rows:
        metric = '' if row.metric is None else f'{row.metric:.4g}'
        lines.append(f'{row.name:{width}} {row.loss:9.4g} {metric:>10}' + (
            f'   {row.more:+.3g} +- {row.interval:.2g}' if row.more or row.interval else ''))
      lines.append('')
    return '\n'.join([*lines, *self.reasons])


def recommend(
    model: Any, public: Any = None, *, loss: Any = None, metrics: Sequence[Any] = (),
    population_size: int, target_epsilon: float, target_delta: Optional[float] = None,
    batch_size: Optional[float] = None, steps: Optional[int] = None, seconds: float = 120.0,
    sampling: Optional[sampling_lib.Sampling] = None,
    mechanism: Optional[mechanisms.Mechanism] = None, gradient_norm: Optional[float] = None,
    examples_per_user: Optional[int] = None, likeness: Optional[float] = None, seed: int = 0,
    verbose: int = 1, **fields: Any) -> Recommendation:
  """Recommends how to train a model privately, or says that public examples alone are better.

  It trains the model on the public examples with the noise of the plan, and compares: the model as
  it is; the model trained on the public examples alone, without privacy; private training as the
  model is, with inputs scaled or whitened by public statistics, and from weights that were trained
  on the public examples; and outputs that are calibrated on the public examples afterwards. It
  tries DP-SGD, DP-Adam, scale-then-privatize and DP-KFC, clip norms, learning rates, schedules and
  correlated noise. Nothing private is proposed that is worse than the public examples alone.

  Args:
    model: A Keras model with the weights that training starts from. It stays as it is until
      `found.model` is read.
    public: PUBLIC examples `(x, y)`, 20 or more; a few hundred are better. None for a guess from
      `gradient_norm`.
    loss: As in `compile`; by default that of the compiled model.
    metrics: As in `compile`. The first one judges, and the loss where two settings are level.
    population_size: Number N of private examples (users), public.
    target_epsilon: Epsilon of the plan.
    target_delta: None for the largest power of ten below 1 / N.
    batch_size: Expected batch size. By default a tenth of N or more.
    steps: Number of steps; 300 by default.
    seconds: The time to search for.
    sampling: The sampling scheme, if you cannot choose it; as in `PrivacyPlan`.
    mechanism: The noise, if you cannot choose it.
    gradient_norm: Without public examples: the typical norm of a gradient, for example of
      made-up examples in the units of the real ones. The guess was up to 1.5 times worse than
      settings that were tried on 300 public examples.
    examples_per_user: With unit='user': the number of examples of a user. The result then says
      whether to sample examples one by one (`PoissonExamples`).
    likeness: PUBLIC mean cosine of the gradients of two examples of one user.
    seed: Fixes what is drawn in the search. The same seed gives the same answer, unless the
      machine is so slow that `seconds` end the search earlier.
    verbose: 0 prints no line of progress.
    **fields: Other fields of the plan, such as `adjacency` or `unit`, but no clip norm.

  Returns:
    A `Recommendation`. It costs no privacy. After Ctrl-C it is the best that was found so far.

  Examples:
    >>> model = compat.keras.Sequential([compat.keras.layers.Dense(1, activation='sigmoid')])
    >>> x = np.random.default_rng(0).normal(size=[80, 4]).astype(np.float32)  # A PUBLIC sample.
    >>> found = recommend(
    ...     model, (x, (x[:, 0] > 0).astype(np.float32)), loss='binary_crossentropy',
    ...     population_size=10_000, target_epsilon=1.0, seconds=5, verbose=0)
    >>> [row.name for row in found.rows][:2]
    ['not trained', 'public examples alone, without privacy']
  """
  began = time.monotonic()
  checks.whole(population_size=population_size)
  checks.positive(target_epsilon=target_epsilon, seconds=seconds)
  if 'l2_norm_clip' in fields:
    raise ValueError('`l2_norm_clip` is recommended, not given. '
                     f'Received: l2_norm_clip={fields["l2_norm_clip"]}.')
  if (public is None) == (gradient_norm is None):
    raise ValueError('Give `public=(x, y)`, or `gradient_norm` of made-up examples in the units of '
                     'the real ones: without either, settings could make the model worse. '
                     f'Received: public: {public is not None}, gradient_norm={gradient_norm}.')
  if target_delta is None:
    target_delta = choice.default_delta(population_size)
  free = batch_size is None and steps is None and sampling is mechanism is None
  steps = steps or _STEPS
  batch_size = batch_size or min(population_size, max(
      _LEAST_BATCH, math.ceil(population_size * _EPOCHS / steps)))
  shared = dict(fields, population_size=population_size, batch_size=batch_size, steps=steps,
                target_epsilon=target_epsilon, target_delta=target_delta, l2_norm_clip=1.0)
  if public is None:  # Nothing tells plans apart.
    sampling = sampling or sampling_lib.Poisson()
  else:
    public, loss = _checked(model, public), _loss(model, loss)
  plans = _plans(shared, sampling, mechanism)
  if free and public is not None:  # Others at the same number of examples; what trial says decides.
    plans += [privacy.PrivacyPlan.calibrate(**{
        **shared, 'steps': count, 'batch_size': min(population_size, batch_size * steps // count)})
              for count in (steps // 3, 3 * steps)]
  compared = '' if examples_per_user is None else user_level.compare(
      population_size=population_size, batch_size=batch_size, steps=steps,
      examples_per_user=examples_per_user, likeness=likeness, target_epsilon=target_epsilon,
      target_delta=target_delta, **fields).reason
  if public is None:
    checks.positive(gradient_norm=gradient_norm)
    found = _blind(model, plans[0], float(gradient_norm or 0))
  else:
    found = _searched(model, *public, loss, metrics, plans, began, seconds, seed,
                      verbose)
  return dataclasses.replace(found, reasons=tuple(filter(None, (*found.reasons, compared))))


def _loss(model: Any, loss: Any) -> Any:
  loss = getattr(model, 'loss', None) or None if loss is None else loss  # Keras 2 has {}.
  if loss is None:
    raise ValueError('`loss` must be given, as in `compile`. Received: loss=None for a model that '
                     'is not compiled.')
  return loss


def _checked(model: Any, public: Any) -> Tuple[Any, Any]:
  """Returns the public examples as arrays, or raises a ValueError; builds the model."""
  if not isinstance(public, (tuple, list)) or len(public) != 2:
    raise ValueError('`public` must be a pair `(x, y)` of arrays. '
                     f'Received: {type(public).__name__}.')
  x, y = (tf.nest.map_structure(_array, part) for part in public)
  counts = {len(part) if part.ndim else 0 for part in tf.nest.flatten((x, y))}
  if len(counts) != 1 or min(counts) < FEWEST:
    raise ValueError(f'`public` must hold {FEWEST} examples or more, as many inputs as targets. '
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
  if not model.trainable_variables:
    raise ValueError('`model` must have trainable variables. Received: none.')
  return x, y


def _chain(model: Any, x: Any) -> List[Any]:
  """Returns the layers that a model applies one after the other; [] for other models."""
  keras = compat.keras
  if isinstance(model, keras.Sequential):
    return list(model.layers)
  layers = [one for one in getattr(model, 'layers', ())
            if not isinstance(one, keras.layers.InputLayer)]
  try:
    value = wanted = tf.convert_to_tensor(x[:4])
    for layer in layers:
      value = layer(value)
    wanted = model(wanted)
    same = value.shape == wanted.shape and np.allclose(value, wanted, atol=1e-5)
  except Exception:  # pylint: disable=broad-except  # It is no chain.
    same = False
  return layers if same else []


def _head(model: Any, x: Any) -> Tuple[Any, Any, int]:
  """Returns the model behind its frozen layers, their features of x, and how many they are.

  The features are computed once. Layers count as frozen if none draws random numbers.
  """
  chain, count = _chain(model, x), 0
  while count < len(chain) - 1 and not chain[count].trainable_variables and not (
      compat.seeds(chain[count])):
    count += 1
  if not any(layer.weights for layer in chain[:count]):
    return model, x, 0
  keras = compat.keras
  features = keras.Sequential(chain[:count]).predict(x, verbose=0)
  return keras.Sequential([keras.layers.Input(features.shape[1:]), *chain[count:]]), features, count


def _array(part: Any) -> np.ndarray:
  part = np.asarray(part)
  return part.astype(np.float32) if part.dtype.kind == 'f' else part


def _plans(shared: Dict[str, Any], sampling: Optional[sampling_lib.Sampling],
           mechanism: Optional[mechanisms.Mechanism]) -> List[privacy.PrivacyPlan]:
  """Returns the plans to try: independent noise, and the bands of least error if that is less."""
  calibrate = privacy.PrivacyPlan.calibrate
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


def _blind(model: Any, plan: privacy.PrivacyPlan, clip: float) -> Recommendation:
  """Returns DP-Adam, whose steps have a size of their own, whatever the gradients are."""
  return Recommendation(
      dataclasses.replace(plan, l2_norm_clip=clip), 'DPAdam',
      dict(learning_rate=search_lib.rounded(_BLIND_RATE / math.sqrt(plan.steps)),
           epsilon=clip * search_lib.floor(plan)), (),
      ('There are no public examples to try settings on: this is a guess. DP-Adam is proposed '
       'since the size of its steps does not depend on the gradients. A few hundred public '
       'examples would also tell whether private training is worth it.',), _given=model)


def _searched(model: Any, x: Any, y: Any, loss: Any, metrics: Sequence[Any],
              plans: Sequence[privacy.PrivacyPlan], began: float, seconds: float, seed: int,
              verbose: int) -> Recommendation:
  """Searches, and puts the model back as it was."""
  specs = tf.nest.map_structure(lambda part: tf.TensorSpec(
      [None, *part.shape[1:]], tf.as_dtype(part.dtype)), x)
  validation.validate_model(model, specs)
  progress, whole, first = _Progress(verbose), model, x
  model, x, frozen = _head(model, x)
  probe = trial_lib.Trial(model, loss, search_lib.rules_for(model, x, 1.0, 1))
  norms = probe.norms(tf.nest.map_structure(tf.convert_to_tensor, x), y, probe.start, 'DPSGD 0')
  trial = trial_lib.Trial(model, loss, search_lib.rules_for(
      model, x, float(np.median(norms)) or float(norms.max()) or 1.0, probe.size))
  try:
    search = search_lib.Search(trial, x, y, plans, loss, metrics, began, seconds, seed, progress)
    try:
      search.public_alone()
      search.run()
      finals = search.finals()
    except KeyboardInterrupt:
      finals = sorted((one for one, judged in search.judged.items() if judged.losses),
                      key=lambda one: search.judged[one].loss)[:1]
    return _proposal(whole, search, finals, (first, y), frozen)
  finally:
    trial.restore()
    progress.end()


def _proposal(model: Any, search: search_lib.Search, finals: List[search_lib.Setting],
              examples: Tuple[Any, Any], frozen: int) -> Recommendation:
  """Returns the best of the private settings, of the public examples alone, and of no training."""
  search.finish()
  if not search.alone:  # Nothing private is proposed without this comparison.
    finals = []
  judged = {one: search.judged[one] for one in finals}
  alone = None
  for kind, found in search.alone.items():
    if alone is None or search_lib.better(found, search.alone[alone]):
      alone = kind
  rows: List[Tuple[str, search_lib.Judged]] = [('not trained', search.untrained)]
  if alone is not None:
    rows.append(('public examples alone, without privacy', search.alone[alone]))
  named = {one: _name(search, one) for one in finals}
  for one, name in named.items():  # Settings that differ in numbers alone: the first.
    rows += [(name, judged[one])] * (name not in [name for name, _ in rows])
  last = outputs_lib.last_dense(model)
  calibrated = None
  if finals and last is not None and search.has_outputs(finals[0]):
    calibrated = search.calibrated(finals[0], last.activation.__name__)
    rows.append((f'{named[finals[0]]}, calibrated', calibrated))
  winner, why = rows[0][1], 'not trained'
  for name, one in rows[1:]:
    if search_lib.better(one, winner):
      winner, why = one, name
  is_private = any(winner is one for one in (*judged.values(), calibrated))
  shown = []
  for name, one in rows:
    more, error = one.above(winner)
    shown.append(Row(name, one.loss, search.judge.sign * one.metric if search.judge else None,
                     more, 1.96 * error))
  reasons = [f'Proposed: {why}.']
  public = (*examples, search.trial.loss, None)
  if not is_private:
    reasons.append(_needed(search, finals, winner) if finals else
                   'The public examples alone, or private training, could not be tried in time: '
                   'give more `seconds`.')
    weights = kind = None
    if alone is not None and winner is search.alone[alone]:
      kind, weights = alone, search.weights(alone, True, None)
    return Recommendation(
        None, None, {}, tuple(shown), tuple(reasons), search.judge.name, model,
        search.map(kind or inputs_lib.AS_GIVEN), weights, public, frozen)
  first = finals[0] if winner is calibrated else next(
      one for one in finals if judged[one] is winner)
  clip, rate = search.settled(first)
  plan = dataclasses.replace(search.plans[first.noise], l2_norm_clip=clip)
  if winner is calibrated:
    reasons.append('Call `found.calibrate(model)` after the training.')
  settings = _settings(search, first, rate, plan.steps)
  return Recommendation(
      plan, first.optimizer, settings, tuple(shown), tuple(reasons), search.judge.name, model,
      search.map(first.inputs),
      search.weights(first.inputs, True, None) if first.warm else None,
      (*public[:3], _recipe(search, first)), frozen)


def _needed(search: search_lib.Search, finals: List[search_lib.Setting],
            winner: search_lib.Judged) -> str:
  """Returns what would make the best private setting as good as the proposal, in words."""
  factor = search.enough(finals[0], winner.loss)
  if not 0 < factor < 1:
    return ('Nothing private that was tried is better, and without any noise it is not: more '
            'private examples would not help this model.' if not factor else
            'Nothing private that was tried is better by more than the error of this comparison.')
  plan = search.plans[finals[0].noise]
  less = dataclasses.replace(plan, noise_multiplier=factor * plan.noise_multiplier)
  return ('Nothing private that was tried is better: more private examples or a larger epsilon '
          f'are needed, about {(plan.population_size or 0) / factor:.2g} examples or epsilon '
          f'{less.epsilon():.2g}.')


def _recipe(search: search_lib.Search, setting: search_lib.Setting) -> Any:
  if not setting.warm:
    return None
  rate, steps = search.recipes[setting.inputs]
  return rate / (16 * search.norm(setting.inputs, False, None, 'DPSGD 0')), steps


def _settings(search: search_lib.Search, setting: search_lib.Setting, rate: float, steps: int
              ) -> Dict[str, Any]:
  """Returns the arguments of the optimizer class."""
  settings: Dict[str, Any] = dict(learning_rate=rate)
  if setting.momentum:
    settings['momentum'] = setting.momentum
  coordinate = search.norm(inputs_lib.AS_GIVEN, False, None, 'DPSGD 0') / math.sqrt(
      search.trial.size)
  if setting.optimizer == 'DPAdam':
    settings['epsilon'] = search_lib.rounded(1e-3 * coordinate)
  if setting.optimizer == 'DPAdamSTP':
    settings.update(epsilon=search_lib.rounded(1e-8 * coordinate),
                    scale_epsilon=search_lib.rounded(.03 * coordinate))
  if setting.averaged:
    settings.update(use_ema=True, ema_momentum=search_lib.rounded(search_lib.decay_of(steps)))
  return settings


def _name(search: search_lib.Search, setting: search_lib.Setting) -> str:
  plan, first = search.plans[setting.noise], search.plans[0]
  parts = [setting.optimizer + (', momentum .9' if setting.momentum else '')]
  if setting.inputs != inputs_lib.AS_GIVEN:
    parts.append(f'inputs {setting.inputs}')
  if setting.warm:
    parts.append('from public weights')
  if setting.averaged:
    parts.append('averaged')
  if plan.mechanism.bands != 1:
    parts.append('banded noise')
  if plan.steps != first.steps:
    parts.append(f'{plan.steps} steps')
  return ', '.join(parts)


def _count(public: Any) -> int:
  return len(tf.nest.flatten(public[1])[0])


def _source(public: Any) -> str:
  return f'{_count(public)} public examples of tfdp.recommend'


def _listed(values: Any) -> str:
  return '[' + ', '.join(f'{value:.6g}' for value in np.ravel(values)) + ']'


def _mechanism(mechanism: mechanisms.Mechanism) -> str:
  if isinstance(mechanism, mechanisms.BandedToeplitz):
    return f'BandedToeplitz({mechanism.bands}, {mechanism.steps})'
  return f'{type(mechanism).__name__}()'


class _Progress:
  """Prints one line that says what is tried, and the seconds that are left."""

  def __init__(self, verbose: int) -> None:
    self._verbose, self._last = verbose, 0.0

  def __call__(self, text: str, left: float) -> None:
    if self._verbose and time.monotonic() - self._last > 1:
      self._last = time.monotonic()
      print(f'\rrecommend: {text:60.60} {left:4.0f} s left', end='', file=sys.stderr, flush=True)

  def end(self) -> None:
    if self._last:
      print(file=sys.stderr, flush=True)

