# SPDX-License-Identifier: Apache-2.0
"""Private forms of `layer.adapt(data)`, whose cost is in the ledger of the model.

A layer that Keras adapts holds exact statistics of the data. If you know the mean of n numbers and
all but one of them, you know the last one, too. The functions here use one Gaussian mechanism on
bounded records instead.
"""

from typing import Any, Optional, Tuple
import warnings

import numpy as np
import numpy.typing as npt

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import privacy
from tfdp_adaptive.estimates import release
from tfdp_adaptive.estimates import vocabulary
from tfdp_adaptive.independence import disclosures

_LEAST_VARIANCE = 1e-3  # Variances below this fraction of the squared bound are noise.


def adapt(
    layer: Any, data: Any, *, noise_multiplier: Optional[float] = None,
    bound: Optional[npt.ArrayLike] = None,
    size: Optional[int] = None, words_per_record: int = 100, target_delta: float = 1e-6,
    delta: float = 1e-9, adjacency: str = 'zero_out', unit: str = 'example',
    population_size: Optional[int] = None, public: Optional[str] = None,
    seed: Optional[int] = None) -> privacy.Ledger:
  """Adapts a preprocessing layer privately and records the cost in the ledger of its weights.

  `Normalization`: the values of each record are clipped to `[-bound, bound]` per feature. In units
  of the bound, the values of a record and their squares form a vector of norm at most sqrt(2 d)
  for d features. Gaussian noise of standard deviation `noise_multiplier * sqrt(2 d)` is added once
  to the sum of these vectors, which is then divided by the public number of records.

  `StringLookup`, `TextVectorization`: a vocabulary by differentially private set union (Gopi et
  al., arXiv:2002.09745), of sensitivity 1; see `tfdp.estimates.private_vocabulary`.

  Args:
    layer: A `Normalization` with one axis, the last; `StringLookup`; or `TextVectorization`.
    data: [n, d] numbers, or n texts (of one word each for `StringLookup`, or [n, k] words). A
      record must be the same unit that the training protects.
    noise_multiplier: Standard deviation of the noise, in units of a record's sensitivity, > 0.
    bound: Largest size of a value, > 0: a number or [d]. Public: do not compute it from `data`.
    size: The largest number of words in the vocabulary.
    words_per_record: The number of different words that a record may vote for.
    target_delta: The delta at which the ledger states epsilon if it has no other entry.
    delta: Probability that a word of a single record is released. It is a part of the ledger's
      delta, which must be larger.
    adjacency: 'zero_out' or 'add_remove'. It must be the same as in the plan of the training.
    unit: 'example' or 'user': what one record of `data` is.
    population_size: Under 'add_remove', a public number close to the number of records.
    public: If `data` are public, where they come from. The layer is then adapted exactly, at no
      cost, and the statement repeats this text.
    seed: For tests only.

  Returns:
    The ledger of this cost. The ledger of every model with this layer has it, too.

  Raises:
    ValueError: For layers without a private form, missing arguments or a wrong shape.

  Examples:
    >>> layer = compat.keras.layers.Normalization()
    >>> data = np.random.default_rng(0).normal(2.0, 1.0, size=[10_000, 3])
    >>> cost = adapt(layer, data, noise_multiplier=20.0, bound=6.0)
    >>> 0.1 < cost.epsilon() < 0.3
    True
  """
  if public is not None:
    layer.adapt(data)
    disclosures.say_public(layer, public)
    return privacy.Ledger()
  if noise_multiplier is None:
    raise ValueError('`noise_multiplier` must be given: it decides what the private statistics '
                     'cost. Received: noise_multiplier=None. For public data pass '
                     "`public='where they come from'`.")
  checks.positive(noise_multiplier=noise_multiplier)
  checks.one_of(('zero_out', 'add_remove'), adjacency=adjacency)
  planned = lambda count: release.plan(
      count, noise_multiplier=noise_multiplier, target_delta=target_delta, adjacency=adjacency,
      population_size=population_size, unit=unit, seed=seed)
  extra, rng = 0.0, np.random.default_rng(seed)
  if isinstance(layer, compat.keras.layers.Normalization):
    records = _numbers(data)
    plan = planned(len(records))
    _set_moments(layer, records, *_moments(records, bound, noise_multiplier, plan.batch_size, rng))
  elif isinstance(layer, (compat.keras.layers.StringLookup, compat.keras.layers.TextVectorization)):
    if size is None:
      raise ValueError('`size` must be given: the most words to keep. Received: size=None.')
    records, extra = compat.words_of(layer, data), delta
    plan = planned(len(records))
    found = vocabulary.private_vocabulary(
        {str(i): words for i, words in enumerate(records)}, size, delta=delta, seed=seed,
        noise_multiplier=noise_multiplier, words_per_user=words_per_record)
    layer.set_vocabulary(list(found.words))
  else:
    raise ValueError('`layer` must be a Normalization, StringLookup or TextVectorization. '
                     f'Received: {type(layer).__name__}. Give others their state from public data.')
  note = f'{layer.name} was adapted privately; its cost is one of the runs'
  if extra:
    note += f', and {extra:g} of delta is for words of one record alone'
  entry = release.entry(plan, disclosures.label(layer), f'{note}.', delta=extra)
  release.charge(layer, entry)
  return privacy.Ledger((entry,))


def _numbers(data: npt.ArrayLike) -> np.ndarray:
  records = checks.rectangular(data, '`data` must be [n, d] numbers.', np.float64)
  if records.ndim != 2 or 0 in records.shape:
    raise ValueError('`data` must be [n, d] numbers for a Normalization. Received: '
                     f'{records.ndim} axes, or none along one of them.')
  return np.where(np.isfinite(records).all(1, keepdims=True), records, 0.0)


def _moments(
    records: np.ndarray, bound: Optional[npt.ArrayLike], noise_multiplier: float, count: float,
    rng: np.random.Generator) -> Tuple[np.ndarray, np.ndarray]:
  """Returns noisy means and variances [d], of sums over a public number of records."""
  features = records.shape[1]
  if bound is None:
    raise ValueError('`bound` must be given: the largest size of a value, from public knowledge. '
                     'Received: bound=None.')
  bound = np.broadcast_to(np.asarray(bound, np.float64), [features])
  for one in bound:
    checks.positive(bound=float(one))
  clipped = np.clip(records / bound, -1, 1)
  std = noise_multiplier * np.sqrt(2 * features)
  first, second = (
      (sums + std * rng.standard_normal(features)) / count
      for sums in (clipped.sum(0), np.square(clipped).sum(0)))
  mean = np.clip(first, -1, 1)
  variance = second - np.square(mean)
  small = int(np.sum(variance < _LEAST_VARIANCE))
  if small:
    warnings.warn(
        f'{small} of {features} variances are below the noise and were set to '
        f'{_LEAST_VARIANCE:g} times the square of the bound. Lower `bound` or '
        '`noise_multiplier`.', errors.Caution, stacklevel=4)
  return mean * bound, np.maximum(variance, _LEAST_VARIANCE) * np.square(bound)


def _set_moments(
    layer: 'compat.keras.layers.Normalization', records: np.ndarray, mean: np.ndarray,
    variance: np.ndarray) -> None:
  if not layer.built:
    layer.build((None, records.shape[1]))
  if tuple(np.shape(layer.adapt_mean)) != mean.shape:
    raise ValueError('`layer` must have a mean for each feature (axis=-1). Received: means of '
                     f'shape {tuple(np.shape(layer.adapt_mean))} for {mean.shape[0]} features.')
  layer.adapt_mean.assign(mean)
  layer.adapt_variance.assign(variance)
  layer.finalize_state()

