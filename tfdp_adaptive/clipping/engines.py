"""Which engine clips a model's gradients."""

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import materialized

ENGINES = ('auto', 'bookkeeping', 'materialized', 'loop')


def choose(name, model, asks):
  """The engine `name`, or the fastest one that can do it for 'auto'.

  Raises:
    ValueError: If the engine is unknown.
  """
  if name not in ENGINES:
    raise ValueError(f'`engine` must be one of {ENGINES}. Received: engine={name!r}.')
  if name == 'loop':
    return materialized.looped
  del asks
  # Vectorizing attention crashes the process on TF 2.21 with Keras 3.
  if compat.KERAS_3 and name == 'auto' and any(
      'Attention' in type(layer).__name__ for layer in model._flatten_layers()):
    return materialized.looped
  return materialized.vectorized
