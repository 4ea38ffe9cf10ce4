# SPDX-License-Identifier: Apache-2.0
"""Second moments of features and targets, in one Gaussian release.

A record has features x, of norm at most R, and targets y, of norm at most Y. Its statistics are one
vector, (a vec(x x') / R^2, b vec(x y') / (R Y)) with a^2 + b^2 = 1, of norm at most one. `vec` of a
symmetric matrix holds its diagonal, and sqrt(2) times the entries above it, so that its norm is
that of the matrix.

If a record x, y replaces a record u, v, the vector moves by the root of

    2 a^2 (1 - t^2) + 2 b^2 (1 - t s),    t = x'u / R^2,  s = y'v / Y^2,

or less for shorter records. It is largest at s = -1 and t = b^2 / (2 a^2), or t = 1 if that is
less.
"""

import dataclasses
import math
from typing import Any, Iterator, Optional, Tuple, Union

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import privacy
from tfdp_adaptive.batches import sources
from tfdp_adaptive.estimates import release
from tfdp_adaptive.mechanisms import progress
from tfdp_adaptive.privacy import ledger as ledger_lib

_ROWS = 4096  # Records that are read at once.


@dataclasses.dataclass(frozen=True)
class SecondMoments:
  """Noisy sums over records, and their cost.

  Attributes:
    covariance: [d, d], the noisy sum of x x'. With a `constant`, it is the last feature.
    cross: [d, k], the noisy sum of x y'; None without targets.
    stddev: Standard deviation of the noise above the diagonal of `covariance`. It is sqrt(2) times
      as large on the diagonal.
    cross_stddev: Standard deviation of the noise of `cross`; 0 without targets.
    bound: The largest norm of a record's features, before the constant.
    constant: The feature that every record has; 0 for none.
    plan: The plan of the release.
    ledger: The cost of the release, and of the features where they have one.
  """

  covariance: np.ndarray
  cross: Optional[np.ndarray]
  stddev: float
  cross_stddev: float
  bound: float
  constant: float
  plan: privacy.PrivacyPlan
  ledger: ledger_lib.Ledger

  def public_data(self, classes: int = 2) -> 'PublicInputs':
    """Returns inputs whose second moments are those released, for `tfdp.DPKFC(public_data=...)`.

    They are the rows of the square root of `covariance`, without the constant, and labels in turn.
    They are made of a release alone, so that they cost nothing more. The ledger of a model whose
    optimizer reads them has the cost of the release.

    Args:
      classes: The number of classes of the labels.
    """
    checks.whole(classes=classes)
    size = len(self.covariance) - bool(self.constant)
    values, vectors = eigenvalues(self.covariance[:size, :size])
    rows = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    rows *= math.sqrt(size / max(self.plan.batch_size, 1))
    return PublicInputs(
        rows.astype(np.float32), (np.arange(size) % classes).astype(np.int32), self.ledger)

  def whitening(self, power: float = 0.3, floor: float = 0.01) -> compat.Model:
    """Returns a frozen model of features with less in common, of norm one, for `tfdp.features`.

    It takes off their mean and multiplies by V diag(w / sum(w) + floor)^-power V', where w and V
    are eigenvalues and eigenvectors of their covariance. A private head then finds more in
    directions in which features differ little. Eigenvalues that noise alone may have count as zero,
    and what noise adds to larger ones is taken off. Its ledger has the cost of the release.

    Args:
      power: How much directions are evened out, in [0, 0.5]; 0.5 is whitening, without the floor.
      floor: The share of the variance below which directions are noise, > 0.

    Raises:
      ValueError: Without a `constant`, from which the mean is known, or where noise hides all else.

    Examples:
      >>> x = np.random.default_rng(0).uniform(size=[10_000, 3]) * [0.5, 0.1, 0.1]
      >>> found = second_moments(x, noise_multiplier=1.0, constant=0.5)
      >>> z = np.asarray(found.whitening()(x))
      >>> bool(np.abs(z.mean(0)).max() < 0.1)
      True
    """
    checks.positive(floor=floor)
    checks.require(checks.is_number(power) and 0 <= power <= 0.5, 'be in [0, 0.5]', power=power)
    if not self.constant:
      raise ValueError('Whitening needs the mean of the features. Received: moments without a '
                       'constant. Give `second_moments(..., constant=0.5)`.')
    count = self.covariance[-1, -1] / self.constant**2
    mean = self.covariance[:-1, -1] / (count * self.constant)
    values, vectors = eigenvalues(self.covariance[:-1, :-1] / count - np.outer(mean, mean))
    if not (count > 0 and values.sum() > 0):
      raise ValueError('The release must have a positive number of records and variance. Received: '
                       f'{count:.3g} and {values.sum():.3g}. Release with less noise.')
    edge = 2 * self.stddev * math.sqrt(len(mean)) / count  # Where eigenvalues of noise end.
    known = values + np.sqrt(np.maximum(values**2 - edge**2, 0))  # w + (edge / 2)^2 / w is seen.
    known = np.where(values > 1.1 * edge, known / 2, 0.0) / values.sum()
    matrix = (vectors * (known + floor)**-power) @ vectors.T
    layers = compat.keras.layers
    affine = layers.Dense(len(mean), trainable=False)
    model = compat.keras.Sequential(
        [layers.Input([len(mean)]), affine, layers.UnitNormalization()])
    affine.set_weights([matrix, -mean @ matrix])
    release.charge(affine, *self.ledger.entries)
    return model


@dataclasses.dataclass(frozen=True)
class PublicInputs:
  """Public arrays with the ledger of what they were made of; calling it returns `(x, y)`."""

  x: np.ndarray
  y: np.ndarray
  ledger: ledger_lib.Ledger

  @property
  def entries(self) -> Tuple[ledger_lib.Entry, ...]:
    return self.ledger.entries

  def __call__(self) -> Tuple[np.ndarray, np.ndarray]:
    return self.x, self.y


def second_moments(
    features: Any, targets: Optional[npt.ArrayLike] = None, *,
    noise_multiplier: Optional[float] = None, target_epsilon: Optional[float] = None,
    target_delta: float = 1e-6, bound: float = 1.0, constant: float = 0.0,
    target_bound: float = 1.0, classes: Optional[int] = None,
    share: float = 0.65, adjacency: str = 'zero_out',
    unit: str = 'example', population_size: Optional[int] = None,
    seed: Optional[int] = None) -> SecondMoments:
  """Releases the sums of x x' and x y' over all records, once. One epsilon covers both sums.

  Features longer than `bound` are shortened to it, and targets to `target_bound`. A record with a
  number that is not finite counts as an empty record.

  Args:
    features: [n, d] numbers; [n, views, d], several views of each record, whose products are
      averaged; or `tfdp.features(...)`, which may hold the targets, too.
    targets: [n] integers, which are classes; [n] or [n, k] numbers; or None.
    noise_multiplier: Standard deviation of the noise in units of a record's sensitivity, > 0.
    target_epsilon: The epsilon from which the noise is computed, instead of `noise_multiplier`.
    target_delta: The delta of `target_epsilon`.
    bound: Largest norm of the features, > 0. Public: do not compute it from the data.
    constant: A feature to add to every record, for the bias of a layer; 0 for none.
    target_bound: Largest norm of targets, > 0. It is one if targets are classes.
    classes: The number of classes. By default it is one more than the largest class, which is then
      taken as public.
    share: Fraction a^2 of the privacy budget for x x', in (0, 1). The rest is for x y'.
    adjacency: 'zero_out', 'add_remove' or 'replace'.
    unit: 'example' or 'user': what one record is.
    population_size: Under 'add_remove', a public number close to the number of records.
    seed: For tests only.

  Returns:
    `SecondMoments`.

  Raises:
    ValueError: For missing arguments, wrong shapes, or classes out of range.

  Examples:
    >>> x = np.random.default_rng(0).normal(size=[10_000, 3]) * [1.0, 0.1, 0.1]
    >>> found = second_moments(x, noise_multiplier=5.0, bound=3.0)
    >>> bool(found.covariance[0, 0] > 5 * found.covariance[1, 1])
    True
    >>> 0.5 < found.ledger.epsilon() < 1.0
    True
  """
  checks.positive(bound=bound, target_bound=target_bound)
  checks.not_negative(constant=constant)
  checks.probability(share=share)
  source = sources.of(features)
  parts = source.specs if isinstance(source.specs, tuple) else (source.specs,)
  if len(parts) > 2 or not all(isinstance(part, tf.TensorSpec) for part in parts) or not (
      parts[0].shape.rank in (1, 2) and (parts[0].dtype.is_floating or parts[0].dtype.is_integer)):
    raise ValueError('`features` must be [n, d] or [n, views, d] numbers in one array, or a pair '
                     f'`(features, targets)` without sample weights. Received: {parts}.')
  if len(parts) == 2 and targets is None:
    targets = source.take(np.arange(len(source)))[1]
  if targets is not None:
    targets, one_hot = _targets(targets, classes, len(source))
    target_bound = 1.0 if one_hot else float(target_bound)
  norm = math.hypot(bound, constant)
  a, b = (1.0, 0.0) if targets is None else (math.sqrt(share), math.sqrt(1 - share))
  plan = release.plan(
      len(source), sensitivity=_sensitivity(adjacency, a, b), noise_multiplier=noise_multiplier,
      target_epsilon=target_epsilon, target_delta=target_delta, population_size=population_size,
      adjacency=adjacency, unit=unit, seed=seed)
  records = _records(source, targets, bound, constant, target_bound)
  square, cross = _sums(records, len(source))
  std = plan.noise_stddev
  rng = np.random.default_rng(seed)
  square, cross = _noised(square, cross, std * norm**2 / a, std * norm * target_bound / (b or 1),
                          rng)
  note = ('Second moments of features, clipped to norm '
          f'{bound:g}, were released once, before training; their cost is one of the runs.')
  entries = (*source.entries,
             release.entry(plan, 'estimates.second_moments', note, *source.notes()))
  return SecondMoments(
      square, None if targets is None else cross, std * norm**2 / (a * math.sqrt(2)),
      std * norm * target_bound / b if b else 0.0, float(bound), float(constant), plan,
      ledger_lib.Ledger(entries))


def eigenvalues(matrix: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
  """Returns eigenvalues and eigenvectors of a symmetric matrix, which must be finite."""
  if not np.isfinite(matrix).all():
    raise ValueError('The matrices of a release must be finite. Received: one that is not.')
  return np.linalg.eigh(matrix)


def _sensitivity(adjacency: str, a: float, b: float) -> float:
  """Returns by how much the vector of a data set may move; see the module."""
  checks.one_of(('zero_out', 'add_remove', 'replace'), adjacency=adjacency)
  if adjacency != 'replace':
    return 1.0
  t = min(1.0, b**2 / (2 * a**2))
  return math.sqrt(2 * a**2 * (1 - t**2) + 2 * b**2 * (1 + t))


def _targets(
    targets: npt.ArrayLike, classes: Optional[int], count: int) -> Tuple[np.ndarray, bool]:
  """Returns the targets [n, k], and whether they are one-hot."""
  values = checks.rectangular(targets, '`targets` must be classes or numbers.')
  if len(values) != count:
    raise ValueError('`targets` must have one row for each record of `features`. Received: '
                     'another number of rows.')
  if values.ndim == 2 and values.shape[1] == 1:
    values = values[:, 0]
  if values.dtype.kind in 'biu' and values.ndim == 1:
    values = values.astype(np.int64)
    most = int(values.max(initial=0)) + 1 if classes is None else classes
    checks.whole(classes=most)
    if values.min(initial=0) < 0 or values.max(initial=0) >= most:
      raise ValueError('`targets` must be classes in [0, classes). Received: integers out of '
                       f'range, with classes={classes}.')
    return np.eye(most)[values], True
  values = values[:, np.newaxis] if values.ndim == 1 else values
  if values.ndim != 2 or values.dtype.kind not in 'biuf' or classes is not None:
    raise ValueError('`targets` must be [n] classes, which are integers, or [n] or [n, k] numbers, '
                     'without `classes`. Received: shape '
                     f'[n, {", ".join(map(str, values.shape[1:]))}] of '
                     f'{values.dtype.type.__name__}, with classes={classes}.')
  return values.astype(np.float64), False


def _records(
    source: sources.Source, targets: Optional[np.ndarray], bound: float, constant: float,
    target_bound: float) -> Iterator[Tuple[np.ndarray, Any]]:
  """Yields clipped features [m, views, d] and targets [m, k], some records at a time."""
  for first in range(0, len(source), _ROWS):
    places = np.arange(first, min(first + _ROWS, len(source)))
    x = np.asarray(sources.leaves(source.take(places))[0], np.float64)
    x = x[:, np.newaxis] if x.ndim == 2 else x
    y = None if targets is None else targets[places]
    good = np.isfinite(x).all((1, 2)) & (True if y is None else np.isfinite(y).all(1))
    x = _clipped(np.where(good[:, np.newaxis, np.newaxis], x, 0.0), bound)
    if constant:
      x = np.concatenate([x, np.full((*x.shape[:2], 1), constant)], 2)
      x[~good] = 0.0
    yield x, None if y is None else _clipped(np.where(good[:, np.newaxis], y, 0.0), target_bound)


def _clipped(rows: np.ndarray, bound: float) -> np.ndarray:
  """Returns rows of norm at most `bound`; their largest number is divided out beforehand."""
  peak = np.maximum(np.abs(rows).max(-1, keepdims=True, initial=0.0), 1e-300)
  norm = np.linalg.norm(rows / peak, axis=-1, keepdims=True)
  return rows * np.minimum(1.0, (bound / peak) / np.maximum(norm, 1.0))


def _sums(records: Iterator[Tuple[np.ndarray, Any]], count: int) -> Tuple[Any, Any]:
  """Returns the sums of x x', averaged over views, and of x y'."""
  square: Any = 0.0
  cross: Any = 0.0
  with progress.fraction('second moments', total=count) as bar:
    for x, y in records:
      rows = x.reshape(-1, x.shape[2])
      square = square + rows.T @ rows / x.shape[1]
      if y is not None:
        cross = cross + x.mean(1).T @ y
      bar.update(len(x))
  return square, cross


def _noised(
    square: np.ndarray, cross: Union[float, np.ndarray], std: float, cross_std: float,
    rng: np.random.Generator) -> Tuple[np.ndarray, np.ndarray]:
  """Adds noise of `std` to the diagonal of a symmetric matrix, and 1/sqrt(2) of it elsewhere."""
  above = np.triu(rng.standard_normal(np.shape(square)), 1) / math.sqrt(2)
  noise = above + above.T + np.diag(rng.standard_normal(len(square)))
  return square + std * noise, cross + cross_std * rng.standard_normal(np.shape(cross))
