# SPDX-License-Identifier: Apache-2.0
"""The audited subject as a pure function from state and records to releases and state.

With the same noise, a release with and one without a record differ by this record alone,
up to rounding. All of the real code runs in between: the private training step of a Keras
model, or the protocol of a DPQuery; see `subjects`.
"""

import abc
import itertools
import math
from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from scipy import linalg
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import privacy
from tfdp_adaptive import trees
from tfdp_adaptive.noise import keys
from tfdp_adaptive.noise import streams
from tfdp_adaptive.privacy import plan_checks

State = Tuple[trees.Tree, int]  # SECRET tensors, and the number of steps done.


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
  separate: float = 0.0
  clip: float = 0.0


class Subject(abc.ABC):
  """The subject of an audit, and the claim about every step.

  Attributes:
    name: The name of the optimizer or query.
    noise_multiplier: In units of one record's sensitivity.
    batch_size: The divisor.
    adjacency: The relation between neighboring data sets.
    mechanism: The mechanism of the noise.
    private: Whether there is any guarantee.
    most_steps: The largest number of steps, or None.
    plan: A `PrivacyPlan`, or None.
    size: Coordinates of a record.
    count: The number of records, if they cannot be chosen.
    data_problem: The problem with arrays in a model's loss or penalties, or ''.
    participations: How often a record may take part, if it can still be seen after the steps
      that it took part in; else 0.
    extra_releases: The extra releases of a plan for this subject.
    largest_batch: The divisor, or infinity if nothing limits a batch.
    writes: Whether a step leaves anything but releases and the noise's state.
  """

  largest_batch = math.inf
  writes = False
  plan: Optional[privacy.PrivacyPlan] = None

  def __init__(self, name: str, claimed: Any, mechanism: Optional[mechanisms.Mechanism],
               rule: contract.Rule, most_steps: Optional[int], size: int, l2_norm_clip: float,
               count: int = 0, data_problem: str = '') -> None:
    self.name, self.size, self.count, self.data_problem = name, size, count, data_problem
    self.noise_multiplier = float(claimed.noise_multiplier)
    self.batch_size, self.adjacency = float(claimed.batch_size), claimed.adjacency
    self.mechanism = mechanism or mechanisms.IndependentGaussian()
    self.private, self.most_steps = plan_checks.serves(None, rule), most_steps
    self.rule, self._l2_norm_clip = rule, l2_norm_clip
    self._fixed = tf.Variable(False, trainable=False)  # Whether numbers stand for releases.
    self._seen: Tuple[Any, ...] = ()  # (release, clip norm) that the rule saw in this step.
    past = [ask.second for ask in rule.asks
            if ask.second is not None and not ask.second.amplifiable]
    self.participations = min((second.participations for second in past), default=0)
    self.extra_releases = tuple(second.relative_noise for second in past)

  @abc.abstractmethod
  def _fresh(self, key: tf.Tensor) -> Any:
    """Returns the tensors of the state before the first step."""

  @abc.abstractmethod
  def _step(self, tensors: trees.Tree, records: np.ndarray, weights: np.ndarray,
            row: int) -> Tuple[Any, Any]:
    """Returns what the rule saw in a step, and the tensors after it."""

  @abc.abstractmethod
  def with_secret_of(self, state: State, other: State) -> Any:
    """Returns `state` with the clean past of `other`, which has the same releases."""

  def _update(self, state: trees.Tree, releases: contract.Releases,
              public: trees.Tree = ()) -> Tuple[trees.Tree, trees.Tree]:
    """Runs the rule's update, and records what the rule sees."""
    self._seen += tuple(
        (release, self._l2_norm_clip * tf.cast(query.relative_clip, tf.float32))
        for release, query in zip(releases, self.rule.query(state, public)))
    fixed = lambda tree: trees.map(lambda t: tf.where(self._fixed, tf.ones_like(t), t), tree)
    releases = tuple(
        release._replace(mean=fixed(release.mean), second=fixed(release.second),
                         side_mean=fixed(release.side_mean)) for release in releases)
    return self.rule.update(state, releases, public)

  def fresh(self, seed: Optional[int] = None) -> Any:
    """Returns the SECRET state before the first step, with a key of its own."""
    return self._fresh(keys.from_system() if seed is None else keys.from_seed(seed)), 0

  def step(
      self, state: State, records: np.ndarray, weights: Optional[np.ndarray] = None
      ) -> Tuple[Tuple[Part, ...], State]:
    """Runs a step on [n, size] records. A weight of zero means no record."""
    tensors, row = state
    weights = np.ones(len(records)) if weights is None else weights
    seen, tensors = self._step(
        tensors, np.asarray(records, np.float32), np.asarray(weights, np.float32), row)
    mechanism = streams.as_run(self.mechanism)
    norm = float(mechanism.row_norms(row + 1 if mechanism.steps is None else None)[row])

    def part(name: str, value: trees.Tree, variance: tf.Tensor, *more: float) -> Part:
      return Part(name, _flat(value), float(np.sqrt(np.float64(variance))) / norm, *more)

    parts = []
    for i, (ask, (release, clip)) in enumerate(
        zip(itertools.cycle(self.rule.asks), seen)):  # A subject that steps twice shows more.
      if release.variance > 0 or _flat(release.mean).any():  # Not queried otherwise.
        parts.append(part(f'mean {i}', release.mean, release.variance, 0.0, float(clip)))
        if ask.second is not None:
          separate = 0.0 if ask.second.amplifiable else ask.second.relative_noise
          parts.append(part(f'second {i}', release.second, release.second_variance, separate))
        if ask.side_query is not None:
          parts.append(part(f'side query {i}', release.side_mean, release.side_variance))
    return tuple(parts), (tensors, row + 1)

  def ordinary(self, rng: np.random.Generator, share: float = 0.5) -> np.ndarray:
    """Returns a batch of ordinary records, of the first `share` of those that are given."""
    rows = int(min(math.ceil(self.batch_size), max(1, self.largest_batch)))
    if self.count:
      return rng.integers(int(self.count * share), size=(rows, 1)) * 1.0
    return rng.standard_normal((rows, self.size)) * 3 / math.sqrt(self.size)

  def history(self, rng: np.random.Generator, seed: Optional[int],
              steps: Sequence[int]) -> Iterator[Tuple[int, Any]]:
    """Yields `(step, state)` after so many steps on ordinary records."""
    state = self.fresh(seed)
    last = self.limit(max(steps) + 1) - 1
    for step in range(last + 1):
      if step in steps:
        yield step, state
      if step < last:
        _, state = self.step(state, self.ordinary(rng))

  def written(
      self, state: State, records: np.ndarray, weights: np.ndarray) -> Dict[str, np.ndarray]:
    """Returns the state after a step, by name, with fixed numbers instead of its releases."""
    raise NotImplementedError

  def whitened(self, steps: int, some: Sequence[int], rows: np.ndarray) -> np.ndarray:
    """Returns rows of `some` of the steps, whose noise is then independent if it is C^-1 Z."""
    noise = streams.as_run(self.mechanism).materialize_inverse(steps)[some]
    return linalg.solve_triangular(
        np.linalg.cholesky(noise @ noise.T), rows, lower=True, check_finite=False)

  def limit(self, steps: int) -> int:
    """Returns `steps`, or the number of covered steps if that is smaller."""
    return steps if self.most_steps is None else min(steps, self.most_steps)


def _flat(tree: trees.Tree) -> np.ndarray:
  return np.concatenate([np.ravel(np.asarray(t, np.float64)) for t in tf.nest.flatten(tree)])
