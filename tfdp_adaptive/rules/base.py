"""The contract between a rule and whatever runs it.

A rule sees releases only: `query -> [engine, privatizer] -> release -> update`.
Nothing in it touches a record, a key, a batch size, a clip norm or a learning
rate, so its privacy is that of the releases (post-processing).

Trees are anything `tf.nest` maps over; `()` stands for "absent" (TFF rejects
`None`). Every tensor of a rule has the dtype of the specs it was built from.
"""

import math
from typing import Any, Callable, NamedTuple, Optional, Tuple

import tensorflow as tf

Tree = Any  # A nest of tensors.

ADJACENCIES = ('add_remove', 'zero_out', 'replace')


class Statistic(NamedTuple):
  """What one ask releases besides the mean of the clipped records. Static.

  Attributes:
    per_record_square: Whether the engine must also return the sum over records
      of the squared clipped record.
    specs: `specs -> specs` of the value.
    init: `specs -> secret`, the CLEAN state the statistic carries over steps;
      `()` for most. It is as private as the records.
    measure: `(mean, square, clip_norm, secret) -> (value, secret)`; `mean` and
      `square` are clean sums over the batch divided by the batch size.
    stddevs: `(clip_norm, batch_size, adjacency) -> (std_mean, std_value)`, the
      noise on mean and value for a noise multiplier of one, so that both
      together cost what the mean alone costs.
    amplifiable: Whether the value depends on the present batch only, so that
      amplification by sampling may be claimed (algorithms of past clean data
      may not).
    private: False for the noiseless diagnostic, which has no guarantee.
    participations: If positive, `stddevs` holds for records that take part in
      at most so many steps, whatever their distance: the plan must see to it.
    relative_noise: Of a value that is not amplifiable, and is accounted for by
      itself: its noise multiplier divided by that of the mean.
  """

  per_record_square: bool
  specs: Callable[[Tree], Tree]
  init: Callable[[Tree], Tree]
  measure: Callable[..., Tuple[Tree, Tree]]
  stddevs: Callable[[Any, float, str], Tuple[Any, Any]]
  amplifiable: bool = True
  private: bool = True
  participations: int = 0
  relative_noise: float = 1.0


class Ask(NamedTuple):
  """One clipped sum that a rule asks for at every step. Static."""

  projection: str = 'rescale'  # | 'euclidean': exact projection, see clipping.
  second: Optional[Statistic] = None


class Query(NamedTuple):
  """The geometry of one ask at one step; a public function of past releases."""

  scale: Tree = ()  # s_t > 0: records are clipped and noised as s_t * g.
  relative_clip: Any = 1.0  # [] times `l2_norm_clip`, in scaled units.
  share: Any = 1.0  # [] of the step's privacy budget; 0 = not asked now.


class Release(NamedTuple):
  """The noised answer to one ask, in scaled space.

  `variance` is the square of the noise standard deviation actually injected
  into every coordinate of `mean`: adjacency, budget share and the row norm of
  the mechanism included. A rule that unscales divides it by `scale**2`.
  """

  mean: Tree
  variance: tf.Tensor  # []
  second: Tree = ()
  second_variance: Any = ()  # []


class Rule(NamedTuple):
  """A private optimizer's update, as pure TensorFlow functions.

  Attributes:
    init: `specs -> state`, a NamedTuple of trees of tensors.
    query: `(state, public) -> (Query, ...)`, one per ask.
    update: `(state, releases, public) -> (direction, state)`; parameters move
      by `-learning_rate * direction`.
    asks: What is asked at every step.
    public: None, 'mean' or 'records': the public gradients at the current
      parameters that `query` and `update` need.
    project: `(state, params) -> params`, applied after the learning-rate step.
    name: The factory's name, for statements and errors.
    independent_noise: Whether it needs the noise of different steps to be
      independent: an adapter refuses any correlated mechanism.
    cautions: `(clip_norm, noise_std, size) -> (message, ...)`: what is likely to go
      wrong for this base clip norm, noise standard deviation per coordinate of the
      released mean and number of parameters. For people.
    elementwise: Whether `update` treats every coordinate by itself: an adapter may
      then compile it into one pass over the memory.
  """

  init: Callable[[Tree], Tree]
  query: Callable[..., Tuple[Query, ...]]
  update: Callable[..., Tuple[Tree, Tree]]
  asks: Tuple[Ask, ...] = (Ask(),)
  public: Optional[str] = None
  project: Optional[Callable[[Tree, Tree], Tree]] = None
  name: str = 'rule'
  independent_noise: bool = False
  cautions: Callable[[float, float, int], Tuple[str, ...]] = lambda clip, std, size: ()
  elementwise: bool = False


class Sums(NamedTuple):
  """Sums over records; additive over records, chunks and replicas. SECRET."""

  total: Tree
  square: Tree = ()


def isotropic(state, public=()):
  """The `query` of a rule that clips raw gradients in the plain L2 norm."""
  del state, public
  return (Query(),)


def map_tree(function, *trees):
  return tf.nest.map_structure(function, *trees)


def zeros(specs):
  return map_tree(lambda s: tf.zeros(s.shape, s.dtype), specs)


def dtype_of(specs):
  """The dtype of the scalars that go with a tree: that of its first leaf."""
  leaves = tf.nest.flatten(specs)
  return leaves[0].dtype if leaves else tf.float32


def constant_like(value, specs, name):
  """`value`, a number or a nest of arrays like `specs`, as a tree of tensors."""
  leaves = tf.nest.flatten(specs)
  values = tf.nest.flatten(value)
  if len(values) == 1 and not getattr(values[0], 'shape', ()):
    return map_tree(lambda s: tf.fill(s.shape, tf.constant(values[0], s.dtype)), specs)
  if [tuple(getattr(v, 'shape', ())) for v in values] != [tuple(s.shape) for s in leaves]:
    raise ValueError(
        f'`{name}` must be a number or one array per variable, of shapes '
        f'{[tuple(s.shape) for s in leaves]}. '
        f"Received: shapes {[tuple(getattr(v, 'shape', ())) for v in values]}.")
  return tf.nest.pack_sequence_as(
      specs, [tf.cast(tf.convert_to_tensor(v), s.dtype) for v, s in zip(values, leaves)])


def widen(tensor):
  """A dense tensor of float32 at least: gradients of half precision are not summed as such."""
  tensor = tf.convert_to_tensor(tensor)
  return tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)


def unscale(tree, scale):
  """Takes a release out of the scaled space: `tree / scale`."""
  return tree if isinstance(scale, tuple) and not scale else map_tree(tf.divide, tree, scale)


def first_step():
  return tf.zeros([], tf.int64)


def decayed(beta, moment, value):
  """Exponential moving average, `beta * moment + (1 - beta) * value`."""
  return map_tree(lambda m, x: beta * m + (1 - beta) * x, moment, value)


def normalizer(beta, step, dtype):
  """`1 - beta**step`, what an average started at zero is divided by.

  Computed as `-expm1(step * log(beta))`: float32 powers lose half their digits
  near one.
  """
  if beta == 0:
    return tf.ones([], dtype)
  return -tf.math.expm1(tf.cast(step, dtype) * tf.constant(math.log(beta), dtype))


def safe_divide(numerator, denominator):
  """`numerator / denominator` with 0/0 := 0."""
  return tf.math.divide_no_nan(numerator, denominator)


def check_decay(**decays):
  for name, value in decays.items():
    if not 0 <= value < 1:
      raise ValueError(f'`{name}` must be in [0, 1). Received: {name}={value}.')


def check_positive(**values):
  for name, value in values.items():
    if not (value > 0 and math.isfinite(value)):
      raise ValueError(f'`{name}` must be positive and finite. Received: {name}={value}.')


def check_not_negative(**values):
  for name, value in values.items():
    if not (value >= 0 and math.isfinite(value)):
      raise ValueError(f'`{name}` must be finite and >= 0. Received: {name}={value}.')


def check_one_of(choices, **values):
  for name, value in values.items():
    if value not in choices:
      raise ValueError(f'`{name}` must be one of {choices}. Received: {name}={value!r}.')


def check_steps(**counts):
  for name, value in counts.items():
    if value != int(value) or value < 1:
      raise ValueError(f'`{name}` must be a positive integer. Received: {name}={value}.')


def check_public(public, name):
  if isinstance(public, tuple) and not public:
    raise ValueError(f'`public` must hold public gradients for {name}. Received: nothing. '
                     'Give the optimizer public data, or choose a rule without.')


def check_adjacency(adjacency):
  check_one_of(ADJACENCIES, adjacency=adjacency)


def mean_sensitivity(clip_norm, batch_size, adjacency):
  """L2 sensitivity of the mean of records of norm at most `clip_norm`."""
  check_adjacency(adjacency)
  return (2.0 if adjacency == 'replace' else 1.0) * clip_norm / batch_size
