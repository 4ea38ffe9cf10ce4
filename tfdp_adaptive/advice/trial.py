# SPDX-License-Identifier: Apache-2.0
"""Trains a model of PUBLIC gradients, with the noise of a plan, to try optimizers and settings.

The gradient g_i and the loss l_i of record i at the initial weights stand for its loss at the
distance w from them. With s = g_i w it is

    squared error    l_i (1 + s / (2 l_i))^2
    cross-entropy    l_i + log(p + (1 - p) exp(s / (1 - p))),   p = exp(-l_i)

Both have gradient g_i and loss l_i at w = 0. They are exact for linear models: the first for one
output, the second for two classes. The gradients of other models change along the way. With
`look`, they are computed again at every step, so that the model itself is trained.
"""

import math
from typing import Any, Callable, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow as tf

from tfdp_adaptive import contract
from tfdp_adaptive import terms
from tfdp_adaptive.privacy import plan as plan_lib

_STEPS = 400  # Of a simulation at most.


class Records(NamedTuple):
  """Public records, seen from the initial weights.

  Attributes:
    gradients: [n, m].
    losses: [n].
    squared: Whether the loss is a squared error, not a cross-entropy.
    look: `(distance [m], rows) -> (gradients, losses)` of these rows of all records, by the model
      itself at a distance from the initial weights; or None.
    rows: The rows of all records that these are; None for all.
  """

  gradients: np.ndarray
  losses: np.ndarray
  squared: bool
  look: Optional[Callable[..., Any]] = None
  rows: Optional[np.ndarray] = None

  def part(self, rows: np.ndarray) -> 'Records':
    return self._replace(gradients=self.gradients[rows], losses=self.losses[rows],
                         rows=rows if self.rows is None else self.rows[rows])

  def at(self, distance: np.ndarray) -> 'Records':
    """Returns the same records, seen from other weights."""
    assert self.look is not None
    gradients, losses = self.look(distance, self.rows)
    return self._replace(gradients=gradients, losses=np.maximum(losses, 1e-6))

  def _others(self, moved: np.ndarray) -> np.ndarray:
    """Log-odds of all other answers together."""
    certain = -np.expm1(-self.losses)  # 1 - p; log(expm1(l)) would overflow.
    with np.errstate(divide='ignore'):
      return self.losses + np.log(certain) + moved / certain

  def slopes(self, moved: np.ndarray) -> np.ndarray:
    """Derivative of each loss by s, given [..., n] values of s."""
    if self.squared:
      return 1 + moved / (2 * self.losses)
    return 1 / (1 + np.exp(-np.clip(self._others(moved), -60, 60))) / -np.expm1(-self.losses)

  def values(self, weights: np.ndarray) -> np.ndarray:
    """[k, n] losses at each of the weights [k, m]."""
    moved = (weights @ self.gradients.T).astype(np.float64)
    if self.squared:
      return self.losses * np.square(1 + moved / (2 * self.losses))
    return np.logaddexp(0, self._others(moved))


class Course(NamedTuple):
  """The steps that are simulated.

  Attributes:
    batch_size: B.
    stddev: Noise of each coordinate of a mean, over the clip norm, before it is correlated.
    inverse: [T, T], C^-1, which correlates the noise.
  """

  batch_size: float
  stddev: float
  inverse: np.ndarray

  @property
  def stddevs(self) -> np.ndarray:
    """[T] noise of each step, over the clip norm."""
    return self.stddev * np.linalg.norm(self.inverse, axis=1)


def course(plan: plan_lib.PrivacyPlan) -> Course:
  """The steps of the plan; or fewer and larger ones, whose sums have the same error."""
  steps = min(plan.steps, _STEPS)
  batch_size = plan.batch_size * plan.steps / steps
  ratio = plan.mechanism.rmse(plan.steps) / plan.mechanism.rmse(steps)
  noise = plan.noise_multiplier * terms.record_distance(plan.adjacency) * ratio
  return Course(batch_size, noise / batch_size, plan.mechanism.materialize_inverse(steps))


class Setting(NamedTuple):
  """What is trained with.

  Attributes:
    rate: Initial learning rate, which falls linearly to 0. For rules in units of the clip norm,
      times that norm.
    clip: Clip norm, in the units of the rule.
  """

  rate: float
  clip: float


class Candidate(NamedTuple):
  """A rule and the settings to try with it.

  Attributes:
    rule: Made for gradients in units of the clip norm, unless `scaled`.
    scaled: Whether clip norms are in scaled units.
    settings: They are trained side by side.
  """

  rule: contract.Rule
  scaled: bool
  settings: Sequence[Setting]


def train(candidate: Candidate, records: Records, steps: Course, seed: int) -> np.ndarray:
  """Weights after the last step, [settings, m]. All settings see the same draws.

  Records with a `look` are those of one setting.
  """
  rng = np.random.default_rng(seed)
  rates, clips = (np.array(values, np.float32)[:, None] for values in zip(*candidate.settings))
  count, parameters = records.gradients.shape
  unit = np.ones_like(clips) if candidate.scaled else clips
  weights = np.zeros([len(clips), parameters], np.float32)
  state = candidate.rule.init((tf.TensorSpec(weights.shape, tf.float32),))
  update = tf.function(candidate.rule.update)
  gradients = records.gradients.astype(np.float32)
  squares = np.square(gradients)
  total = len(steps.inverse)
  noise = steps.inverse @ rng.normal(size=[total, parameters])
  drawn = rng.multinomial(
      math.ceil(steps.batch_size), np.full(count, 1 / count), total) / steps.batch_size
  for step in range(total):
    moved = weights @ gradients.T
    if records.look is not None:
      records, moved = records.at(weights[0]), np.zeros_like(moved)
      gradients = records.gradients.astype(np.float32)
      squares = np.square(gradients)
    query, = candidate.rule.query(state)
    scale = query.scale[0].numpy() if query.scale else np.ones_like(weights)
    slopes = records.slopes(moved)
    norms = np.abs(slopes) * np.sqrt(np.square(scale) @ squares.T) / unit
    bound = clips / unit * float(query.relative_clip)
    weight = slopes * np.minimum(1, bound / np.maximum(norms, 1e-30)) / unit * drawn[step]
    mean = weight.astype(np.float32) @ gradients * scale
    mean += (steps.stddev * bound * noise[step]).astype(np.float32)
    release = contract.Release(
        (tf.constant(mean),), tf.constant(np.square(steps.stddevs[step] * bound), tf.float32))
    (direction,), state = update(state, (release,), ())
    weights = weights - rates * np.float32(1 - step / total) * direction.numpy()
  return weights
