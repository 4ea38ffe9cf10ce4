# SPDX-License-Identifier: Apache-2.0
"""Assigns Flower nodes to places in the population, and saves the places before use."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any, Dict, List, Optional

from tfdp_adaptive import runfolder

from . import storage

_NODES = 'nodes.json'
_log = logging.getLogger('flwr')


class Nodes:
  """Places of the population and their nodes, assigned permanently in order of appearance.

  Args:
    size: Number of places.
    grid: Flower's grid.
    folder: Folder in which the places are saved, or None.
  """

  def __init__(self, size: int, grid: Any, folder: Optional[pathlib.Path]) -> None:
    self.client_ids = list(range(size))
    self._grid, self._path = grid, None if folder is None else folder / _NODES
    self._places: List[str] = []
    self._online: Dict[str, int] = {}

  def read(self) -> None:
    """Reads the saved places.

    Raises:
      SavedRunError: If there is a run, but no file of its places.
    """
    if self._path is None:
      return
    if self._path.exists():
      self._places = json.loads(self._path.read_text(encoding='utf-8'))
    elif self._path.with_name('state.npz').exists():
      raise storage.SavedRunError(
          f'{self._path} is gone: nodes would take new places, and take part more often than the '
          'plan allows for. Put it back, or give another folder.')
    self._write()

  def meet(self) -> int:
    """Finds the nodes that are online, and assigns places to new ones; returns their number."""
    # A key outlives its node: registered again, it is the same user.
    self._online = {node.public_key.hex() or str(node.node_id): node.node_id
                    for node in self._grid.get_nodes()}
    new = sorted(set(self._online) - set(self._places))
    free = len(self.client_ids) - len(self._places)
    if len(new) > free:
      _log.warning('%d nodes are too many for the plan and take no part.', len(new) - free)
    if new[:free]:
      self._places.extend(new[:free])
      self._write()
    return len(set(self._places).intersection(self._online))

  def at(self, place: int) -> Optional[int]:
    """Returns the node at a place, or None if it is not online."""
    return self._online.get(self._places[place]) if place < len(self._places) else None

  def _write(self) -> None:
    if self._path is not None:
      runfolder.replace(self._path, json.dumps(self._places).encode())
