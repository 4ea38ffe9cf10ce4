# SPDX-License-Identifier: Apache-2.0
"""The audited subject as a pure function from state and records to releases and state.

The gradient of a record is the record itself, so that the audit can make any gradient.
With the same noise, a release with and one without a record differ by this record alone,
up to rounding. All of the real code runs in between: the private training step of a Keras
model with its clipping engine, or the protocol of a DPQuery.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.audit import watched as watched_lib
from tfdp_adaptive.batches import marks
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.keras import private as private_lib
from tfdp_adaptive.mechanisms import independent
from tfdp_adaptive.noise import keys
from tfdp_adaptive.noise import streams

if TYPE_CHECKING:
  from tfdp_adaptive import contract
  from tfdp_adaptive import mechanisms
  from tfdp_adaptive.privacy import plan as plan_lib

keras = compat.keras
_FAR = -1e30  # A target that no output reaches: the absolute error's gradient is the record.
# A user's examples, in parts of the record; the last one has no weight.
_PARTS, _THERE = (0.5, 0.375, 0.125, 1.0), (1.0, 1.0, 1.0, 0.0)


class Part(NamedTuple):
  """A noisy vector of one step.

  Attributes:
    name: Which release of a step.
    value: [k] float64, as the rule gets it.
    unit: What one unit of the mechanism's noise row is here, as the code announces
      it: the announced standard deviation over the norm of the row. Zero: no noise.
    separate: 0, or the noise multiplier, relative to the claimed one, by which the
      part is accounted for by itself (a statistic of past clean data).
    clip: Clip norm of a record, in the units of `value` times the batch size; zero
      for what is no mean of clipped records.
  """

  name: str
  value: np.ndarray
  unit: float
  separate: float
  clip: float


class Claims(NamedTuple):
  """The claim about every step.

  Attributes:
    name: The name of the optimizer or query.
    noise_multiplier: In units of one record's sensitivity.
    batch_size: The divisor.
    adjacency: The relation between neighboring data sets.
    mechanism: The mechanism of the noise.
    private: Whether there is any guarantee.
    steps: The largest number of steps, or None.
    plan: A `PrivacyPlan`, or None.
  """

  name: str
  noise_multiplier: float
  batch_size: float
  adjacency: str
  mechanism: Any
  private: bool
  steps: Any
  plan: Any


class Subject:
  """See `of`.

  Attributes:
    claims: `Claims`.
    size: Coordinates of a record.
    count: The number of records, if they cannot be chosen.
    held: The problem with arrays in a model's loss or penalties, or ''.
    participations: 0, or how often a record may take part, where it can still be seen after
      the steps that it took part in.
  """

  def __init__(self, claims: Claims, size: int, asks: Tuple[contract.Ask, ...], run: Run,
               count: int = 0, held: str = '') -> None:
    self.claims, self.size, self.count, self.held = claims, size, count, held
    self._asks, self._run = asks, run
    self.participations = min(
        (ask.second.participations for ask in asks
         if ask.second is not None and not ask.second.amplifiable), default=0)

  def fresh(self, seed: Optional[int] = None) -> Any:
    """SECRET state before the first step, with a key of its own."""
    key = keys.from_system() if seed is None else keys.from_seed(seed)
    return self._run.fresh(key), 0

  def step(self, state: Any, records: Any, weights: Any = None) -> Tuple[Tuple[Part, ...], Any]:
    """Runs a step on [n, size] records. A weight of zero means no record."""
    tensors, row = state
    records = np.asarray(records, np.float32)
    weights = np.ones(len(records)) if weights is None else weights
    seen, tensors = self._run.step(tensors, records, np.asarray(weights, np.float32), row)
    norm = self._row_norm(row)
    parts = []
    for i, (ask, (mean, variance, second, second_variance, clip, rider, rider_variance)) in (
        enumerate(zip(itertools.cycle(self._asks), seen))):  # Whoever steps twice shows more.
      mean = _flat(mean)
      if variance > 0 or mean.any():  # Else it was not asked at this step.
        parts.append(Part(f'mean {i}', mean, _root(variance) / norm, 0.0, float(clip)))
        if ask.second is not None:
          separate = 0.0 if ask.second.amplifiable else ask.second.relative_noise
          parts.append(Part(
              f'second {i}', _flat(second), _root(second_variance) / norm, separate, 0.0))
        if ask.rider is not None:
          parts.append(Part(f'rider {i}', _flat(rider), _root(rider_variance) / norm, 0.0, 0.0))
    return tuple(parts), (tensors, row + 1)

  @property
  def rides(self) -> bool:
    """Whether numbers of the records' norms ride on the noise of a mean."""
    return any(ask.rider is not None for ask in self._asks)

  @property
  def writes(self) -> bool:
    """Whether a step leaves anything but releases and the noise's state."""
    return self._run.written is not None

  def written(self, state: Any, records: Any, weights: Any) -> Dict[str, np.ndarray]:
    """Returns the state after a step, by name, with fixed numbers instead of its releases."""
    tensors, row = state
    return self._run.written(
        tensors, np.asarray(records, np.float32), np.asarray(weights, np.float32), row)

  def with_secret_of(self, state: Any, other: Any) -> Any:
    """`state`, but with the clean past of `other`: the same releases, seen from there."""
    return self._run.with_secret_of(state[0], other[0]), state[1]

  def covariance(self, steps: int) -> np.ndarray:
    """[steps, steps] C^-1 C^-T of the noise that is claimed."""
    inverse = streams.as_run(self.claims.mechanism).materialize_inverse(steps)
    return inverse @ inverse.T

  @property
  def largest_batch(self) -> float:
    """Returns the largest possible batch: the divisor, or infinity if nothing limits it."""
    sized = self._run.sized and self.claims.plan is None and self.claims.adjacency != 'add_remove'
    return self.claims.batch_size if sized else float('inf')

  @property
  def separate_releases(self) -> Tuple[float, ...]:
    """`extra_releases` of a plan for this subject."""
    return tuple(ask.second.relative_noise for ask in self._asks
                 if ask.second is not None and not ask.second.amplifiable)

  def limit(self, steps: int) -> int:
    """Returns `steps`, or the number of covered steps if that is smaller."""
    return steps if self.claims.steps is None else min(steps, self.claims.steps)

  def _row_norm(self, row: int) -> float:
    mechanism = streams.as_run(self.claims.mechanism)
    return float(mechanism.row_norms(row + 1 if mechanism.steps is None else None)[row])


def of(subject: Any, size: int) -> Subject:
  """The subject of an audit.

  Args:
    subject: A private optimizer that is not built yet, or a `RuleQuery`.
    size: The number of coordinates of a record, for an optimizer. A query has its own.
  """
  if isinstance(subject, optimizer_lib.DPOptimizer):
    return _of_optimizer(subject, size)
  if hasattr(subject, 'preprocess_record') and hasattr(subject, '_rule'):
    return _of_query(subject)
  raise ValueError('An audit is of a private optimizer, such as tfdp.DPAdam, or of a '
                   f'tfdp.queries.RuleQuery. Received: {subject!r}.')


def claims_of(optimizer: Any) -> Claims:
  """Returns the claim of the built optimizer, not the values passed to the privatizer."""
  claims = _claims(type(optimizer).__name__, optimizer.run.privatizer, optimizer.mechanism,
                   optimizer.rule, optimizer.plan)
  return claims._replace(noise_multiplier=float(optimizer.noise_multiplier),
                         batch_size=float(optimizer.batch_size), adjacency=optimizer.adjacency)


def _claims(
    name: str, privatizer: Any, mechanism: Optional[mechanisms.Mechanism], rule: contract.Rule,
    plan: Optional[plan_lib.PrivacyPlan] = None) -> Claims:
  if mechanism is not None and mechanism.rounding is not None:
    raise ValueError('An audit compares releases that have the same noise, and that of the '
                     f'operating system would be another each time. Received: mechanism='
                     f'{mechanism!r}. Audit the same optimizer without `rounding`.')
  return Claims(
      name=name, noise_multiplier=float(privatizer.noise_multiplier),
      batch_size=float(privatizer.batch_size), adjacency=privatizer.adjacency,
      mechanism=mechanism or independent.IndependentGaussian(),
      private=all(ask.second is None or ask.second.private for ask in rule.asks),
      steps=privatizer.steps, plan=plan)


class Run(NamedTuple):
  fresh: Any  # key -> tensors
  step: Any  # (tensors, records, weights, row) -> (seen, tensors)
  with_secret_of: Any  # (tensors, tensors) -> tensors
  sized: bool  # Whether it refuses batches of other sizes than were said.
  written: Any = None  # (tensors, records, weights, row) -> {name: array}


def _of_optimizer(optimizer: optimizer_lib.DPOptimizer, size: int) -> Subject:
  if optimizer.run.state is not None:
    raise ValueError('`subject` must be an optimizer that no model has used yet: the audit trains '
                     f'a model of its own with it. Received: {optimizer.name}, which is built.')
  if optimizer.rule.public is not None and optimizer.public_data is None:
    rng = np.random.default_rng(0)
    optimizer.public_data = (rng.standard_normal((8, size)).astype(np.float32),
                             np.full((8, 1), _FAR, np.float32))
  rows = next(d for d in range(math.isqrt(size), 0, -1) if size % d == 0)
  model = private_lib.DPSequential([
      keras.layers.Input((size,)),
      keras.layers.Reshape((rows, size // rows)),  # Some rules have a scale on either side.
      keras.layers.EinsumDense('bij,ijk->bk', output_shape=1, kernel_initializer='zeros')])
  model.compile(optimizer=optimizer, loss='mean_absolute_error')
  optimizer.build(model.trainable_variables)
  watched = watched_lib.Watched(optimizer.rule, optimizer.l2_norm_clip)
  optimizer._hidden.update = watched.update
  state: Any = optimizer.run.state  # It is built.
  variables = tf.nest.flatten(state) + list(model.trainable_variables)
  initial = [tf.convert_to_tensor(v) for v in variables]
  secrets = [id(v) for v in tf.nest.flatten(state[1].secret)]

  def fresh(key: Any) -> Any:
    return [key if v is state[1].noise.key else value
            for v, value in zip(variables, initial)]

  def with_secret_of(tensors: Any, others: Any) -> Any:
    return [other if id(v) in secrets else value
            for v, value, other in zip(variables, tensors, others)]

  @tf.function(autograph=False)
  def step(tensors: Any, records: Any, weights: Any) -> Tuple[Any, Any]:
    watched.seen = ()
    for variable, value in zip(variables, tensors):
      variable.assign(value)
    if optimizer.plan is not None and optimizer.plan.whole_users:
      records = records[:, tf.newaxis] * tf.constant(_PARTS)[:, tf.newaxis]
      weights = weights[:, tf.newaxis] * tf.constant(_THERE, weights.dtype)
    targets = tf.fill(tf.concat([tf.shape(records)[:-1], [1]], 0), _FAR)
    model.train_step((records, tf.ensure_shape(targets, records.shape[:-1] + [1]), weights))
    return watched.seen, [tf.convert_to_tensor(v) for v in variables]

  run, traced = _with_shapes(step, initial, size, optimizer.plan)
  others = watched_lib.captured(traced, variables)
  written = watched.written(model, optimizer, variables, run, others)
  return Subject(claims_of(optimizer), size, optimizer.rule.asks,
                 Run(fresh, run, with_secret_of, sized=True, written=written))


def _of_query(query: Any) -> Subject:
  rule, privatizer, specs = query._rule, query._privatizer, query._specs
  sizes = [spec.shape.num_elements() for spec in tf.nest.flatten(specs)]
  watched = watched_lib.Watched(rule, privatizer._l2_norm_clip)
  query = copy.copy(query)
  query._rule = rule._replace(update=watched.update)

  def fresh(key: Any) -> Any:
    state = query.initial_global_state()
    noise = state.privatizer.noise._replace(key=key)
    return state._replace(privatizer=state.privatizer._replace(noise=noise))

  def step(state: Any, records: Any, weights: Any, row: int) -> Tuple[Any, Any]:
    del row
    return run(state, tf.constant(records * (weights != 0)[:, np.newaxis]))

  @tf.function(autograph=False, reduce_retracing=True)
  def run(state: Any, records: Any) -> Tuple[Any, Any]:
    watched.seen = ()
    params = query.derive_sample_params(state)

    def accumulate(sums: Any, record: Any) -> Any:
      leaves = [tf.reshape(part, spec.shape) for part, spec in zip(
          tf.split(record, sizes), tf.nest.flatten(specs))]
      return query.accumulate_record(params, sums, tf.nest.pack_sequence_as(specs, leaves))

    sums = tf.foldl(accumulate, records, query.initial_sample_state())
    _, state, _ = query.get_noised_result(sums, state)
    return watched.seen, state

  def with_secret_of(state: Any, other: Any) -> Any:
    secret = other.privatizer.secret
    return state._replace(privatizer=state.privatizer._replace(secret=secret))

  claims = _claims(f'RuleQuery({rule.name})', privatizer, query._mechanism, rule)
  return Subject(claims, sum(sizes), rule.asks, Run(fresh, step, with_secret_of, sized=False))


def _with_shapes(
    step: Any, initial: Any, size: int,
    plan: Optional[plan_lib.PrivacyPlan]) -> Tuple[Callable[..., Any], Any]:
  """Traces `step` once for any number of records, and returns the trace."""
  weight = tf.float32 if plan is None else tf.float64
  traced = step.get_concrete_function(
      [tf.TensorSpec(t.shape, t.dtype) for t in initial],
      tf.TensorSpec([None, size], tf.float32), tf.TensorSpec([None], weight))

  def run(tensors: Any, records: Any, weights: Any, row: int) -> Any:
    weights = weights if plan is None else marks.write(weights, plan, row)
    return traced(tensors, tf.constant(records), tf.constant(weights, weight))

  return run, traced


def _flat(tree: Any) -> np.ndarray:
  return np.concatenate([np.ravel(np.asarray(t, np.float64)) for t in tf.nest.flatten(tree)])


def _root(variance: Any) -> float:
  return float(np.sqrt(np.asarray(variance, np.float64)))
