# SPDX-License-Identifier: Apache-2.0
"""Finds layers that were adapted to data: their state is an exact statistic of it."""

from typing import Any, List
import warnings

import numpy as np

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.keras import lines

_PUBLIC = '_tfdp_public'


def label(layer: Any) -> str:
  """What the ledger calls the private adaptation of a layer."""
  return f'estimates.adapt({layer.name})'


def say_public(layer: Any, source: str) -> None:
  """Notes that a layer was adapted to public data, where the caller says that from."""
  object.__setattr__(layer, _PUBLIC, source)


def check(model: Any, run: Any) -> None:
  """Warns of adapted layers whose cost is not in the ledger; the statement of `run` names them."""
  found = compat.all_layers(model)
  inner = [getattr(layer, '_lookup_layer', None) for layer in found]
  unknown = [layer.name for layer in found
             if all(layer is not one for one in inner) and is_adapted(layer)
             and not hasattr(layer, _PUBLIC)
             and label(layer) not in [one.rule for one in lines.entries(lines.lines([layer]))]]
  for layer in found:
    if hasattr(layer, _PUBLIC):
      run.note(f'{layer.name} was adapted to data that are public in the words of whoever trained '
               f'the model: {getattr(layer, _PUBLIC)!r}.')
  if unknown:
    warnings.warn(
        f'Layers {unknown} were adapted, and hold exact statistics of what they were adapted to. '
        'If those data are private, no epsilon covers this. Use '
        '`tfdp.estimates.adapt(layer, data, ...)`, whose cost is in the ledger; or say that the '
        "data are public: `tfdp.estimates.adapt(layer, data, public='where they come from')`.",
        errors.Caution, stacklevel=2)
    run.note(f'NOT COVERED IF PRIVATE: layers {unknown} hold exact statistics of the data that '
             'they were adapted to. If those data are private, no epsilon covers them.')


def is_adapted(layer: Any) -> bool:
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


def _words(layer: Any) -> List[Any]:
  try:
    return list(layer.get_vocabulary(include_special_tokens=False))
  except (AttributeError, RuntimeError, ValueError):  # It has none yet.
    return []
