# SPDX-License-Identifier: Apache-2.0
"""Trains Keras models by the library's rules, engines and noise, at many settings of one graph.

Rate and clip norm are tensors. Losses are divided by the clip norm, so that a rule and its noise
work in units of it; rules that scale records get the clip norm in their query instead.
"""

import itertools
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import models_tasks
import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import contract
from tfdp_adaptive import privatizer as privatizer_lib
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import losses as losses_lib

DELTA = 1e-5
TUNING_SEED, SEEDS = 1, (11, 12, 13)
RATES = np.geomspace(3e-4, 1, 6)
HALF = float((RATES[1] / RATES[0])**.5)
CLIPS = (.3, .1, 1.0)  # Times the median norm of a gradient; the first is tried first.


def make_plan(task: models_tasks.Task, epsilon: float, bands: int = 1) -> tfdp.PrivacyPlan:
  noise: Dict[str, Any] = {} if bands == 1 else dict(
      mechanism=tfdp.mechanisms.BandedToeplitz(bands, task.steps),
      sampling=tfdp.sampling.CyclicPoisson(cycle=bands))
  return tfdp.PrivacyPlan.calibrate(
      target_epsilon=epsilon, target_delta=DELTA, population_size=len(task.parts[0][0]),
      batch_size=task.batch_size, steps=task.steps, l2_norm_clip=1.0, **noise)


def batches(task: models_tasks.Task, bands: int, seed: int) -> Iterator[Tuple[Any, Any, Any]]:
  """`(x, y, mask)` of every step by (cyclic) Poisson sampling, all of one padded size."""
  rng = np.random.default_rng(seed)
  x, y = task.parts[0]
  size = len(x)
  room = int(task.batch_size + 6 * task.batch_size**.5)
  groups = rng.permutation(size) % bands
  for step in range(task.steps):
    taken = rng.random(size) < bands * task.batch_size / size
    rows = np.flatnonzero(taken & (groups == step % bands))[:room]
    mask = np.arange(room) < len(rows)
    rows = np.pad(rows, (0, room - len(rows)))
    yield x[rows], y[rows], mask


class Runner:
  """One method on one task: `run(rate, clip norm, seed)` leaves trained weights in `model`.

  Args:
    task: Records and a model.
    plan: With clip norm 1.
    rule: In units of the clip norm, unless `scaled`.
    scaled: Whether clip norms are in scaled units.
    public: `(x, y)` for a rule that needs PUBLIC records.
  """

  def __init__(self, task: models_tasks.Task, plan: tfdp.PrivacyPlan, rule: contract.Rule,
               scaled: bool = False, public: Any = None) -> None:
    self.task, self._plan = task, plan
    self._bands = getattr(plan.mechanism, 'bands', 1)
    self.model = task.build()
    self._start = self.model.get_weights()
    variables = self.model.trainable_variables
    self._specs = [tf.TensorSpec(v.shape, tf.float32) for v in variables]
    self._rule = rule
    privatizer = self._privatizer(None)
    loss = losses_lib.ExampleLoss(task.loss)
    engine = engines.choose('auto', self.model, rule.asks, tf.constant(task.parts[0][0][:2]))
    if public is not None:
      public = tuple(tf.constant(part) for part in public)

    @tf.function(autograph=False, reduce_retracing=True)
    def step(x: Any, y: Any, mask: Any, rate: Any, clip: Any, state: Any, private: Any) -> Any:
      unit = 1.0 if scaled else clip
      scaled_loss = lambda *args: loss(*args) / unit
      found = () if rule.public is None else engines.public_gradients_when_due(
          rule, self.model, scaled_loss, *public, state)
      queries = rule.query(state, found)
      if scaled:
        queries = tuple(q._replace(relative_clip=q.relative_clip * clip) for q in queries)
      request = interface.Request(rule.asks, queries, privatizer.resolve(queries))
      sums = engine(self.model, scaled_loss, interface.Batch(x, y, (), mask), request).sums
      releases, private = privatizer.release(private, queries, sums)
      direction, state = rule.update(state, releases, found)
      for variable, move in zip(variables, direction):
        variable.assign_sub(tf.cast(rate, move.dtype) * move)
      return state, private

    self._step = step

  def _privatizer(self, seed: Optional[int]) -> Any:
    plan = self._plan
    return privatizer_lib.Privatizer(
        self._rule.asks, self._specs, l2_norm_clip=1.0, noise_multiplier=plan.noise_multiplier,
        batch_size=plan.batch_size, mechanism=plan.mechanism, steps=plan.steps, seed=seed)

  def run(self, rate: float, clip: float, seed: int) -> None:
    self.model.set_weights(self._start)
    state, private = self._rule.init(self._specs), self._privatizer(seed).init()
    clip_norm = tf.constant(clip, tf.float32)
    for t, (x, y, mask) in enumerate(batches(self.task, self._bands, seed)):
      now = tf.constant(rate * (1 - t / self.task.steps), tf.float32)
      state, private = self._step(tf.constant(x), tf.constant(y), tf.constant(mask), now,
                                  clip_norm, state, private)

  def loss(self, part: int) -> float:
    return evaluate(self.task, self.model, part)


def evaluate(task: models_tasks.Task, model: Any, part: int) -> float:
  x, y = task.parts[part]
  value = float(np.mean(losses_lib.ExampleLoss(task.loss)(
      tf.constant(y), model(tf.constant(x), training=False))))
  return value if np.isfinite(value) else 1e9


class Method(NamedTuple):
  """How a method is made and tuned.

  Attributes:
    make: `(floor, norm, parameters) -> rule`; floor is noise per coordinate in clip norms.
    rate: Times the rates of the grid.
    clips: `(norm, parameters, batch size) -> ` three clip norms, the first in the middle.
    scaled: Whether these are in scaled units.
  """

  make: Callable[[float, float, int], contract.Rule]
  rate: float = 1.0
  clips: Callable[[float, int, float], Any] = lambda norm, m, b: norm * np.array(CLIPS)
  scaled: bool = False


METHODS = {
    'DPSGD': Method(lambda floor, norm, m: tfdp.rules.dp_sgd(.9), rate=10.0),
    'DPAdam': Method(lambda floor, norm, m: tfdp.rules.dp_adam(epsilon=floor)),
    'DPAdamSTP': Method(
        lambda floor, norm, m: tfdp.rules.scale_then_privatize(
            epsilon=1e-8, scale_epsilon=.03 * norm / m**.5),
        clips=lambda norm, m, b: m**.5 * np.array([b**.25, 1.0, b**.5]), scaled=True)}


def search(score: Callable[[float, float], float], rates: Any, clips: Any) -> Tuple[float, float]:
  """Twelve settings: six rates, two between, and two further clip norms with two rates each."""
  seen: Dict[Tuple[float, float], float] = {}

  def at(rate: float, clip: float) -> None:
    seen[rate, clip] = score(rate, clip)

  def best() -> Tuple[float, float]:
    return min(seen, key=lambda key: seen[key])

  for rate in rates:
    at(rate, clips[0])
  middle = best()[0]
  at(middle / HALF, clips[0])
  at(middle * HALF, clips[0])
  middle = best()[0]
  for clip, more in itertools.product(clips[1:], (1.0, HALF)):
    at(middle * more, clip)
  return best()


def tuned(runner: Runner, rates: Any, clips: Any) -> Dict[str, Any]:
  """Chooses by one run on validation records; losses are of three others, on test records."""

  def score(rate: float, clip: float) -> float:
    runner.run(rate, clip, TUNING_SEED)
    return runner.loss(1)

  rate, clip = search(score, rates, clips)
  runs = repeated(runner, rate, clip)
  return dict(loss=float(np.mean(runs)), runs=runs, clip=float(clip), rate=float(rate))


def repeated(runner: Runner, rate: float, clip: float, part: int = 2) -> List[float]:
  runs = []
  for seed in SEEDS:
    runner.run(rate, clip, seed)
    runs.append(runner.loss(part))
  return runs
