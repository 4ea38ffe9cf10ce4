# SPDX-License-Identifier: Apache-2.0
"""Turns clipped sums into releases: the only home of sigma, B, adjacency and row index.

All adapters (Keras, DPQuery, the federated server) use the same `Privatizer`, so the noise that is
accounted for is added in one place:

    mean    = (sum + std_mean * row) / B
    second  =  measured value + std_value * row

with one row of the mechanism per step over all asks together.
"""

import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import mechanisms
from tfdp_adaptive import noise as noise_lib
from tfdp_adaptive import terms
from tfdp_adaptive import trees
from tfdp_adaptive import weights
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.noise import keys


class State(NamedTuple):
  """SECRET; never exported, never part of a statement."""

  noise: noise_lib.State
  secret: Tuple[trees.Tree, ...]  # Clean state of the statistics, one entry per ask.


class Drawn(NamedTuple):
  """The noise of one step. It is SECRET."""

  vectors: Tuple[tf.Tensor, ...]  # Standard noise, flat; see `noise.unflatten`.
  variance: tf.Tensor  # [] of each of its elements.
  is_open: tf.Tensor  # [] bool, whether the step is accounted for.


def settings(
    rule: contract.Rule, plan: Optional[terms.Terms] = None, *,
    l2_norm_clip: Optional[float] = None, noise_multiplier: Optional[float] = None,
    batch_size: Optional[float] = None, mechanism: Optional[mechanisms.Mechanism] = None,
    adjacency: Optional[str] = None, steps: Optional[int] = None) -> Dict[str, Any]:
  """Returns arguments of `Privatizer`, either from a plan or as given.

  With a plan, only the clip norm may be given as well.
  """
  numbers = dict(l2_norm_clip=l2_norm_clip, noise_multiplier=noise_multiplier,
                 batch_size=batch_size)
  fixed = dict(noise_multiplier=noise_multiplier, batch_size=batch_size, mechanism=mechanism,
               adjacency=adjacency, steps=steps)
  if plan is not None:
    if not hasattr(plan, 'check_rule'):
      raise ValueError('`plan` must be a `tfdp.PrivacyPlan` or None. '
                       f'Received: plan={plan!r} of type {type(plan).__name__}.')
    given = {name: value for name, value in fixed.items() if value is not None}
    if given:
      raise ValueError('With a `plan`, these come from the plan and must not be given again. '
                       f'Received: {given}.')
    plan.check_rule(rule)
    chosen = {name: getattr(plan, name) for name in fixed}
    chosen['l2_norm_clip'] = plan.l2_norm_clip if l2_norm_clip is None else l2_norm_clip
    if chosen['l2_norm_clip'] is None:
      raise ValueError('`l2_norm_clip` must be given, here or in the plan, if the clip norm does '
                       'not follow the examples. Received: l2_norm_clip=None.')
  else:
    missing = sorted(name for name, value in numbers.items() if value is None)
    if missing:
      raise ValueError(f'Missing {missing}: there is no safe default. Give them, or a '
                       '`plan=tfdp.PrivacyPlan(...)`, which also accounts for the privacy. '
                       f'Received: {numbers}.')
    chosen = {**fixed, **numbers, 'adjacency': 'zero_out' if adjacency is None else adjacency}
    _check(chosen)
  independent_noise = (type(None), toeplitz.IndependentGaussian)
  if rule.independent_noise and not isinstance(chosen['mechanism'], independent_noise):
    raise ValueError(f'The rule {rule.name} is only private, or only correct, with independent '
                     f"noise. Received: mechanism={chosen['mechanism']!r}.")
  return chosen


def _check(arguments: Dict[str, Any]) -> None:
  checks.positive(**{name: arguments[name] for name in ('l2_norm_clip', 'batch_size')})
  checks.not_negative(noise_multiplier=arguments['noise_multiplier'])
  terms.check_adjacency(arguments['adjacency'])
  if arguments['mechanism'] is not None:
    check_mechanism(arguments['mechanism'])


def check_mechanism(mechanism: object) -> None:
  """Raises unless `mechanism` is one of `tfdp.mechanisms`."""
  if not isinstance(mechanism, mechanisms.Mechanism):
    raise ValueError('`mechanism` must be a mechanism of `tfdp.mechanisms`, such as '
                     f'`IndependentGaussian()`. Received: mechanism={mechanism!r}.')


class Privatizer:
  """Adds the noise of one run.

  Args:
    asks: `rule.asks`.
    specs: Tree of `tf.TensorSpec` like the parameters. Noise is made in float32
      at least, whatever the parameters are stored in.
    l2_norm_clip: Base clip norm, in the units of the scaled records.
    noise_multiplier: Standard deviation of Z in clip norms; 0 means no privacy.
    batch_size: The divisor B: the batch size, or the EXPECTED one under Poisson
      sampling. Never the realised one.
    adjacency: 'zero_out', 'add_remove' or 'replace' (noise doubled).
    mechanism: A `tfdp.mechanisms.Mechanism`; independent Gaussian by default.
    steps: Number of steps accounted for; later releases contain only noise. None for as many
      as the mechanism allows.
    seed: For tests only.
    allow_non_private: Accept statistics that are released without noise.
  """

  def __init__(
      self, asks: Tuple[contract.Ask, ...], specs: trees.Tree, *, l2_norm_clip: float,
      noise_multiplier: float, batch_size: float, adjacency: str = 'zero_out',
      mechanism: Optional[mechanisms.Mechanism] = None, steps: Optional[int] = None,
      seed: Optional[int] = None, allow_non_private: bool = False) -> None:
    _check(dict(l2_norm_clip=l2_norm_clip, noise_multiplier=noise_multiplier,
                batch_size=batch_size, adjacency=adjacency, mechanism=mechanism))
    if steps is not None:
      checks.whole(steps=steps)
    self._asks = tuple(asks)
    self._l2_norm_clip = float(l2_norm_clip)
    self.noise_multiplier = float(noise_multiplier)
    self.batch_size = float(batch_size)
    self.adjacency = adjacency
    mechanism = toeplitz.IndependentGaussian() if mechanism is None else mechanism
    limits = [n for n in (steps, mechanism.steps) if n is not None]
    self.steps = min(limits) if limits else None
    for ask in self._asks:
      contract.check_side_query(ask)
      if ask.second is not None and not ask.second.private and not allow_non_private:
        raise ValueError('This rule releases a statistic WITHOUT noise and has no privacy '
                         'guarantee. Pass allow_non_private=True if that is what you want.')
    self.specs = trees.map(trees.wide_spec, specs)
    self._dtype = trees.dtype_of(self.specs)
    self._release_specs = tuple(self._specs_of(ask) for ask in self._asks)
    self._side_noises = tuple(map(self._side_noise, self._asks))
    self._check_range()
    source = keys.from_system if seed is None else (lambda: keys.from_seed(seed))
    self._noise = noise_lib.stream(mechanism, source)

  def _specs_of(self, ask: contract.Ask) -> trees.Tree:
    """Returns the specs of the mean, the second statistic and the side query of an ask."""
    return (self.specs, ask.second.specs(self.specs) if ask.second else (),
            tf.TensorSpec([ask.side_query.size], self._dtype) if ask.side_query else ())

  def _side_noise(self, ask: contract.Ask) -> Tuple[float, float]:
    """Returns `(factor on the noise of the other sums, std of the side mean)` at sigma = 1."""
    if ask.side_query is None:
      return 1.0, 0.0
    factor, std = ask.side_query.noise(self.noise_multiplier, self.batch_size)
    distance = terms.record_distance(self.adjacency)
    return factor, (distance * std / self.noise_multiplier / self.batch_size
                    if self.noise_multiplier else 0.0)

  def _stddevs(
      self, ask: contract.Ask, side_noise: Tuple[float, float],
      clip: trees.Scalar) -> Tuple[trees.Scalar, ...]:
    """Returns the stds on mean, second statistic and side mean for a noise multiplier of one."""
    factor, side_std = side_noise
    mean, second = ask.second.stddevs(clip, self.batch_size, self.adjacency) if ask.second else (
        contract.mean_sensitivity(clip, self.batch_size, self.adjacency), 0.0)
    return factor * mean, factor * second, side_std

  def _check_range(self) -> None:
    """Raises if the dtype cannot represent a clip norm, or a variance of noise."""
    clip, dtype = np.float64(self._l2_norm_clip), self._dtype
    units, stddevs = [clip], []
    with np.errstate(all='ignore'):
      for ask, side_noise in zip(self._asks, self._side_noises):
        units += self._stddevs(ask, side_noise, clip)
        stddevs += [float(std * self.noise_multiplier) for std in units[-3:]]
    limits = np.finfo(dtype.as_numpy_dtype)
    least, most = float(limits.tiny), float(limits.max)
    if not all(least <= number <= most for number in units if number) or not all(
        math.sqrt(least) <= std <= math.sqrt(most) for std in stddevs if std):
      raise ValueError(
          f'Clip norms must fit into {dtype.name}, and so must the squares of the standard '
          f'deviations of noise, {stddevs}. Received: l2_norm_clip={clip:g}, noise_multiplier='
          f'{self.noise_multiplier}, batch_size={self.batch_size}. Scale the loss, and the clip '
          'norm with it.')

  def init(self, key: Optional[tf.Tensor] = None) -> State:
    """Returns a fresh SECRET state.

    Args:
      key: The key of an earlier state, to go on with its chain of keys. By default a key is drawn
        when this runs, not when it is traced.
    """
    secret = tuple(ask.second.init(self.specs) if ask.second else () for ask in self._asks)
    return State(self._noise.init(self._release_specs, key), secret)

  def resolve(self, queries: contract.Queries) -> Tuple[tf.Tensor, ...]:
    """Returns the absolute clip norm of every query, [] each, in scaled units."""
    return tuple(self._l2_norm_clip * tf.cast(query.relative_clip, self._dtype)
                 for query in queries)

  def release(
      self, state: State, queries: contract.Queries,
      sums: Tuple[contract.Sums, ...]) -> Tuple[contract.Releases, State]:
    """Adds noise to the sums of one step: `draw`, then `combine`.

    Args:
      state: `State`.
      queries: The queries the sums were computed for.
      sums: One `contract.Sums` per ask.

    Returns:
      One `contract.Release` per ask, and the next state. If shares add up to more than
      one, the noise is proportionally larger. Shares that are not positive count as zero.
    """
    drawn, noise = self.draw(state.noise, sums)
    releases, secret = self.combine(state.secret, queries, sums, drawn)
    return releases, State(noise, secret)

  def draw(
      self, state: noise_lib.State,
      sums: Tuple[contract.Sums, ...]) -> Tuple[Drawn, noise_lib.State]:
    """Draws the noise of one step, after the sums, so that gradients and noise share memory."""
    is_open = noise_lib.within(state.row, self.steps)
    with tf.control_dependencies(tf.nest.flatten([one.total for one in sums])):
      vectors, variance, state = self._noise.draw(state, self._release_specs)
    return Drawn(vectors, tf.cast(variance, self._dtype), is_open), state

  def combine(
      self, secret: Tuple[trees.Tree, ...], queries: contract.Queries,
      sums: Tuple[contract.Sums, ...],
      drawn: Drawn) -> Tuple[contract.Releases, Tuple[trees.Tree, ...]]:
    """Adds drawn noise to sums; pure arithmetic. See `release`."""
    if not len(self._asks) == len(queries) == len(sums):
      raise ValueError('`queries` and `sums` must have one entry per ask. '
                       f'Received: {len(self._asks)} asks, {len(queries)} queries, '
                       f'{len(sums)} sums.')
    dtype = self._dtype
    rows = noise_lib.unflatten(drawn.vectors, self._release_specs)
    shares = [tf.cast(query.share, dtype) for query in queries]
    shares = [tf.where(share > 0, share, 0) for share in shares]
    excess = tf.maximum(tf.add_n(shares), 1)
    releases, secrets = [], []
    for ask, side_noise, clip, share, clean, row, spec, own in zip(
        self._asks, self._side_noises, self.resolve(queries), shares, sums, rows,
        self._release_specs, secret):
      asked = share > 0
      allowed = drawn.is_open & asked
      spread = self.noise_multiplier * tf.sqrt(excess / tf.where(asked, share, 1))
      mean = self._mean(clean.total, spec[0], allowed)
      second: trees.Tree = ()
      if ask.second is not None:
        square = self._mean(clean.square, self.specs, allowed) if ask.squares else ()
        second, after = ask.second.measure(mean, square, clip, own)
        # After the last step the value is withheld too, because it may contain clean sums.
        second = trees.map(lambda v: tf.where(allowed, v, 0), _as_specs(second, spec[1]))
        own = trees.map(lambda new, old: tf.where(allowed, new, old), after, own)
      side = self._mean(clean.side_sum, spec[2], allowed) if ask.side_query else ()
      released: List[trees.Tree] = []
      for value, z, std in zip(
          (mean, second, side), row, self._stddevs(ask, side_noise, clip)):
        released += _noised(value, z, std, spread, drawn.variance, asked)
      releases.append(contract.Release(*released))
      secrets.append(own)
    return tuple(releases), tuple(secrets)

  def _mean(self, total: trees.Tree, specs: trees.Tree, allowed: tf.Tensor) -> trees.Tree:
    """Returns a sum divided by B; zero where nothing may be released."""
    divisor, zero = trees.scalar(self.batch_size, specs), trees.scalar(0, specs)
    return trees.map(lambda t: tf.where(allowed, t / divisor[t.dtype], zero[t.dtype]),
                     _as_specs(total, specs))


def _noised(
    value: trees.Tree, row: trees.Tree, std: trees.Scalar, spread: tf.Tensor,
    row_variance: tf.Tensor, asked: tf.Tensor) -> Tuple[trees.Tree, trees.Scalar]:
  """Returns `(value + noise, variance of the noise)`; zero if not asked, () for no value."""
  if trees.absent(value):
    return (), ()
  std = weights.like(std, spread) * spread
  return _sum(value, row, std, asked), tf.where(asked, tf.square(std) * row_variance, 0)


@trees.one_pass
def _sum(value: trees.Tree, row: trees.Tree, std: tf.Tensor, asked: tf.Tensor) -> trees.Tree:
  return trees.map(
      lambda v, z: tf.where(asked, v + tf.cast(std, v.dtype) * z, tf.zeros_like(v)), value, row)


def _as_specs(tree: trees.Tree, specs: trees.Tree) -> trees.Tree:
  """Casts a tree. Raises for a tensor of another shape, which would share its noise."""
  return trees.map(
      lambda t, s: trees.shaped(tf.cast(t, s.dtype), s.shape), tree, specs)
