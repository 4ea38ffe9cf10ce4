# SPDX-License-Identifier: Apache-2.0
"""Features of a frozen base: computed once, trained on many times.

With a frozen and deterministic base f, x -> f(x) maps each record by itself. A head that is trained
on features has the privacy of its own training; what the base was trained on costs what its ledger
says, and travels with the features.
"""

import contextlib
import functools
import hashlib
import json
import pathlib
from typing import Any, Callable, Optional, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.batches import cache as cache_lib
from tfdp_adaptive.batches import sources
from tfdp_adaptive.independence import disclosures
from tfdp_adaptive.independence import probes
from tfdp_adaptive.independence import validation
from tfdp_adaptive.keras import private
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.mechanisms import progress
from tfdp_adaptive.privacy import ledger as ledger_lib


class Features(sources.Source):
  """Features of records in place of their inputs, for `plan.batches` and `tfdp.heads`.

  Attributes:
    x: [n, ...] features; [n, views, ...] with views.
    views: The number of views of a record, or None.
    entries: The ledger entries of the base, and of the data where these are features, too.
    base: Digest of the base.
  """

  def __init__(self, x: np.ndarray, rest: Optional[sources.Source], views: Optional[int],
               entries: Tuple[ledger_lib.Entry, ...], base: str) -> None:
    self.x, self.views, self.base = x, views, base
    spec = sources.spec(x)
    specs: Any = spec if rest is None else (spec, *rest.specs)
    read = lambda indices: np.asarray(x[indices]) if rest is None else (
        np.asarray(x[indices]), *rest.take(indices))
    super().__init__(len(x), specs, read, rest is None or rest.at_hand, entries)

  @property
  def ledger(self) -> ledger_lib.Ledger:
    """Returns the ledger of what the base has cost."""
    return ledger_lib.Ledger(self.entries)


def features(
    base: Any, data: sources.Data, *, batch_size: int = 32, views: Optional[int] = None,
    cache: Optional[str] = None, name: Optional[str] = None) -> Features:
  """Computes the features of all records by a frozen base, once.

  Args:
    base: A built Keras model without trainable weights (`base.trainable = False`), with one output;
      or a function of NumPy, which maps inputs [m, ...] to features [m, ...]. It must not mix
      records, nor draw numbers unless `views` is given.
    data: Inputs, or a tuple `(x, y)` or `(x, y, sample_weight)`, as for `plan.batches`.
    batch_size: The number of records that the base takes at once. It does not change the features.
    views: How many random views of each record to compute. A Keras base is then called with
      `training=True`, and its random layers draw a new view at every call. A function may draw
      views, too.
    cache: A folder for the features. If it holds the features of the same base and data, they are
      read from it. A computation that was stopped resumes from it. It holds unprotected values of
      the private data, in a folder that only you can read.
    name: For a function: its name and version, for the cache. Change it whenever the function
      changes.

  Returns:
    A `Features`: give it to `plan.batches(...)`, `tfdp.heads.least_squares(...)` or
    `tfdp.estimates.second_moments(...)`. Models with these features count the ledger of the base.

  Raises:
    PrivacyError: If the base has weights that train, draws numbers, keeps data or mixes records.
    ValueError: For other arguments.

  Examples:
    >>> layers = compat.keras.layers
    >>> base = compat.keras.Sequential([layers.Input([4]), layers.Dense(3, 'relu')])
    >>> base.trainable = False
    >>> x = np.ones([10, 4], np.float32)
    >>> found = features(base, (x, np.zeros([10])))
    >>> found.x.shape
    (10, 3)
    >>> head = compat.keras.Sequential([layers.Input([3]), layers.Dense(1)])
    >>> join(base, head).output_shape
    (None, 1)
  """
  checks.whole(batch_size=batch_size)
  if views is not None:
    checks.whole(views=views)
  source = cache_lib.source_of(data)
  if not len(source):
    raise ValueError('`data` has no examples.')
  pair = isinstance(source.specs, tuple) and len(source.specs) in (2, 3)
  inputs = _part(source, 0, 1) if pair else source
  rest = _part(source, 1, None) if pair else None
  if compat.is_model(base):
    if not base.built:
      raise ValueError('`base` must be built. Received: a model that is not. Call it once.')
    digest = _digest_of_model(base)
    run, checked = _checked_model(base, inputs, views)
    entries = weight_ledger.Ledger.of(checked).ledger().entries
  elif callable(base):
    checks.require(isinstance(name, str) and name, 'tell the function and its version, for the '
                   'cache and for `tfdp.join`', name=name)
    digest = f'function {name}'
    entries = weight_ledger.Ledger(weight_ledger.held_by(base)).ledger().entries
    run = _checked_function(base, inputs, views)
  else:
    raise ValueError('`base` must be a built Keras model or a function of NumPy. Received: '
                     f'{type(base).__name__}.')
  once = lambda x: np.stack([run(x) for _ in range(views)], 1) if views else run(x)
  x = _computed(once, inputs, batch_size, cache, f'{digest} {views}')
  return Features(x, rest, views, (*source.entries, *entries), digest)


def join(base: Any, head: compat.Model) -> Any:
  """Returns the private model of a frozen base and the head that was trained on its features.

  It shares the weights of both, and its ledger counts the runs of both. Compile it to evaluate or
  train it.

  Args:
    base: The Keras model that `tfdp.features` was given.
    head: A layer, such as that of `tfdp.heads.least_squares`, or a model.

  Raises:
    ValueError: If `base` is no Keras model, or `head` was trained on features of another base.
  """
  if not compat.is_model(base):
    raise ValueError('`base` must be a Keras model to be joined with a head. Received: '
                     f'{type(base).__name__}. Call the function, then the head.')
  entries = weight_ledger.Ledger.of(head).ledger().entries
  trained_on = [note for entry in entries for note in entry.notes
                if note.startswith(sources.FEATURES.split('{', maxsplit=1)[0])]
  if trained_on and sources.FEATURES.format(_digest_of_model(base)) not in trained_on:
    raise ValueError('`head` must have been trained on features of `base`. Received: a head that '
                     'was trained on those of another base, or of this one before it changed.')
  specs = compat.input_specs(base)
  if specs is None:
    raise ValueError('`base` must be built, and tell its inputs. Received: a base that does not. '
                     'Call it once, or make it with an `Input`.')
  symbolic = tf.nest.map_structure(
      lambda s: compat.keras.Input(shape=s.shape[1:], dtype=s.dtype.name), specs)
  outputs = head(base(symbolic, training=False))
  return private.make_private(compat.keras.Model(symbolic, outputs))


def _part(source: sources.Source, first: int, last: Optional[int]) -> Any:
  """Returns a source of one part of each record, or of several as a tuple."""
  cut = (lambda parts: parts[first]) if last is not None else (lambda parts: parts[first:])
  return sources.Source(len(source), cut(source.specs), lambda indices: cut(source.take(indices)),
                        source.at_hand)


class FrozenBase(compat.keras.Model):  # type: ignore[misc, name-defined]
  """A base as features call it, for the checks of a model that trains."""

  def __init__(self, base: compat.Model, training: bool) -> None:
    super().__init__()
    self.base, self._mode = base, training

  def call(self, inputs: trees.Tree, training: Optional[bool] = None) -> Any:
    del training
    return self.base(inputs, training=self._mode)


def _checked_model(base: compat.Model, inputs: sources.Source,
                   views: Optional[int]) -> Tuple[Callable[[Any], np.ndarray], FrozenBase]:
  """Returns the function of a base that keeps its records apart, and the base, or raises."""
  trained = [compat.describe(v) for v in base.trainable_variables]
  if trained:
    raise errors.PrivacyError(
        '`base` must be frozen: features of weights that train would be out of date. Received: '
        f'{len(trained)} trainable weights, such as {trained[0]}. Set `base.trainable = False`.')
  specs = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), inputs.specs)
  traced = tf.function(lambda x: base(x, training=bool(views)), autograph=False,
                       input_signature=[specs])
  concrete = traced.get_concrete_function()
  if len(tf.nest.flatten(concrete.structured_outputs)) != 1:
    raise ValueError('`base` must have one output. Received: several. Choose one: '
                     '`tf.keras.Model(base.input, base.output[...])`.')
  draws = probes.has_draws(concrete)
  if views is None and draws:
    raise errors.PrivacyError(
        '`base` must give the same features for a record whenever it is called. Received: a model '
        'that draws random numbers. Take these layers out, or ask for several `views`.')
  if views is not None and not draws:
    raise ValueError('`views` are of a base that draws, such as one with RandomFlip. Received: '
                     f'views={views} of a base whose views would all be the same.')
  checked = FrozenBase(base, bool(views))
  validation.build(checked, specs)
  validation.validate_model(checked, specs)
  return lambda x: traced(tf.nest.map_structure(tf.convert_to_tensor, x)).numpy(), checked


def _checked_function(
    base: Callable[..., Any], inputs: sources.Source,
    views: Optional[int]) -> Callable[[Any], np.ndarray]:
  """Returns the function, which is tried on three of the records, or raises."""
  run = lambda x: np.asarray(base(x))
  some = inputs.take(np.arange(min(3, len(inputs))))
  reverse = sources.map_structure(lambda t: t[::-1], some)
  together, again, turned = run(some), run(some), run(reverse)
  count = len(sources.leaves(some)[0])
  if together.ndim < 2 or len(together) != count or together.dtype.kind not in 'fiu':
    raise ValueError('`base` must return numbers [m, ...] for m records. Received: '
                     f'{together.ndim} axes of {together.dtype.type.__name__}, or another number.')
  if views is not None:
    return run
  if not np.array_equal(together, again, equal_nan=True):
    raise errors.PrivacyError('`base` must give the same features for a record whenever it is '
                              'called. Received: a function that does not.')
  first = sources.map_structure(lambda t: t[:1], some)
  near = functools.partial(np.allclose, rtol=1e-4, atol=1e-5 * (np.nanmax(np.abs(together)) or 1),
                           equal_nan=True)
  if not (near(together[::-1], turned) and near(together[:1], run(first))):
    raise errors.PrivacyError('`base` must map each record by itself. Received: a function whose '
                              'features of one record change with the others.')
  return run


def _digest_of_model(base: compat.Model) -> str:
  """Returns a digest of a model's layers and weights, as far as its config tells them.

  It does not depend on names, on seeds, or on which weights are frozen.
  """
  try:
    config = json.dumps(json.loads(
        json.dumps(base.get_config(), default=repr), object_pairs_hook=lambda pairs: sorted(
            pair for pair in pairs if pair[0] not in ('seed', 'trainable'))))
  except NotImplementedError:
    config = type(base).__qualname__
  for i, layer in enumerate(compat.all_layers(base)):
    config = config.replace(f'"{layer.name}"', f'"{i}"') + disclosures.digest_of(layer)
  weights = [np.asarray(compat.read(v)) for v in base.weights if hasattr(v, 'assign')]
  return hashlib.sha256(f'{config} {sources.fingerprint(tuple(weights))}'.encode()).hexdigest()[:32]


def _computed(
    run: Callable[[Any], np.ndarray], inputs: sources.Source, batch_size: int,
    cache: Optional[str], key: str) -> np.ndarray:
  """Returns the features of all records, from a cache as far as it has them."""
  count = len(inputs)
  rows = lambda first: np.arange(first, min(first + batch_size, count))
  first = run(inputs.take(rows(0)))
  shape = (count, *first.shape[1:])
  if cache is None:
    file: Any = contextlib.nullcontext(cache_lib.Memory(np.zeros(shape, first.dtype)))
  else:
    file = cache_lib.File(
        pathlib.Path(cache), f'{key} {_digest_of_data(inputs)}', shape, first.dtype)
  with file as done, progress.fraction('features', total=count) as bar:
    bar.update(done.rows)
    if not done.rows:
      done.write(rows(0), first)
    while done.rows < count:
      places = rows(done.rows)
      done.write(places, run(inputs.take(places)))
      bar.update(len(places))
    return done.array


def _digest_of_data(inputs: sources.Source) -> str:
  digest = hashlib.sha256()
  for first in range(0, len(inputs), 1024):
    places = np.arange(first, min(first + 1024, len(inputs)))
    digest.update(sources.fingerprint(inputs.take(places)).encode())
  return digest.hexdigest()
