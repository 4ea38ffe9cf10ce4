# SPDX-License-Identifier: Apache-2.0
"""Trains a model on PUBLIC examples with the noise of a plan, to try optimizers and settings.

Only the ratio of noise multiplier and batch size matters for the noise of a mean (TAN,
arXiv:2210.03403). So small batches of public examples get the noise of the large private batches.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import noise as noise_lib
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import losses as losses_lib
from tfdp_adaptive.clipping import public as public_lib
from tfdp_adaptive.noise import keys

Weights = Tuple[np.ndarray, ...]
BATCH = 32  # Public examples of a step.
_FACTORS = 64  # Public examples for a rule that reads public gradients.
_CHUNK = 512  # Examples of one evaluation.


class Course(NamedTuple):
  """Settings of one training.

  Attributes:
    rule: Name of a rule of the trial.
    clip: Clip norm, in units of the rule.
    rates: [T] learning rates.
    stddev: Standard deviation of the noise on a mean, over the clip norm, before the mechanism
      correlates it; 0 to train without noise.
    mechanism: The noise mechanism.
    seed: Fixes the batches and the noise.
  """

  rule: str
  clip: float
  rates: np.ndarray
  stddev: float
  mechanism: mechanisms.Mechanism
  seed: int


class State(NamedTuple):
  """The state of one training: weights, their moving average, and what the steps carry over."""

  weights: Any
  average: Any
  rule: Any
  noise: Any
  step: int = 0


class Trial:
  """A model, its loss and public examples.

  Args:
    model: A built Keras model; `restore` sets its variables back.
    loss: As in `compile`.
    rules: The rules to try, by name.
  """

  def __init__(self, model: compat.Model, loss: Any, rules: Dict[str, contract.Rule]) -> None:
    self.model, self.rules = model, rules
    self.loss = losses_lib.ExampleLoss(loss, None, compat.output_names(model))
    self.variables = model.trainable_variables
    self.specs = [trees.wide_spec(tf.TensorSpec(v.shape, tf.as_dtype(v.dtype)))
                  for v in self.variables]
    self.size = trees.size(self.specs)
    self._before = [(v, v.numpy()) for v in model.variables]
    self._steps: Dict[Any, Callable[..., Any]] = {}
    self._look = tf.function(self._outputs_and_losses, reduce_retracing=True)

  @property
  def start(self) -> Weights:
    """The trainable weights that the model was given with."""
    values = {id(v): value for v, value in self._before}
    return tuple(values[id(v)] for v in self.variables)

  def restore(self) -> None:
    for variable, value in self._before:
      variable.assign(value)

  def norms(self, x: Any, y: Any, weights: Weights, rule: str) -> np.ndarray:
    """Returns the norms [n] of the gradients of all examples, in the first units of a rule."""
    self._assign(weights)
    made, count = self.rules[rule], len(tf.nest.flatten(y)[0])

    def measure(batch: interface.Batch, few_x: Any, few_y: Any) -> tf.Tensor:
      state = made.init(self.specs)
      queries = made.query(state, self._public(made, few_x, few_y, state))
      return self._clipped(made, queries, tf.constant(1.0), batch).norms[0]

    if ('norms', rule) not in self._steps:
      self._steps['norms', rule] = tf.function(measure, autograph=False)
    few = np.arange(_FACTORS) % count
    parts = np.resize(np.arange(count), [-(-count // BATCH), BATCH])
    return np.concatenate([self._steps['norms', rule](
        _batch(x, y, part), _rows(x, few), _rows(y, few)).numpy() for part in parts])[:count]

  def begin(self, course: Course, weights: Weights) -> State:
    """Returns the state before the first step."""
    wide = [tf.cast(value, spec.dtype) for value, spec in zip(weights, self.specs)]
    return State(wide, wide, self.rules[course.rule].init(self.specs),
                 _stream(course.mechanism).init(self.specs, keys.from_seed(course.seed)))

  def advance(self, course: Course, state: State, x: Any, y: Any, rows: np.ndarray, until: int,
              momentum: float) -> State:
    """Trains on these rows until a step.

    Args:
      course: The settings.
      state: The state so far.
      x, y: All public examples.
      rows: The indices of the examples to train on.
      until: The number of steps at the end.
      momentum: Decay of the moving average of the weights.
    """
    if until <= state.step:
      return state
    rng = np.random.default_rng([course.seed, state.step])
    drawn = rng.choice(rows, [until - state.step, BATCH])
    for variable, value in self._before:  # Seeds of random layers begin anew.
      variable.assign(value)
    numbers = [tf.constant(value, tf.float32) for value in (
        course.rates[state.step:until], course.clip, course.stddev, momentum)]
    run = self._function(course, x, y, state)
    weights, average, rule, noise = run(
        x, y, drawn, np.resize(rows, _FACTORS), numbers, not state.step, state[:4])
    return State(weights, average, rule, noise, until)

  def judge(self, x: Any, y: Any, weights: Sequence[Any]) -> Tuple[Any, np.ndarray]:
    """Returns the outputs for all examples, and their losses [n]."""
    self._assign(weights)
    count = len(tf.nest.flatten(y)[0])
    parts = [self._look(*_batch(x, y, np.arange(first, min(count, first + _CHUNK)))[:2])
             for first in range(0, count, _CHUNK)]
    outputs = tf.nest.map_structure(lambda *some: np.concatenate([t.numpy() for t in some]),
                                    *(part[0] for part in parts))
    return outputs, np.concatenate([part[1].numpy() for part in parts]).astype(np.float64)

  def _outputs_and_losses(self, x: Any, y: Any) -> Tuple[Any, tf.Tensor]:
    outputs = self.model(x, training=False)
    return outputs, self.loss(y, outputs)

  def _assign(self, weights: Sequence[Any]) -> None:
    for variable, value in zip(self.variables, weights):
      variable.assign(tf.cast(value, variable.dtype))

  def _public(self, rule: contract.Rule, x: Any, y: Any, state: Any) -> Any:
    if rule.public is None:
      return ()
    return public_lib.when_due(rule, self.model, self.loss, x, y, state)

  def _clipped(self, rule: contract.Rule, queries: Any, clip: Any, batch: interface.Batch
               ) -> interface.Clipped:
    clips = tuple(clip * tf.cast(query.relative_clip, clip.dtype) for query in queries)
    engine = engines.choose('auto', self.model, rule.asks, batch.x)
    return engine(self.model, self.loss, batch, interface.Request(rule.asks, queries, clips))

  def _function(self, course: Course, x: Any, y: Any, state: State) -> Callable[..., Any]:
    """Returns the steps of a rule, traced once for any number of them."""
    key = course.rule, repr(course.mechanism)
    if key not in self._steps:
      spec_of = functools.partial(
          tf.nest.map_structure, lambda t: tf.TensorSpec(t.shape, tf.as_dtype(t.dtype)))
      number, rates = tf.TensorSpec([], tf.float32), tf.TensorSpec([None], tf.float32)
      self._steps[key] = tf.function(
          functools.partial(self._run, self.rules[course.rule], _stream(course.mechanism)),
          autograph=False, input_signature=[
              spec_of(x), spec_of(y), tf.TensorSpec([None, BATCH], tf.int64),
              tf.TensorSpec([_FACTORS], tf.int64), [rates, number, number, number],
              tf.TensorSpec([], tf.bool), spec_of(state[:4])])
    return self._steps[key]

  def _run(self, rule: contract.Rule, stream: noise_lib.Noise, x: Any, y: Any, drawn: tf.Tensor,
           few: tf.Tensor, numbers: Any, first: tf.Tensor, state: Any) -> Any:
    rates, clip, stddev, momentum = numbers
    self._assign(state[0])
    few_x, few_y = _rows(x, few), _rows(y, few)

    def step(index: tf.Tensor, average: Any, rule_state: Any, noise: Any) -> Any:
      public = self._public(rule, few_x, few_y, rule_state)
      queries = rule.query(rule_state, public)
      batch = _batch(x, y, tf.ensure_shape(drawn[index], [BATCH]))
      sums, = self._clipped(rule, queries, clip, batch).sums
      rows, variance, noise = stream.next(noise, self.specs)
      std = stddev * clip * tf.cast(queries[0].relative_clip, clip.dtype)
      mean = trees.map(lambda total, row: total / BATCH +
                       tf.cast(std, total.dtype) * row, sums.total, rows)
      release = contract.Release(mean, tf.square(std) * tf.cast(variance, std.dtype))
      direction, rule_state = rule.update(rule_state, (release,), public)
      kept = tf.where(first & tf.equal(index, 0), 0.0, momentum)
      for variable, change in zip(self.variables, direction):
        variable.assign_sub(tf.cast(rates[index], variable.dtype) *
                            tf.cast(change, variable.dtype))
      average = [tf.cast(kept, old.dtype) * old +
                 tf.cast(1 - kept, old.dtype) * tf.cast(variable, old.dtype)
                 for old, variable in zip(average, self.variables)]
      return index + 1, average, rule_state, noise

    _, average, rule_state, noise = tf.while_loop(
        lambda index, *_: index < tf.shape(rates)[0], step, (tf.constant(0), *state[1:]),
        parallel_iterations=1)
    return ([tf.cast(tf.convert_to_tensor(v), spec.dtype)
             for v, spec in zip(self.variables, self.specs)], average, rule_state, noise)


def _stream(mechanism: mechanisms.Mechanism) -> noise_lib.Noise:
  return noise_lib.stream(mechanism, lambda: keys.from_seed(0))


def _rows(tree: Any, rows: Any) -> Any:
  return tf.nest.map_structure(lambda values: tf.gather(values, rows), tree)


def _batch(x: Any, y: Any, rows: Any) -> interface.Batch:
  return interface.Batch(
      _rows(x, rows), _rows(y, rows), (), tf.ones([rows.shape[0]], tf.bool))
