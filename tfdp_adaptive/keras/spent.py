# SPDX-License-Identifier: Apache-2.0
"""Knows which runs took a step on a batch that a plan has drawn for one step.

Two runs on the same batches have one sample, so that amplification by sampling does not hold for
both of them together; both entries of the ledger then say so. A batch is known by the identity of
its sample weights, which `plan.batches` makes anew for every batch. Copies are not known.
"""

import contextlib
import functools
import threading
from typing import Any, Dict, Iterator, List, Tuple
import weakref

import tensorflow as tf

_TAKEN: Dict[int, Tuple[Any, List[Any]]] = {}  # Identity -> (weak reference to weights, runs).
_inside = threading.local()


def _forget(key: int, reference: Any) -> None:
  """Drops weights that are gone, unless others have their identity by now."""
  if key in _TAKEN and _TAKEN[key][0] is reference:
    del _TAKEN[key]


@contextlib.contextmanager
def step(optimizer: Any, sample_weight: Any) -> Iterator[None]:
  """Notes that a run takes a step on a batch, unless the step fails or is inside another call.

  Args:
    optimizer: A `DPOptimizer`, or None.
    sample_weight: A nest of tensors or arrays of the batch, or None.
  """
  nested, _inside.step = getattr(_inside, 'step', False), True
  try:
    yield
  finally:
    _inside.step = nested
  if nested or getattr(optimizer, 'plan', None) is None or optimizer.own_sampler is not None:
    return
  for one in tf.nest.flatten(sample_weight):
    if hasattr(one, 'dtype'):
      key = id(one)
      known, runs = _TAKEN.get(key, (lambda: None, []))
      if known() is not one:
        known, runs = weakref.ref(one, functools.partial(_forget, key)), []
      for run in runs:
        run.share(optimizer.run)
        optimizer.run.share(run)
      _TAKEN[key] = known, [*runs, optimizer.run]
