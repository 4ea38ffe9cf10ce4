"""Which layers the book-keeping engine knows, and how to teach it another.

A layer is known by its exact class; a subclass may compute something else. What
is not known goes through `generic`, one example at a time.

    @registry.register(MyScale)
    def my_scale(layer, call, errors):
      yield layer.gamma, factors.explicit(tf.reduce_sum(errors * call.inputs, axis=1))

The function gets the layer, one recorded call (`inputs`, its first argument;
`args`; `kwargs`; `outputs`) and the gradients of the loss by the tap, shaped like
it; it yields a factor per trainable variable of the layer. Examples lie along the
first axis of everything, and no example may look at another.
"""

from typing import Any, Callable, Dict, NamedTuple, Tuple

import tensorflow as tf


class Unsupported(ValueError):
  """The book-keeping engine cannot clip this model; the message says why."""


class Call(NamedTuple):
  """One recorded call of a layer."""

  args: Tuple[Any, ...]
  kwargs: dict
  outputs: Any  # What the layer returned.
  saved: Any = ()  # What a kind's own `tap` wants to keep.
  batched: Tuple[bool, ...] = ()  # Per flat argument: is the batch its first axis?
  times: Any = 1  # Rows of the first axis per example (TimeDistributed).

  @property
  def inputs(self):
    return self.args[0]


class Kind(NamedTuple):
  """How the engine treats a class of layers.

  Attributes:
    gradients: `(layer, call, errors) -> (variable, factor), ...`.
    tap: `(layer, function, tape, args, kwargs) -> (outputs, taps, saved)`: runs the
      layer's own `function(*args, **kwargs)`, and names the tensors whose
      gradients it needs, after `tape.watch(tensor)`. The result must be the function's.
    whole: Whether `gradients` covers all variables of the layers inside, too.
    why: `layer -> str`: why this instance must go through `generic`, or ''.
    folds: Whether the layer joins the first two axes of its input before it calls
      the layers inside (TimeDistributed on Keras 2).
  """

  gradients: Callable[..., Any]
  tap: Callable[..., Any]
  whole: bool = False
  why: Callable[[Any], str] = lambda layer: ''
  folds: bool = False


_KINDS: Dict[type, Any] = {}


def at_output(layer, function, tape, args, kwargs):
  """Tap: what the layer returns."""
  del layer
  outputs = function(*args, **kwargs)
  tf.nest.map_structure(tape.watch, outputs)
  return outputs, outputs, ()


def at_activation(layer, function, tape, args, kwargs):
  """Tap: what the layer hands to its `activation`."""
  taps, activation = [], layer.activation
  if activation is None:
    return at_output(layer, function, tape, args, kwargs)

  def tapped(x):
    tape.watch(x)
    taps.append(x)
    return activation(x)

  attributes = vars(layer)
  attributes['activation'] = tapped
  try:
    outputs = function(*args, **kwargs)
  finally:
    attributes['activation'] = activation
  tap, = taps
  return outputs, tap, ()


def register(*classes, tap=at_output, whole=False, why=lambda layer: '', folds=False):
  """Decorates the `gradients` function of layers of exactly these `classes`."""

  def decorate(gradients):
    for layer_class in classes:
      _KINDS[layer_class] = Kind(gradients, tap, whole, why, folds)
    return gradients

  return decorate


def why_unknown(layer):
  """Why `find` has no kind for a layer that has one of its own."""
  kind = _KINDS.get(type(layer))
  if kind is None:
    return f'{type(layer).__name__} is not registered, see tfdp.clipping.register'
  return f'not known for {type(layer).__name__}: {kind.why(layer)}'


def find(layer):
  """The kind of a layer, or None: containers and what only `generic` can treat."""
  kind = _KINDS.get(type(layer))
  return None if kind is None or kind.why(layer) else kind
