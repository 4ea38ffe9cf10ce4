# SPDX-License-Identifier: Apache-2.0
"""Finds what a model holds that could be private data, and says so in the statement."""

from typing import Any, Callable, Iterator, List, Optional, Sequence
import warnings

import numpy as np

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.independence import captured
from tfdp_adaptive.independence import validation

_PUBLIC = '_tfdp_public'  # On layers.
_MOST = 8  # Numbers that a sentence lists.


def check(model: compat.Model, population_size: Optional[int]) -> None:
  """Raises `PrivacyError` for a model that holds an array with a row for each record."""
  shapes = _shapes(model)
  if any(shape and shape[0] == population_size for shape in shapes):
    raise errors.PrivacyError(
        f'A layer holds an array with a row for each of the {population_size} records, so that '
        f'every gradient may depend on all of them. Received: {model.name}, with arrays {shapes} '
        'that are no weights. Give the layer public data of another length, or leave it out.')


def check_alone(augment: Callable[..., Any]) -> None:
  """Raises `PrivacyError` for a function of one example that holds arrays, perhaps of others."""
  found = captured.find(augment)
  shapes = [np.shape(one) for one in (*found.arrays, *found.variables) if np.ndim(one)]
  if shapes:
    raise errors.PrivacyError(
        '`augment` must make a view of an example of this example alone. Received: a function that '
        f'holds arrays of shapes {shapes}, which may be other examples. Write settings as numbers '
        'of Python. If the arrays are public, make the views in a source of your own that is read '
        'anew, and say so: `plan.batches(source, changing="how")`.')


def sentences(
    model: compat.Model, numbers: Sequence[float] = (),
    covered: Callable[[Any], bool] = lambda layer: False) -> Iterator[str]:
  """Yields sentences for the statement about all that may have been computed from private data.

  Args:
    model: A model that was validated.
    numbers: Plain numbers of its loss, penalties, constraints and schedule.
    covered: Whether the cost of a layer's adaptation is in the ledger.
  """
  yield from _about(numbers)
  shapes = _shapes(model)
  held = validation.seen(model)
  if held.tables:
    yield f'Layers read {held.tables} lookup tables that are no weights; they are taken as public.'
  if held.unseen:
    yield (f'Layers call operations {list(held.unseen)}: the data that their Python code or files '
           'bring cannot be seen, and are taken as public.')
  if shapes:
    yield (f'Layers hold arrays of shapes {shapes} that are no weights; they are taken as public.')
  found = captured.find(*(layer.function for layer in compat.all_layers(model)
                          if hasattr(layer, 'function')))  # `Lambda`s.
  yield from _about(found.numbers + [
      np.asarray(one).item() for one in found.arrays
      if captured.shape(one) == () and np.asarray(one).dtype.kind in 'fiub'])
  yield from _adapted(compat.all_layers(model), covered)


def label(layer: compat.Layer) -> str:
  """Returns the name in the ledger of a layer's private adaptation."""
  return f'estimates.adapt({layer.name})'


def say_public(layer: compat.Layer, source: str) -> None:
  """Records that a layer was adapted to public data."""
  object.__setattr__(layer, _PUBLIC, source)


def _shapes(model: compat.Model) -> List[Any]:
  """Returns the shapes of arrays that are no weights, in the graph or in initializers."""
  return validation.seen(model).shapes + [
      np.shape(value) for layer in compat.all_layers(model)
      for one in compat.initializers(layer)
      for value in [*captured.find(one).arrays, *getattr(one, '__dict__', {}).values()]
      if np.ndim(value)]


def _about(numbers: Sequence[float]) -> Iterator[str]:
  """Yields a sentence about numbers that may be settings or may be computed from data."""
  if numbers:
    yield (f'Functions that are not of Keras hold the numbers {sorted(set(numbers))[:_MOST]}. If '
           'these were computed from private data, no epsilon covers them.')


def _adapted(layers: Sequence[Any], covered: Callable[[Any], bool]) -> Iterator[str]:
  """Warns of adapted layers whose cost is not in the ledger. Yields these, and public ones."""
  inner = [getattr(layer, '_lookup_layer', None) for layer in layers]
  unknown = [layer.name for layer in layers
             if all(layer is not one for one in inner) and _is_adapted(layer)
             and not hasattr(layer, _PUBLIC) and not covered(layer)]
  for layer in layers:
    if hasattr(layer, _PUBLIC):
      yield (f'{layer.name} was adapted to data that are public in the words of whoever '
             f'trained the model: {getattr(layer, _PUBLIC)!r}.')
  if unknown:
    sentence = (
        f'NOT COVERED IF PRIVATE: layers {unknown} hold a vocabulary or exact statistics. If '
        'these come from private data, no epsilon covers them.')
    yield sentence
    warnings.warn(
        f'{sentence} Use `tfdp.estimates.adapt(layer, data, ...)`, whose cost is in the ledger. '
        'If they are public, say so: `tfdp.estimates.adapt(layer, data, '
        "public='where the data come from')`.", errors.Caution, stacklevel=4)


def _is_adapted(layer: compat.Layer) -> bool:
  """Whether a layer holds something that it may have computed from data."""
  if not hasattr(layer, 'adapt'):
    return False
  inner = getattr(layer, '_lookup_layer', layer)
  if hasattr(inner, 'get_vocabulary'):
    return getattr(inner, 'input_vocabulary', None) is None and bool(_words(inner))
  if hasattr(layer, 'num_bins'):
    return layer.num_bins is not None and bool(len(layer.bin_boundaries or ()))
  mean, variance = (getattr(layer, name, None) for name in ('adapt_mean', 'adapt_variance'))
  return mean is not None and bool(
      np.any(np.asarray(mean) != 0) or np.any(np.asarray(variance) != 1))


def _words(layer: compat.Layer) -> List[Any]:
  try:
    return list(layer.get_vocabulary(include_special_tokens=False))
  except (AttributeError, RuntimeError, ValueError):  # It has none yet.
    return []
