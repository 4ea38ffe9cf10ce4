# SPDX-License-Identifier: Apache-2.0
"""Private tuning: a random number of runs, the best one released, one epsilon for all.

The accounting is `accounting.private_search`'s; this is the driver. Nothing of the runs that
lost is kept or shown: no curves, no scores, not even how many there were.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import secrets
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union
import warnings

import numpy as np
import tensorflow as tf

from tfdp_adaptive import errors
from tfdp_adaptive import runfolder
from tfdp_adaptive import trees
from tfdp_adaptive.accounting import private_search
from tfdp_adaptive.batches import sources
from tfdp_adaptive.keras import model as model_lib
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib
from tfdp_adaptive.privacy import plan as plan_lib
from tfdp_adaptive.privacy import statement as statement_lib

Settings = Dict[str, Any]
Space = Union[Mapping[str, Sequence[Any]], Sequence[Settings]]
Build = Callable[[Settings, plan_lib.PrivacyPlan], Any]
Score = Callable[[Any, Any, Any], Any]
_FORMAT, _FILE = 'tfdp_adaptive.tune 2', 'search.npz'


class Tuned(NamedTuple):
  """The best run; everything in it may be released together, at the plan's epsilon."""

  model: Any  # Trained and private; its ledger has the cost of the whole search. None: no run.
  settings: Optional[Settings]
  score: Optional[float]  # The noisy score that chose this run.
  plan: plan_lib.PrivacyPlan

  def statement(self) -> str:
    """Returns the privacy statement of the model, in plain text."""
    if self.model is None:
      return self.plan.statement()
    return statement_lib.of(weight_ledger.card(self.model.ledger.entries, plots=False))


def tune(build: Build, space: Space, data: sources.Data,
         plan: plan_lib.PrivacyPlan, *, validation: Tuple[Any, Any],
         score: Optional[Score] = None,
         directory: Optional[Union[str, pathlib.Path]] = None) -> Tuned:
  """Trains with random settings a random number of times and returns the best model.

      plan = tfdp.PrivacyPlan.calibrate(
          target_epsilon=3.0, ..., search=tfdp.privacy.Search(runs=10))
      best = tfdp.tune(build, {'learning_rate': [.01, .03, .1]}, (x, y), plan,
                       validation=(x_held_out, y_held_out))

  Every run uses the noise of the plan. The plan is calibrated so that one epsilon covers all runs
  together, with their number and their scores. You can therefore tune learning rates, clip norms
  and models, but nothing that the plan fixes (batch size, steps, sampling, noise).

  Args:
    build: `(settings, plan) -> model`, a new private model, compiled with an optimizer of
      that plan (its `l2_norm_clip` may be another).
    space: A grid, `{name: values}`, or a list of settings. It must not depend on the data.
    data: The data, as for `plan.batches`.
    plan: With a `search`.
    validation: `(x, y)` that score the runs. They are private and disjoint from `data`. If the
      search has `score_noise=None`, they are public. Their number is treated as public.
    score: `(model, x, y) -> [n]`, from 0 to 1 for each validation record, depending on that
      record and the model alone; higher is better. By default 1 where the largest output
      is the label's.
    directory: Folder for the result and for the state of the search. If a search was interrupted,
      the same call resumes it. Until the search has ended, every file in it is SECRET. An
      interrupted run starts from the beginning. Runs that ended are not repeated.

  Raises:
    PrivacyError: If a run differs from what the plan accounts for.
  """
  if not isinstance(plan, plan_lib.PrivacyPlan) or plan.search is None:
    raise ValueError('`plan` must be a `tfdp.PrivacyPlan` with `search=tfdp.privacy.Search(...)`, '
                     f'or the cost of tuning is not in it. Received: plan={plan!r}.')
  grid = _grid(space)
  x, y = validation
  size = len(tf.nest.flatten(y)[0])
  if not size:
    raise ValueError('`validation` must have records. Received: none.')
  with _State(directory, [plan.to_json(), repr(grid), size]) as state:
    if state.candidates is None:
      state.candidates = [secrets.randbelow(len(grid)) for _ in range(plan.search.draw())]
      state.save()
    model = None
    for number in range(state.done, len(state.candidates)):
      candidate = _trained(build, grid[state.candidates[number]], plan, data)
      value = private_search.noisy_score(_scores(score, candidate, x, y, size),
                                         plan.search.score_noise)
      if state.best is None or value > state.best['score']:
        model, state.weights = candidate, _values(candidate)
        state.best = {'setting': state.candidates[number], 'score': value,
                      'ledger': candidate.optimizer.ledger_after(plan.steps).to_json()}
      state.done = number + 1
      state.save()
    if state.best is None:
      return Tuned(None, None, None, plan)
    settings, value = grid[state.best['setting']], state.best['score']
    if model is None:
      model = _restored(build, settings, plan, x, state)
    # The number of runs and those that lost are forgotten; what is left is the result.
    state.candidates, state.done = [state.best['setting']], 1
    state.save()
  return Tuned(model, dict(settings), value, plan)


def _grid(space: Space) -> List[Settings]:
  if isinstance(space, Mapping):
    for name, values in space.items():
      if isinstance(values, (str, bytes)) or not hasattr(values, '__len__') or not len(values):
        raise ValueError('`space` must give a list of values for every name. '
                         f'Received: {name}={values!r}.')
    return [dict(zip(space, values)) for values in itertools.product(*space.values())]
  grid = [dict(settings) for settings in space]
  if not grid:
    raise ValueError('`space` must have at least one setting. Received: none.')
  return grid


def _checked(build: Build, settings: Settings, plan: plan_lib.PrivacyPlan) -> Any:
  """Returns a new model; raises unless its optimizer has the plan and its weights no past."""
  model = build(dict(settings), plan)
  optimizer = getattr(model, 'optimizer', None)
  if not isinstance(model, model_lib.DPModel) or not isinstance(
      optimizer, optimizer_lib.DPOptimizer):
    raise ValueError('`build` must return a compiled private model, such as of '
                     f'`tfdp.make_private`. Received: {model!r} with optimizer {optimizer!r}.')
  if optimizer.plan is None or dataclasses.replace(
      optimizer.plan, l2_norm_clip=plan.l2_norm_clip) != plan or optimizer.own_sampler is not None:
    raise errors.PrivacyError(
        '`build` must give the optimizer the plan that it is given (the clip norm may differ): '
        f'the cost of the search is computed from it. Received: {optimizer.plan}.')
  if optimizer.steps_done or model.ledger.entries:
    raise errors.PrivacyError(
        '`build` must return a new model at every call. Received: weights that were trained '
        'before, which would carry one run into the next.')
  if not plan.check_rule(optimizer.rule):
    raise errors.PrivacyError(f'The rule {optimizer.rule.name} has no guarantee, and a selection '
                              'among its runs has none.')
  return model


def _trained(build: Build, settings: Settings, plan: plan_lib.PrivacyPlan,
             data: sources.Data) -> Any:
  model = _checked(build, settings, plan)
  with warnings.catch_warnings():  # A run that diverges loses, and says nothing.
    warnings.filterwarnings('ignore', message='Training has diverged')
    model.fit(model.optimizer.plan.batches(data), verbose=0)
  return model


def _scores(score: Optional[Score], model: model_lib.DPModel, x: trees.Tree, y: trees.Tree,
            size: int) -> np.ndarray:
  values = np.asarray((score or _accuracy)(model, x, y), np.float64)
  if values.shape != (size,):
    raise ValueError('`score` must return one number, from 0 to 1, for each validation record. '
                     f'Received: {values.ndim} axes, or another number of scores.')
  return values


def _accuracy(model: model_lib.DPModel, x: trees.Tree, y: trees.Tree) -> np.ndarray:
  outputs, labels = np.asarray(model.predict(x, verbose=0)), np.asarray(y)
  if labels.ndim == outputs.ndim and labels.shape[-1] == outputs.shape[-1] > 1:
    labels = labels.argmax(-1)
  if outputs.ndim != 2 or outputs.shape[-1] < 2 or labels.size != len(outputs):
    raise ValueError('`score` must be given unless outputs are [n, classes] and labels classes. '
                     f'Received: outputs of {outputs.ndim} axes, labels of {labels.ndim}, or '
                     'another number of labels.')
  return outputs.argmax(-1) == labels.reshape(-1)


def _values(model: model_lib.DPModel) -> List[Any]:
  """Returns the saved part of a model: its variables in order, without vocabularies."""
  return [v for v in model.weights if hasattr(v, 'assign')]


def _restored(build: Build, settings: Settings, plan: plan_lib.PrivacyPlan, x: trees.Tree,
              state: '_State') -> Any:
  """Returns the best model of an earlier process: built anew, with its weights and ledger."""
  model = _checked(build, settings, plan)
  if not model.built:
    model(tf.nest.map_structure(lambda t: tf.convert_to_tensor(t[:1]), x), training=False)
  trees.assign(zip(_values(model), state.weights))
  spent = ledger_lib.Ledger.from_json(state.best['ledger'])
  weight_ledger.Ledger.of(model).attach(spent.entries)
  return model


class _State:
  """The state from which an interrupted search resumes, in one file. SECRET until the end.

  Args:
    directory: None keeps everything in memory.
    identity: The values that must be equal when a search resumes, for JSON.
  """

  def __init__(self, directory: Optional[Union[str, pathlib.Path]],
               identity: Sequence[Any]) -> None:
    self._folder = None if directory is None else pathlib.Path(directory)
    self._digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    self._lock: Any = None
    self.candidates: Any = None  # Indices of the grid, one a run.
    self.done = 0  # Runs.
    self.best: Any = None  # Index of its setting, its score, and its ledger.
    self.weights: List[Any] = []  # Weights of the best run.

  def __enter__(self) -> '_State':
    if self._folder is None:
      return self
    self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    self._lock = runfolder.Lock(self._folder)
    try:
      self.weights, saved = runfolder.load(self._folder / _FILE)
    except FileNotFoundError:
      return self
    if (saved['format'], saved['digest']) != (_FORMAT, self._digest):
      self._lock.close()
      raise ValueError('`directory` must hold the same search: plan, space and validation records. '
                       f'Received: {self._folder}, which holds another. What was spent there '
                       'counts.')
    self.candidates, self.done, self.best = saved['candidates'], saved['done'], saved['best']
    return self

  def __exit__(self, *error: object) -> None:
    if self._lock is not None:
      self._lock.close()

  def save(self) -> None:
    """Keeps what there is now: all of it or nothing."""
    if self._folder is not None:
      runfolder.save(self._folder / _FILE, self.weights, {
          'format': _FORMAT, 'digest': self._digest, 'candidates': self.candidates,
          'done': self.done, 'best': self.best})
