# SPDX-License-Identifier: Apache-2.0
"""Chooses columns of records that are dicts, as those of Hugging Face data sets and grain."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.batches import sources


def chosen(data: Any, columns: sources.Nest) -> Any:
  """Returns data whose records are the named columns of the rows of `data`.

  Args:
    data: A source whose rows are dicts, a `tf.data.Dataset` of dicts, or a dict of arrays.
    columns: Names in the structure that `fit` takes, such as `('image', 'label')`,
      `(('title', 'text'), 'label')`, or `'text'` for x alone. Other columns are not read.

  Examples:
    >>> chosen({'image': [[1.]], 'label': [2], 'id': [3]}, ('image', 'label'))
    ([[1.0]], [2])
  """
  if not all(isinstance(name, str) for name in sources.leaves(columns)):
    raise ValueError("`columns` must be names, such as ('image', 'label'). "
                     f'Received: columns={columns!r}.')
  if isinstance(data, tf.data.Dataset):
    _pick(data.element_spec, columns)
    return data.map(lambda row: _pick(row, columns))
  if isinstance(data, Mapping):
    return _pick(data, columns)
  if not hasattr(data, '__getitem__') or isinstance(data, (tuple, compat.keras.utils.Sequence)):
    raise ValueError(
        '`columns` needs data whose rows are dicts: a source with `__len__` and `__getitem__`, a '
        f'`tf.data.Dataset`, or a dict of arrays. Received: {type(data).__name__}.')
  return _Rows(data, columns)


class _Rows:
  """Some columns of a source of rows."""

  def __init__(self, rows: Any, columns: sources.Nest) -> None:
    self._rows, self._columns = rows, columns

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, number: int) -> Any:
    return _pick(self._rows[number], self._columns)

  def __getitems__(self, numbers: Sequence[int]) -> List[Any]:
    return [_pick(row, self._columns) for row in sources.rows(self._rows, numbers)]


def _pick(row: object, columns: sources.Nest) -> Any:
  if not isinstance(row, Mapping):
    raise ValueError(f'`columns` needs rows that are dicts. Received: a {type(row).__name__}.')
  found: Dict[str, Any] = dict(row)

  def column(name: str) -> Any:
    if name not in found:
      raise ValueError(f'`columns` must name columns of every row, of {sorted(found)}. '
                       f'Received: columns={columns!r}.')
    return found[name]

  return sources.map_structure(column, columns)
