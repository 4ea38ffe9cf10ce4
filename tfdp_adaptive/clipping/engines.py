"""Which engine clips a model's gradients."""

from tfdp_adaptive import compat
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.clipping import materialized

ENGINES = ('auto', 'bookkeeping', 'materialized', 'loop')


def choose(name, model, asks, x):
  """The engine `name`, or the fastest one that can do it for 'auto'.

  Args:
    name: One of `ENGINES`.
    model: A built Keras model.
    asks: The rule's asks; projections other than rescaling need every record.
    x: Nest of inputs.

  Raises:
    ValueError: If the engine is unknown.
  """
  if name not in ENGINES:
    raise ValueError(f'`engine` must be one of {ENGINES}. Received: engine={name!r}.')
  if name == 'bookkeeping' or name == 'auto' and bookkeeping.supports(model, x, asks)[0]:
    return bookkeeping.engine
  if name == 'loop' or _must_loop(model):
    return materialized.looped
  return materialized.vectorized


def record_gradients(model, loss, x, y):
  """[n, ...] gradients of every example, a list like the trainable variables."""
  return materialized.record_gradients(model, loss, x, y, vectorize=not _must_loop(model))


def _must_loop(model):
  """Whether vectorizing examples goes wrong.

  Recurrent layers have no vectorized gradient. On Keras 3 attention crashes the
  process (TF 2.21), and dropout would draw one mask for all examples.
  """
  return any(
      isinstance(layer, compat.keras.layers.RNN) or compat.KERAS_3 and (
          'Attention' in type(layer).__name__ or getattr(layer, '_seed_generators', None))
      for layer in model._flatten_layers())
