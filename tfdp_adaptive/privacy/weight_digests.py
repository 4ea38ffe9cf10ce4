# SPDX-License-Identifier: Apache-2.0
"""Digests of a model's weights, by which a card and a file of weights know each other.

Each array of numbers has a digest of its shape, type and bytes, integers of quantized layers
included, but the states of random generators. A card lists them sorted,
so that neither the names nor the order in which a format stores arrays matter.
"""

import hashlib
import io
import os
from typing import Any, Dict, Iterable, List, NamedTuple, Sequence, Tuple, Union
import zipfile

import numpy as np

_LEDGER = '_tfdp_ledger'
_BESIDE = ('optimizer', 'metrics', _LEDGER)  # Parts of a Keras file that are no weights.
_GENERATORS = ('seed_generator', '_random_generator', 'random_generator')
_IN_KERAS = 'model.weights.h5'


class File(NamedTuple):
  """The digests in a file, how many arrays an optimizer and metrics left, and a ledger."""

  weights: Tuple[str, ...]
  of_optimizer: int
  of_metrics: int
  ledger: str = ''


def of(arrays: Iterable[Any]) -> Tuple[str, ...]:
  """Returns sorted digests of the arrays of numbers among `arrays`.

  Examples:
    >>> of([np.zeros(2), np.ones(2)]) == of([np.ones(2), np.zeros(2)])
    True
  """
  numbers = (np.asarray(array) for array in arrays)
  return tuple(sorted(_digest(array) for array in numbers if array.dtype.kind not in 'OSU'))


def short(digests: Sequence[str]) -> str:
  """Returns one digest of all arrays."""
  return hashlib.sha256('\n'.join(digests).encode()).hexdigest()[:32]


def of_file(path: Union[str, os.PathLike]) -> File:
  """Returns the digests of a `.keras`, `.weights.h5` or `.npz` file, or of the folder of an export.

  Raises:
    ValueError: The file is none of these, or damaged.
  """
  import h5py  # It comes with Keras. pylint: disable=import-outside-toplevel
  try:
    if os.path.isdir(path):
      return _of_named(_exported(path))
    if h5py.is_hdf5(path):
      with h5py.File(path, 'r') as file:
        return _of_named(_datasets(file))
    with zipfile.ZipFile(path) as archive:
      if _IN_KERAS in archive.namelist():
        with h5py.File(io.BytesIO(archive.read(_IN_KERAS)), 'r') as file:
          return _of_named(_datasets(file))
    with np.load(path, allow_pickle=False) as arrays:
      return _of_named((name, arrays[name]) for name in arrays.files)
  except OSError as error:
    if not os.path.exists(path):
      raise
    raise ValueError(f'{path} cannot be read as weights ({error}).') from error
  except Exception as error:  # pylint: disable=broad-except
    # Whatever a damaged archive makes of three libraries.
    raise ValueError(f'{path} must be a .keras, .weights.h5 or .npz file of weights, or the folder '
                     f'of an export. Received: {str(error)[:80]}.') from error


def _of_named(arrays: Iterable[Tuple[str, Any]]) -> File:
  weights: List[Any] = []
  ledger = ''
  beside: Dict[str, int] = dict.fromkeys(_BESIDE, 0)
  for name, value in arrays:
    first, *inside = name.strip('/').split('/')
    if any(part.startswith(_GENERATORS) for part in inside):
      continue
    if first in beside:
      # Keras 2 writes metrics beside weights; those of a private model are zeros there.
      beside[first] += int(first != 'metrics' or np.any(value))
      if first == _LEDGER and value.dtype == np.uint8:
        ledger = value.tobytes().decode(errors='replace')
    else:
      weights.append(value)
  return File(of(weights), beside['optimizer'], beside['metrics'], ledger)


def _exported(folder: Union[str, os.PathLike]) -> List[Tuple[str, Any]]:
  """Returns the variables of `model.export` and their names in the model, which may be equal."""
  import tensorflow as tf  # Most files need none. pylint: disable=import-outside-toplevel
  from tensorflow.core.protobuf import trackable_object_graph_pb2  # pylint: disable=all
  reader = tf.train.load_checkpoint(os.path.join(folder, 'variables', 'variables'))
  graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(
      reader.get_tensor('_CHECKPOINTABLE_OBJECT_GRAPH'))
  return [(one.full_name, reader.get_tensor(one.checkpoint_key))
          for node in graph.nodes for one in node.attributes
          if one.checkpoint_key.startswith('variables/')]  # Keras 3 keeps each once more.


def _datasets(group: Any) -> List[Tuple[str, Any]]:
  names: List[str] = []
  group.visit(names.append)
  return [(name, group[name][()]) for name in names if not hasattr(group[name], 'keys')]


def _digest(array: np.ndarray) -> str:
  array = np.ascontiguousarray(array)
  little = array.astype(array.dtype.newbyteorder('<'), copy=False)
  text = f'{little.dtype.name}{array.shape}'
  return hashlib.sha256(text.encode() + little.tobytes()).hexdigest()[:32]
