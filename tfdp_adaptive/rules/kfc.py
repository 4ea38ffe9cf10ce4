# SPDX-License-Identifier: Apache-2.0
"""DP-KFC: clips and adds noise between matrices from public or synthetic inputs."""

from typing import Any, NamedTuple, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import geometry
from tfdp_adaptive import trees
from tfdp_adaptive.rules import kronecker
from tfdp_adaptive.rules import moments

MAX_SIDE = 512  # Longer sides of matrices have a diagonal.


class State(NamedTuple):
  step: tf.Tensor  # [] int64, releases consumed.
  first: trees.Tree  # First moment, which the parameters follow.
  moments: Any  # Per variable: averages of its factors, as `contract.Rule.public` has them.
  scale: Any  # Per variable, as `geometry.packed` has it.


def dp_kfc(
    momentum: float = 0.0, *, power: float = 0.5, scale_epsilon: float = 1e-2,
    decay: float = 0.9, refresh_every: int = 20, frame: str = 'scaled') -> contract.Rule:
  """Use DP-KFC if you have some public inputs, with or without labels.

  DP-SGD between Kronecker factors of curvature that need no private data, after DP-KFC
  (arXiv:2605.13418). A matrix W is multiplied by inputs a, and e are the gradients of the loss by
  these products, so that a record's gradient is a sum of a e'. With a and e computed on PUBLIC
  examples, which may be made up, at the current weights:

      L = average of a a';   A = (L d / tr L + scale_epsilon)^-power
      R = average of e e';   G = (R p / tr R + scale_epsilon)^-power

  Records are clipped and noised as `A W G`, and parameters move along the release, `A g G`, or
  along g itself with `frame='raw'`. Vectors have a scale per coordinate, computed from the squares
  of public gradients. Public data cost no privacy. As `public_data` you can pass noise in the shape
  of inputs, words with public frequencies (`tfdp_adaptive.examples.synthetic`), and random labels.
  Such data show how the layers mix and shrink their inputs. They do not show what the private
  records look like.

  The paper's damping is in the units of the averages, and depends on the realised size of the
  batch. Here it is relative to the mean of each average, and does not depend on the batch. For a
  side of more than 512, only the diagonal is used. For an embedding table, it contains the
  frequencies of the rows.

  Args:
    momentum: Momentum of the direction, in [0, 1).
    power: In (0, 1]; the original method uses 0.5.
    scale_epsilon: Added to eigenvalues relative to their mean, > 0. With large values, the geometry
      is that of DP-SGD.
    decay: The decay of the averages over refreshes, in [0, 1).
    refresh_every: Steps between two refreshes. A refresh computes public gradients and a
      decomposition in float64, see `dp_shampoo`. Other steps need no public gradients.
    frame: 'scaled', or 'raw' to transform releases back to gradient units.

  Returns:
    A `contract.Rule` with `public='factors'`, whose direction is in gradient units.
  """
  checks.decay(momentum=momentum, decay=decay)
  checks.positive(power=power, scale_epsilon=scale_epsilon)
  checks.require(power <= 1, 'be at most one', power=power)
  checks.whole(refresh_every=refresh_every)
  checks.one_of(('scaled', 'raw'), frame=frame)
  first = moments.heavy_ball(momentum, nesterov=False)

  def init(specs: trees.Tree) -> State:
    dtype = trees.dtype_of(specs)
    zeros = tuple(tuple(tf.zeros(shape, dtype) for shape in sides(spec.shape))
                  for spec in tf.nest.flatten(specs))
    scale = trees.map(lambda side: tf.eye(side.shape[0], dtype=dtype) if side.shape.rank == 2
                      else tf.ones_like(side), zeros)
    return State(moments.first_step(), first.init(specs), zeros, scale)

  def due(state: State) -> tf.Tensor:
    return tf.equal(state.step, 0) | tf.equal((state.step + 1) % refresh_every, 0)

  def averaged(state: State, public: trees.Tree) -> Any:
    return tf.nest.map_structure(
        lambda before, now: _average(before, tf.cast(now, before.dtype), decay),
        state.moments, public, check_types=False)

  def made_of(averages: Any, before: Any) -> Any:
    return trees.map(lambda one, old: _scale(one, old, power, scale_epsilon), averages, before)

  def query(state: State, public: trees.Tree = ()) -> contract.Queries:
    contract.check_public(public, 'dp_kfc')
    scale = tf.cond(
        tf.equal(state.step, 0), lambda: made_of(averaged(state, public), state.scale),
        lambda: state.scale)
    return (contract.Query(geometry.unpacked(scale, state.first)),)

  def update(
      state: State, release: contract.Release, public: trees.Tree) -> Tuple[trees.Tree, State]:
    contract.check_public(public, 'dp_kfc')
    step = state.step + 1

    def refreshed() -> Any:
      averages = averaged(state, public)
      return averages, made_of(averages, state.scale)

    averages, scale = tf.cond(due(state), refreshed, lambda: (state.moments, state.scale))
    mean = release.mean
    if frame == 'raw':
      used = trees.map(lambda new, old: tf.where(tf.equal(step, 1), new, old), scale, state.scale)
      mean = geometry.unscale(mean, geometry.unpacked(used, state.first))
    direction, moment = first.update(state.first, mean, step)
    return direction, State(step, moment, averages, scale)

  return contract.Rule(
      init, query, contract.of_release(update), public='factors', public_due=due, name='dp_kfc',
      own_clip=True)


def sides(shape: Any) -> Sequence[Sequence[int]]:
  """Returns shapes of a variable's factors: its own, or those of two sides."""
  view = kronecker.matrices(shape, MAX_SIDE)
  if view is None:
    return [[int(size) for size in shape]]
  return [[size, size] if size <= MAX_SIDE else [size] for size in view[1:]]


def _average(before: tf.Tensor, now: tf.Tensor, decay: float) -> tf.Tensor:
  """Keeps the old value where the new one is not finite; later averages would be lost."""
  return tf.where(
      tf.reduce_all(tf.math.is_finite(now)), decay * before + (1 - decay) * now, before)


def _scale(moment: tf.Tensor, before: tf.Tensor, power: float, epsilon: float) -> tf.Tensor:
  """Returns `(moment / its mean + epsilon)^-power`; as it was where that is not finite."""
  finite = tf.reduce_all(tf.math.is_finite(moment))
  wide = tf.cast(tf.where(finite, moment, tf.zeros_like(moment)), tf.float64)
  if wide.shape.rank == 2:
    values, vectors = tf.linalg.eigh((wide + tf.transpose(wide)) / 2)
    scale = tf.matmul(
        vectors / kronecker.relative_root(values, epsilon, power), vectors, transpose_b=True)
  else:
    scale = 1 / kronecker.relative_root(wide, epsilon, power)
  return tf.where(finite, tf.cast(scale, before.dtype), before)
