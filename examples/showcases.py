# SPDX-License-Identifier: Apache-2.0
"""Two tasks of seconds on which a method decides, on data made up for it.

*Scales*: 31 inputs tell equally much of a yes or no, in units from 3 to .003. One step
size and one noise for all of them, as in DP-SGD, drown the small ones; an adaptive
method sees them if the noise is as small as they are (scale-then-privatize).

*Noise*: 100 classes, the k-th of which comes with frequency proportional to 1/k. The
errors of correlated noise cancel over the steps, and cyclic sampling still amplifies.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Dict, NamedTuple, Tuple, TYPE_CHECKING

import numpy as np
import tensorflow as tf

import tfdp_adaptive as tfdp

from . import report as report_lib
from . import settings as settings_lib
from . import training

if TYPE_CHECKING:
  from tfdp_adaptive import compat

_DELTA = 1e-5
_HELD_OUT = 5000
_POINTS = 20
Examples = Tuple[np.ndarray, np.ndarray]


class Showcase(NamedTuple):
  """A task and the methods that are compared on it.

  Attributes:
    part: Its name in tables and pictures.
    epsilon: What every private method keeps to, at delta 1e-5.
    steps: Of every method.
    batch_size: Expected.
    make: `(number of examples, seed) -> (x, y)`.
    build: `() -> ` a Keras model of logits.
    loss: Of a batch of logits, a Keras loss.
    measure: `Run -> float`, what the settings are chosen to keep small.
    methods: {name: `settings.Method`}; a setting `bands` asks for banded noise with
      cyclic sampling.
  """

  part: str
  epsilon: float
  steps: int
  batch_size: int
  make: Callable[[int, int], Examples]
  build: Callable[[], Any]
  loss: Callable[[], Any]
  measure: Callable[[report_lib.Run], float]
  methods: Dict[str, settings_lib.Method]
  population_size: int = 20_000


_SCALES = np.geomspace(3, .003, 31)
_CLASSES, _WIDTH = 100, 32
_FREQUENCIES = (1 / np.arange(1, _CLASSES + 1)) / np.sum(1 / np.arange(1, _CLASSES + 1))


def make_scales(count: int, seed: int) -> Examples:
  """Inputs in 31 units; the answer is noisy, and all inputs have the same say in it."""
  rng = np.random.default_rng(seed)
  signs = np.random.default_rng(0).choice([-1, 1], len(_SCALES))
  inputs = rng.normal(size=[count, len(_SCALES)])
  answers = rng.random(count) < 1 / (1 + np.exp(-.8 * inputs @ signs))
  return (inputs * _SCALES).astype(np.float32), answers.astype(np.float32)[:, None]


def make_classes(count: int, seed: int) -> Examples:
  """A point of each class's own, in noise as large as the distances."""
  rng = np.random.default_rng(seed)
  points = np.random.default_rng(0).normal(size=[_CLASSES, _WIDTH])
  labels = rng.choice(_CLASSES, count, p=_FREQUENCIES)
  inputs = (points[labels] + rng.normal(size=[count, _WIDTH])) / np.sqrt(_WIDTH)
  return inputs.astype(np.float32), labels.astype(np.int32)


def _linear(inputs: int, outputs: int, offset: Any = None) -> compat.Model:
  layers = [tf.keras.layers.Input([inputs]),
            tf.keras.layers.Dense(outputs, kernel_initializer='zeros')]
  if offset is not None:
    layers.append(tf.keras.layers.Rescaling(1.0, offset=offset))  # Public frequencies.
  return tf.keras.Sequential(layers)


SCALES = Showcase(
    'scales', 1.0, 300, 256, make_scales, lambda: _linear(len(_SCALES), 1),
    lambda: tf.keras.losses.BinaryCrossentropy(from_logits=True),
    lambda measured: 1 - measured.accuracy, settings_lib.SCALES)
NOISE = Showcase(
    'noise', 4.0, 400, 200, make_classes,
    lambda: _linear(_WIDTH, _CLASSES, [float(p) for p in np.log(_FREQUENCIES)]),
    lambda: tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    lambda measured: measured.loss, settings_lib.NOISE)


def run(case: Showcase, report: report_lib.Report, tune: bool = False) -> None:
  """Trains with every method and reports it."""
  train, validation, test = (
      case.make(count, seed) for seed, count in
      ((1, case.population_size), (2, _HELD_OUT), (3, _HELD_OUT)))
  for method in case.methods.values():
    trained = functools.partial(fit, case, method, train)
    settings, _ = settings_lib.settled(
        method, tune, lambda settings: case.measure(trained(settings, validation, points=1)[0]))
    measured, private = trained(settings, test)
    guarantee = {}
    if private is not None:
      guarantee = dict(epsilon=private.epsilon(), delta=_DELTA, unit='example')
    report.add_run(method, case.part, measured, settings, **guarantee)


def fit(
    case: Showcase, method: settings_lib.Method, train: Examples, settings: Dict[str, Any],
    held_out: Examples, points: int = _POINTS) -> Tuple[report_lib.Run, Any]:
  """`(Run, private optimizer or None)` of one method."""
  model, settings, private = case.build(), dict(settings), None
  if method.optimizer is None:
    optimizer = getattr(tf.keras.optimizers, method.label.split(',')[0])(**settings)
    batches = tf.data.Dataset.from_tensor_slices(train).shuffle(case.population_size, seed=1)
    batches = batches.repeat().batch(case.batch_size).take(case.steps)
  else:
    plan = _plan(case, settings.pop('bands', 1), settings.pop('l2_norm_clip'))
    private = optimizer = getattr(tfdp, method.optimizer)(plan=plan, **settings)
    model = tfdp.make_private(model)
    batches = plan.batches(train)
  model.compile(optimizer=optimizer, loss=case.loss())
  evaluate = _evaluator(model, case.loss(), held_out)
  return training.fit(model, batches, training.Recorder(
      case.steps, evaluate, f'{method.label} ({case.part})', points)), private


def _plan(case: Showcase, bands: int, l2_norm_clip: float) -> tfdp.PrivacyPlan:
  correlated: Dict[str, Any] = {} if bands == 1 else dict(
      mechanism=tfdp.mechanisms.BandedToeplitz(bands, case.steps),
      sampling=tfdp.sampling.CyclicPoisson(cycle=bands))
  return dataclasses.replace(tfdp.PrivacyPlan.calibrate(
      target_epsilon=case.epsilon, target_delta=_DELTA, population_size=case.population_size,
      batch_size=case.batch_size, steps=case.steps, l2_norm_clip=1.0, **correlated),
                             l2_norm_clip=l2_norm_clip)


def _evaluator(model: compat.Model, loss: Any, examples: Any) -> Callable[[], Tuple[float, float]]:
  """`() -> (loss, accuracy)`, exact: NOT private numbers."""
  x, y = examples

  def evaluate() -> Tuple[float, float]:
    logits = np.asarray(model(x, training=False))
    guesses = logits > 0 if logits.shape[1] == 1 else logits.argmax(1)
    return float(loss(y, logits)), float(np.mean(guesses == y))

  return evaluate
