# SPDX-License-Identifier: Apache-2.0
"""The types that the packages of this library exchange in a private step.

Read this page first. A step of any private optimizer is one straight line:

    rule.query       state            -> Query      PUBLIC: the geometry to clip in
    engine           records, Query   -> Sums       SECRET: clipped sums (`clipping`)
    Privatizer       Sums             -> Release    PUBLIC: divided by B, noised
    rule.update      Release          -> direction  PUBLIC: post-processing
    adapter          direction        -> weights    PUBLIC: Keras, DPQuery, TFF

Who computes each value, and who may see it:

*   A `Rule` computes queries and updates. It is pure: it sees releases only, never a
    record, a key, a batch size, a clip norm or a learning rate. So its privacy is
    that of the releases, whatever it computes (post-processing).
*   An engine of `clipping` is the only code that sees records. Whatever the
    geometry, one record moves its `Sums` by at most one clip norm, in scaled units.
*   `privatizer.Privatizer` is the only home of the noise multiplier, the divisor B,
    the adjacency, the row index of the noise, and secret state. Nothing else adds
    noise for a rule.
*   A `privacy.PrivacyPlan` computes the privacy cost in advance.

These values are SECRET: `Sums`, the privatizer's state (future noise, clean accumulators),
and losses and outputs of records. They never enter a shared checkpoint, a statement, or a
log without a `private/` name. Queries, releases, rule states and weights are PUBLIC. The
guarantee covers all of them together.

Trees are anything `tf.nest` maps over, see `trees`. Every tensor of a rule has the
dtype of the specs it was built from.
"""

import dataclasses
from typing import Any, Callable, NamedTuple, Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import terms
from tfdp_adaptive import weights
from tfdp_adaptive.trees import Scalar
from tfdp_adaptive.trees import Tree

Stddevs = Tuple['Scalar', 'Scalar']  # Standard deviations on the mean and on the value.


class Statistic(NamedTuple):
  """A release in addition to the mean of clipped records. Static.

  Attributes:
    per_record_square: Whether the engine must also return the sum over records
      of the squared clipped record.
    measure: `(mean, square, clip_norm, secret) -> (value, secret)`; `mean` and
      `square` are clean sums over the batch divided by the batch size.
    stddevs: (clip_norm, batch_size, adjacency) -> (std_mean, std_value), the noise on mean and
      value at noise multiplier one. With this noise, both releases together cost as much as the
      mean alone.
    specs: `specs -> specs` of the value.
    init: specs -> secret, the CLEAN state that the statistic keeps between steps; () for most. It
      is as private as the records.
    amplifiable: Whether the value depends on the current batch only. Otherwise amplification by
      sampling must not be claimed.
    private: False for the noiseless diagnostic, which has no guarantee.
    participations: If positive, `stddevs` is valid for records that take part in at most this
      number of steps, at any distance. The plan must ensure this.
    relative_noise: For a value that is not amplifiable: its noise multiplier divided by that of the
      mean. Such a value is accounted for separately.
  """

  per_record_square: bool
  measure: Callable[[Tree, Tree, Scalar, Tree], Tuple[Tree, Tree]]
  stddevs: Callable[[Scalar, float, str], Stddevs]
  specs: Callable[[Tree], Tree] = lambda specs: specs
  init: Callable[[Tree], Tree] = lambda specs: ()
  amplifiable: bool = True
  private: bool = True
  participations: int = 0
  relative_noise: float = 1.0


class SideQuery(NamedTuple):
  """Values f(n) of every record's norm n, released together with the mean. Static.

  A record r and its values f are one joint release: the noise on the mean is larger by `factor`,
  the noise on the sum of f is `std`, and for every record

      (||r|| / (factor * zeta))^2 + (sigma ||f|| / std)^2 <= 1.

  Attributes:
    size: The number of values.
    of_norm: `(norm, clip_norm) -> f`, of any shape [...] to [..., size]; padding and records
      that are not finite add nothing.
    noise: `(noise_multiplier, batch_size) -> (factor, std)`, for neighbours one record
      apart; both are zero noise at multiplier zero.
    shrinks: Whether weights of records must be at most one.
    even: Whether ||f|| is the same for every record.
    of_groups: Whether `of_norm` is given the norms and clip norms of groups, [..., K] and [K],
      instead of those of the whole record.
  """

  size: int
  of_norm: Callable[..., Any]
  noise: Callable[[float, float], Tuple[float, float]]
  shrinks: bool = False
  even: bool = False
  of_groups: bool = False


class Ask(NamedTuple):
  """A clipped sum that a rule needs in every step. Static."""

  projection: str = 'rescale'  # | 'euclidean': exact projection, see clipping.
  second: Optional[Statistic] = None
  weight: weights.Weight = weights.Hard()  # Used by the projection 'rescale'.
  side_query: Optional[SideQuery] = None
  groups: Tuple[int, ...] = ()  # Group of each leaf, from 0; each is clipped by itself; () is one.

  @property
  def squares(self) -> bool:
    """Returns whether the engine must also sum the squares of clipped records."""
    return self.second is not None and self.second.per_record_square


@dataclasses.dataclass(frozen=True)
class Kronecker:
  """The scale of one variable by a matrix on either side: W is measured as `left W right'`.

  A variable is treated as a stack of matrices [d, p] with the same two scales. p is the product of
  its last axes, and d the product of the axes before them. It is a leaf of trees.

  Attributes:
    left: [d, d], invertible, or [d] > 0 for a diagonal matrix. Ones mean no scale.
    right: [p, p] or [p].
  """

  left: tf.Tensor
  right: tf.Tensor


class Groups(NamedTuple):
  """The geometry of an ask with groups: group k is clipped as `scale_k * g_k`."""

  scale: tf.Tensor  # [K] > 0.
  clip: tf.Tensor  # [K] clip norms over that of the ask; their squares add up to one at most.


class Query(NamedTuple):
  """The scaling of one query at one step, a public function of past releases."""

  scale: Tree = ()  # s_t > 0, or `Kronecker`s: records are clipped and noised as s_t * g.
  relative_clip: Scalar = 1.0  # [] times `l2_norm_clip`, in scaled units.
  share: Scalar = 1.0  # [] of the step's privacy budget; 0 = not asked now.
  groups: Tree = ()  # `Groups`, or () without groups.


Queries = Tuple[Query, ...]  # One per ask, as are sums and releases.


class Sums(NamedTuple):
  """Sums over records. They can be added over chunks and replicas. SECRET."""

  total: Tree
  square: Tree = ()
  side_sum: Tree = ()  # [size] of the values of the side query.


class Release(NamedTuple):
  """The noisy answer to one query, in scaled space.

  `variance` is the variance of the noise in every coordinate of `mean`. It accounts for
  adjacency, budget share and the row norm of the mechanism. A rule that divides `mean` by `scale`
  divides `variance` by `scale**2`. With a `Kronecker` scale, the noise N has E[N N'] = variance
  tr((right' right)^-1) (left' left)^-1.
  """

  mean: Tree
  variance: tf.Tensor  # []
  second: Tree = ()
  second_variance: Scalar = ()  # []
  side_mean: Tree = ()  # [size] noised sum over records, divided by B.
  side_variance: Scalar = ()  # []


Releases = Tuple[Release, ...]


def isotropic(state: Tree, public: Tree = ()) -> Queries:
  """Returns the query of a rule that clips raw gradients in the plain L2 norm."""
  del state, public
  return (Query(),)


def in_state(asked: Callable[[Any], Queries]) -> Callable[..., Queries]:
  """Returns the `query` of a rule whose state alone determines its queries."""
  return lambda state, public=(): asked(state)


def in_scale(scale: Callable[[Any], Tree]) -> Callable[..., Queries]:
  """Returns the `query` of a rule that clips records in a scale that its state determines."""
  return in_state(lambda state: (Query(scale(state)),))


def of_release(update: Callable[[Any, Release, Tree], Tuple[Tree, Any]]) -> Callable[..., Any]:
  """Returns the `update` of a rule with one ask, from `(state, release, public)`."""

  def of_releases(state: Tree, releases: Releases, public: Tree = ()) -> Tuple[Tree, Tree]:
    (release,) = releases
    return update(state, release, public)

  return of_releases


def of_mean(update: Callable[[Any, Release], Tuple[Tree, Any]]) -> Callable[..., Any]:
  """Returns the `update` of a rule with one ask that needs no public gradients."""
  return of_release(lambda state, release, public: update(state, release))


def no_cautions(clip_norm: float, noise_std: float, size: int) -> Tuple[str, ...]:
  del clip_norm, noise_std, size
  return ()


class Rule(NamedTuple):
  """A private optimizer's update, as pure TensorFlow functions.

  Attributes:
    init: specs -> state, a NamedTuple of trees of tensors.
    query: `(state, public) -> (Query, ...)`, one per ask.
    update: `(state, releases, public) -> (direction, state)`; parameters move
      by `-learning_rate * direction`.
    asks: The clipped sums to compute at every step.
    public: What `query` and `update` need of the public gradients at the current parameters:
      'mean', 'records', 'factors', or None for nothing; see `clipping.engines`.
    public_due: For a rule that needs factors, `state -> []` bool: whether this step needs them.
      In other steps, the factors may be zeros. None if all steps need them. The function reads the
      state of this rule, so a wrapper with another state must not use it unchanged.
    project: `(state, params) -> params`, applied after the learning-rate step.
    name: The factory's name, for statements and errors.
    independent_noise: Whether the noise of different steps must be independent. Adapters then
      raise for correlated mechanisms.
    cautions: `(clip_norm, noise_std, size) -> (message, ...)`: warnings for this base clip norm,
      noise standard deviation per coordinate of the released mean and number of parameters.
    elementwise: Whether `update` treats every coordinate by itself. An adapter may then compile
      it into one pass over the memory.
    own_clip: Whether the rule itself changes its clip norm or scales matrices (`Kronecker`). No
      wrapper may then adapt or split the clip norm.
  """

  init: Callable[[Tree], Tree]
  query: Callable[..., Queries]
  update: Callable[..., Tuple[Tree, Tree]]
  asks: Tuple[Ask, ...] = (Ask(),)
  public: Optional[str] = None
  public_due: Optional[Callable[[Tree], tf.Tensor]] = None
  project: Optional[Callable[[Tree, Tree], Tree]] = None
  name: str = 'rule'
  independent_noise: bool = False
  cautions: Callable[[float, float, int], Tuple[str, ...]] = no_cautions
  elementwise: bool = False
  own_clip: bool = False


def check_side_query(ask: Ask) -> None:
  """Raises if a side query needs slack that the rule does not leave."""
  if ask.side_query is not None and ask.side_query.shrinks and (
      ask.weight.may_grow or ask.second is not None):
    raise ValueError(
        'Slack is what a clipped record leaves of its clip norm. Rules that scale records up '
        '(AutoV, AutoS, PSAC) or release a second statistic leave none. Use Hard, Tanh or PNorm, '
        f'or follow a quantile. Received: clipping={ask.weight!r}, '
        f'second={ask.second is not None}.')


def mean_sensitivity(clip_norm: Scalar, batch_size: float, adjacency: str) -> Scalar:
  """Returns the L2 sensitivity of the mean (sum over B) of records of norm at most `clip_norm`."""
  return terms.record_distance(adjacency) * clip_norm / batch_size


def check_rule(rule: object) -> None:
  """Raises ValueError unless `rule` is a `Rule`."""
  if not isinstance(rule, Rule):
    raise ValueError('`rule` must be a `tfdp.rules` rule. '
                     f'Received: rule={rule!r} of type {type(rule).__name__}.')


def check_public(public: Tree, name: str) -> None:
  """Raises unless a rule that needs public gradients was given some."""
  if isinstance(public, tuple) and not public:
    raise ValueError(f'`public` must hold public gradients for {name}. Received: nothing. '
                     'Give the optimizer public data, or choose a rule without.')
