# SPDX-License-Identifier: Apache-2.0
"""Trains a model on PUBLIC examples with the noise of a plan, to try optimizers and settings.

Only the ratio of noise multiplier and batch size matters for the noise of a mean (TAN,
arXiv:2210.03403). So small batches of public examples get the noise of the large private batches.
"""

from __future__ import annotations

import functools
from typing import Callable, Dict, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import errors
from tfdp_adaptive import mechanisms
from tfdp_adaptive import private_rule
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import engines
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import losses as losses_lib
from tfdp_adaptive.keras import first_step
from tfdp_adaptive.trees import Scalar
from tfdp_adaptive.trees import Tree

Weights = Tuple[np.ndarray, ...]
ADAM = 'Adam'  # The rule of a training without privacy.
BATCH = 32  # Public examples of a step.
_FACTORS = 64  # Public examples for a rule that reads public gradients.
CHUNK = 512  # Examples of one evaluation.
_LEAST = 1e-12  # The noise multiplier that stands for none.


class Course(NamedTuple):
  """Settings of one training.

  Attributes:
    rule: Name of a rule of the trial; `ADAM` neither clips nor adds noise.
    clip: Clip norm, in units of the rule.
    rates: [T] learning rates.
    stddev: Standard deviation of the noise on a mean, over the clip norm, before the mechanism
      correlates it; 0 to train without noise.
    mechanism: The noise mechanism.
    seed: Fixes the batches and the noise.
    momentum: Decay of heavy-ball momentum on the directions of the rule.
  """

  rule: str
  clip: float
  rates: np.ndarray
  stddev: float
  mechanism: mechanisms.Mechanism
  seed: int
  momentum: float = 0.0


class State(NamedTuple):
  """The state of one training: weights, averages of weights and directions, and the private step's.
  """

  weights: Tree
  average: Tree
  moment: Tree
  private: private_rule.State
  step: int = 0


class Trial:
  """A model, its loss and public examples.

  Args:
    model: A built Keras model; `restore` sets its variables back.
    loss: As in `compile`.
    rules: The rules to try, by name.
    batch_size: The number of examples of a step.
  """

  def __init__(self, model: compat.Model, loss: object, rules: Dict[str, contract.Rule],
               batch_size: int = BATCH) -> None:
    self.model, self.rules, self.batch_size = model, rules, batch_size
    self.loss = losses_lib.ExampleLoss(loss, None, compat.output_names(model))
    self._compiled = loss, None  # With no loss weights.
    self.variables = model.trainable_variables
    self.specs = [trees.wide_spec(tf.TensorSpec(v.shape, tf.as_dtype(v.dtype)))
                  for v in self.variables]
    self.size = trees.size(self.specs)
    self.coordinate = 1.0  # The typical size of a coordinate of a gradient at the start.
    self.pace: Dict[str, float] = {}  # Seconds of a step of a rule, once there was one.
    self.start: Weights = tuple(v.numpy() for v in self.variables)  # As the model was given.
    self._before = [(v, v.numpy()) for v in model.variables]
    self._traced: Dict[Tuple[str, str], Callable[..., Tree]] = {}
    self._look = tf.function(self._outputs_and_losses, reduce_retracing=True)

  def compare(self, x: Tree, y: Tree) -> None:
    """Compares loss and gradients with Keras' own, as the first step of a `DPModel` does.

    Trials are on public examples: where a private model would be refused, there is a warning.
    """
    specs = trees.map(lambda t: tf.TensorSpec([None, *t.shape[1:]], tf.as_dtype(t.dtype)), (x, y))
    try:
      first_step.check(
          self.model, self.loss, self._compiled, (*specs, ()), (contract.Ask(),))
    except errors.PrivacyError as error:
      errors.caution(f'What `recommend` tries may not be what the model trains on. {error}')

  def restore(self) -> None:
    trees.assign(self._before)

  def norms(self, x: Tree, y: Tree, weights: Weights, rule: str) -> np.ndarray:
    """Returns the norms [n] of the gradients of all examples, in the first units of a rule."""
    self.assign(weights)
    count = len(tf.nest.flatten(y)[0])
    few = np.arange(_FACTORS) % count
    private = self._private(self.rules[rule], mechanisms.IndependentGaussian())
    state = private.init()
    request = private.query(
        state, self._public(private.rule, rows_of(x, few), rows_of(y, few), state.rule))
    parts = np.resize(np.arange(count), [-(-count // self.batch_size), self.batch_size])
    return np.concatenate([
        self._clipped(rule, private, request, rows_of(x, part), rows_of(y, part))[1].numpy()
        for part in parts])[:count]

  def begin(self, course: Course, weights: Weights) -> State:
    """Returns the state before the first step."""
    wide = [tf.cast(value, spec.dtype) for value, spec in zip(weights, self.specs)]
    private = self._private(self.rules[course.rule], course.mechanism, seed=course.seed)
    return State(wide, wide, [tf.zeros_like(value) for value in wide], private.init())

  def advance(self, course: Course, state: State, x: Tree, y: Tree, rows: np.ndarray, until: int,
              decay: float) -> State:
    """Trains on these rows until a step.

    Args:
      course: The settings.
      state: The state so far.
      x, y: All public examples.
      rows: The indices of the examples to train on.
      until: The number of steps at the end.
      decay: Of the moving average of the weights.
    """
    if until <= state.step:
      return state
    rng = np.random.default_rng([course.seed, state.step])
    drawn = rng.choice(rows, [until - state.step, self.batch_size])
    self.restore()  # Seeds of random layers begin anew.
    share = (_LEAST / self.batch_size / max(course.stddev, _LEAST / self.batch_size))**2
    numbers = [tf.constant(value, tf.float32) for value in (
        course.rates[state.step:until], course.clip, share, course.momentum, decay)]
    run = self._function(course, x, y, state)
    after = run(x, y, drawn, np.resize(rows, _FACTORS), numbers, not state.step, state[:4])
    return State(*after)._replace(step=until)

  def judge(self, x: Tree, y: Tree, weights: Sequence[Tree]) -> Tuple[Tree, np.ndarray]:
    """Returns the outputs for all examples, and their losses [n]."""
    self.assign(weights)
    count = len(tf.nest.flatten(y)[0])
    parts = [self._look(*rows_of((x, y), np.arange(first, min(count, first + CHUNK))))
             for first in range(0, count, CHUNK)]
    outputs = tf.nest.map_structure(lambda *some: np.concatenate([t.numpy() for t in some]),
                                    *(part[0] for part in parts))
    return outputs, np.concatenate([part[1].numpy() for part in parts]).astype(np.float64)

  def _outputs_and_losses(self, x: Tree, y: Tree) -> Tuple[Tree, tf.Tensor]:
    outputs = self.model(x, training=False)
    return outputs, self.loss(y, outputs)

  def assign(self, weights: Sequence[Tree]) -> None:
    trees.assign((v, tf.cast(value, v.dtype)) for v, value in zip(self.variables, weights))

  def _private(self, rule: contract.Rule, mechanism: mechanisms.Mechanism, clip: Scalar = 1.0,
               share: Scalar = 1.0, seed: int = 0) -> private_rule.PrivateRule:
    """Returns the private step for a clip norm and a noise that may be tensors.

    A query that takes a small share of the budget gets more noise: its standard deviation is that
    of the whole budget over the root of the share.
    """
    def query(state: Tree, public: Tree) -> contract.Queries:
      return tuple(one._replace(relative_clip=clip * one.relative_clip, share=share)
                   for one in rule.query(state, public))

    return private_rule.PrivateRule(
        rule._replace(query=query), self.specs, l2_norm_clip=1.0, noise_multiplier=_LEAST,
        batch_size=self.batch_size, mechanism=mechanism, seed=seed)

  def _public(self, rule: contract.Rule, x: Tree, y: Tree, state: Tree) -> Tree:
    if rule.public is None:
      return ()
    return engines.public_gradients_when_due(rule, self.model, self.loss, x, y, state)

  def _clipped(self, name: str, private: private_rule.PrivateRule, request: interface.Request,
               x: Tree, y: Tree) -> Tuple[Tree, tf.Tensor]:
    """Returns the clipped sum over examples and their norms.

    The engine is traced once for all rules that clip raw gradients: most of the time of a search
    would be tracing.
    """
    (query,) = request.queries
    key = 'clipped', '' if trees.absent(query.scale) else name
    if key not in self._traced:

      def clipped(x: Tree, y: Tree, sent: private_rule.Broadcast) -> Tuple[Tree, tf.Tensor]:
        batch = interface.Batch(x, y, (), tf.ones([self.batch_size], tf.bool))
        engine = engines.choose('auto', self.model, request.asks, x)
        found = engine(self.model, self.loss, batch, interface.Request(
            request.asks, private.queries(sent, self.specs), sent.clips))
        return found.sums[0].total, found.norms[0]

      self._traced[key] = tf.function(clipped, autograph=False, reduce_retracing=True)
    return self._traced[key](x, y, private.broadcast(request))

  def _function(self, course: Course, x: Tree, y: Tree, state: State) -> Callable[..., Tree]:
    """Returns the steps of a rule, traced once for any number of them."""
    key = course.rule, repr(course.mechanism)
    if key not in self._traced:
      spec_of = functools.partial(
          tf.nest.map_structure, lambda t: tf.TensorSpec(t.shape, tf.as_dtype(t.dtype)))
      number, rates = tf.TensorSpec([], tf.float32), tf.TensorSpec([None], tf.float32)
      self._traced[key] = tf.function(
          functools.partial(self._run, course.rule, course.mechanism),
          autograph=False, input_signature=[
              spec_of(x), spec_of(y), tf.TensorSpec([None, self.batch_size], tf.int64),
              tf.TensorSpec([_FACTORS], tf.int64), [rates, number, number, number, number],
              tf.TensorSpec([], tf.bool), spec_of(state[:4])])
    return self._traced[key]

  def _run(self, name: str, mechanism: mechanisms.Mechanism, x: Tree, y: Tree, drawn: tf.Tensor,
           few: tf.Tensor, numbers: Sequence[tf.Tensor], first: tf.Tensor, state: Tree) -> Tree:
    rule, (rates, clip, share, momentum, decay) = self.rules[name], numbers
    private = self._private(rule, mechanism, clip, share)
    self.assign(state[0])
    few_x, few_y = rows_of(x, few), rows_of(y, few)

    def step(index: tf.Tensor, average: Tree, moment: Tree, kept: private_rule.State) -> Tree:
      rows = tf.ensure_shape(drawn[index], [self.batch_size])
      own_x, own_y = rows_of(x, rows), rows_of(y, rows)
      if name == ADAM:
        mean = [tf.cast(part, spec.dtype) for part, spec in zip(
            engines.public_gradients('mean', self.model, self.loss, own_x, own_y), self.specs)]
        direction, own = rule.update(kept.rule, (contract.Release(mean, tf.zeros([])),), ())
        kept = kept._replace(rule=own)
      else:
        public = self._public(rule, few_x, few_y, kept.rule)
        request = private.query(kept, public)
        total, _ = self._clipped(name, private, request, own_x, own_y)
        direction, kept = private.answer(kept, request, (contract.Sums(total),), public)
      moment = [tf.cast(momentum, old.dtype) * old + tf.cast(change, old.dtype)
                for old, change in zip(moment, direction)]
      for variable, change in zip(self.variables, moment):
        variable.assign_sub(tf.cast(rates[index], variable.dtype) *
                            tf.cast(change, variable.dtype))
      memory = tf.where(first & tf.equal(index, 0), 0.0, decay)
      average = [tf.cast(memory, old.dtype) * old +
                 tf.cast(1 - memory, old.dtype) * tf.cast(variable, old.dtype)
                 for old, variable in zip(average, self.variables)]
      return index + 1, average, moment, kept

    _, average, moment, kept = tf.while_loop(
        lambda index, *_: index < tf.shape(rates)[0], step, (tf.constant(0), *state[1:]),
        parallel_iterations=1)
    return ([tf.cast(tf.convert_to_tensor(v), spec.dtype)
             for v, spec in zip(self.variables, self.specs)], average, moment, kept)


def rows_of(tree: Tree, rows: Tree) -> Tree:
  return tf.nest.map_structure(lambda values: tf.gather(values, rows), tree)
