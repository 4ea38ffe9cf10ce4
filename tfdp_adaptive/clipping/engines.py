# SPDX-License-Identifier: Apache-2.0
"""Chooses the engine that clips a model's gradients."""

from typing import Any, List, Tuple
import warnings

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import errors
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import ids
from tfdp_adaptive.clipping import interface
from tfdp_adaptive.clipping import layered
from tfdp_adaptive.clipping import materialized

ENGINES = ('auto', 'bookkeeping', 'layered', 'materialized', 'loop')
_ENGINES = {
    'bookkeeping': bookkeeping.engine, 'layered': layered.engine,
    'materialized': materialized.vectorized, 'loop': materialized.looped}


def decide(
    name: str, model: compat.Model, asks: Tuple[contract.Ask, ...],
    x: Any = None) -> Tuple[str, str]:
  """`(name, reason)`: one of `ENGINES` but 'auto', and why it is none that is faster.

  Args:
    name: One of `ENGINES`; 'auto' for the fastest that can do it.
    model: A built Keras model.
    asks: The rule's asks; projections other than rescaling need every record.
    x: Nest of inputs or their specs; without it only the structure is checked.

  Raises:
    ValueError: If the engine is unknown.
  """
  if name not in ENGINES:
    raise ValueError(f'`engine` must be one of {ENGINES}. Received: engine={name!r}.')
  if name in ('bookkeeping', 'layered'):
    return name, ''
  seen, reason = bookkeeping.supports(model, x)
  if name == 'auto' and seen:
    possible, reason = bookkeeping.supports(model, x, asks)
    return ('bookkeeping', '') if possible else ('layered', reason)
  if name == 'loop' or _must_loop(model):
    return 'loop', reason
  return 'materialized', reason


def choose(
    name: str, model: compat.Model, asks: Tuple[contract.Ask, ...], x: Any) -> interface.Engine:
  """The engine of `decide`; warns where 'auto' must take a slower one."""
  decided, reason = decide(name, model, asks, x)
  if name == 'auto' and decided != 'bookkeeping':
    how = 'layer by layer' if decided == 'layered' else 'for the whole model'
    warnings.warn(
        f'Gradients of single examples are formed {how}, which takes more time and memory than '
        f'book-keeping: {reason} See tfdp.explain_clipping(model).', errors.Caution,
        stacklevel=2)
  return ids.guarded(_ENGINES[decided])


def record_gradients(model: compat.Model, loss: interface.Loss, x: Any, y: Any) -> List[tf.Tensor]:
  """[n, ...] gradients of every example, a list like the trainable variables."""
  if bookkeeping.supports(model, x)[0]:
    return layered.record_gradients(model, loss, x, y)
  return materialized.record_gradients(model, loss, x, y, vectorize=not _must_loop(model))


def _must_loop(model: compat.Model) -> bool:
  """Whether vectorizing examples goes wrong: recurrent layers have no vectorized gradient."""
  return any(
      isinstance(layer, compat.keras.layers.RNN) or compat.vectorizes_wrongly(layer)
      for layer in model._flatten_layers())
