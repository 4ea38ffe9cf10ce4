# SPDX-License-Identifier: Apache-2.0
"""Keras classes as they were before a model was made inside a graph.

Keras 2 changes the bases of a model's class, for good and for all of its objects, when
one is made inside a graph as TFF does. Models made before then end in "invalid state".
"""

from __future__ import annotations

import contextlib
from typing import Iterator, List, Set

import tensorflow as tf


def _all_below(kind: type) -> Set[type]:
  children: List[type] = kind.__subclasses__()
  return set(children).union(*map(_all_below, children))


@contextlib.contextmanager
def kept() -> Iterator[None]:
  """Inside, models may be made in graphs; afterwards those made before are as they were."""
  bases = {kind: kind.__bases__ for kind in _all_below(tf.keras.layers.Layer)}
  try:
    yield
  finally:
    for kind, before in bases.items():
      if kind.__bases__ != before:
        kind.__bases__ = before
