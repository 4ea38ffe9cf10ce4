# SPDX-License-Identifier: Apache-2.0
"""The registry of layers that the book-keeping engine supports.

A layer is known by its class, or by a class above it from which it inherits all that
computes; a subclass that overrides more may compute something else. What is not known
goes through `generic`, one example at a time.

    @registry.register(MyScale)
    def my_scale(layer, call, cotangents):
      yield layer.gamma, factors.explicit(tf.reduce_sum(cotangents * call.inputs, axis=1))

The function gets the layer, one recorded call (`inputs`, its first argument;
`args`; `kwargs`; `outputs`) and the gradients of the loss by the tap, shaped like
it; it yields a factor per trainable variable of the layer. Examples lie along the
first axis of everything, and no example may look at another.
"""

import contextlib
import importlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import compat

# How an error names the way out, where a model can be clipped as a whole.
WHOLE = "performance=tfdp.Performance('materialized')"


class Unsupported(ValueError):
  """Raised if the book-keeping engine cannot clip a model. The message gives the reason."""


class Call(NamedTuple):
  """A recorded call of a layer."""

  args: Tuple[Any, ...]
  kwargs: dict
  outputs: Any  # Outputs of the layer.
  saved: Any = ()  # Values that the `tap` of a kind of layers keeps.
  batched: Tuple[bool, ...] = ()  # Per flat argument: is the batch its first axis?
  times: Any = 1  # Rows of the first axis per record (users, TimeDistributed).

  @property
  def inputs(self) -> Any:
    return self.args[0]


Factors = Iterable[Tuple[compat.Variable, Any]]  # Variables, and the `Factor` of each.
Gradients = Callable[..., Factors]  # `(layer, Call, cotangents of its taps) -> Factors`.


class Kind(NamedTuple):
  """The engine's treatment of a class of layers.

  Attributes:
    gradients: `(layer, call, cotangents) -> (variable, factor), ...`.
    tap: `(layer, function, tape, args, kwargs) -> (outputs, taps, saved)`: runs the
      layer's own `function(*args, **kwargs)`, and names the tensors whose
      gradients it needs, after `tape.watch(tensor)`. The result must be the function's.
    whole: Whether `gradients` covers all variables of the layers inside, too.
    why: `layer -> str`: why this instance must go through `generic`, or ''.
    folds: Whether the layer joins the first two axes of its input before it calls
      the layers inside (TimeDistributed on Keras 2).
  """

  gradients: Gradients
  tap: Callable[..., Any]
  whole: bool = False
  why: Callable[[Any], str] = lambda layer: ''
  folds: bool = False


_KINDS: Dict[type, Any] = {}
# Libraries whose layers have a file of their own here, read when one of them is met.
_LIBRARIES = {'keras_hub': 'tfdp_adaptive.clipping.layers.keras_hub'}
# Attributes that a subclass may define without changing what it computes from its weights.
_HARMLESS = {
    '__init__', '__module__', '__qualname__', '__doc__', '__annotations__', '__firstlineno__',
    '__static_attributes__', '__abstractmethods__', '_abc_impl', '_api_export_path',
    '_api_export_symbol_id', 'get_config', 'from_config', 'compute_output_shape',
    'compute_output_spec'}


def at_output(
    layer: compat.Layer, function: Callable[..., Any], tape: tf.GradientTape, args: Tuple[Any, ...],
    kwargs: Dict[str, Any]) -> Tuple[Any, Any, Any]:
  """Taps the layer's output."""
  del layer
  outputs = function(*args, **kwargs)
  watched = tensors(outputs)
  tape.watch(watched)
  return outputs, outputs if len(watched) == len(tf.nest.flatten(outputs)) else watched, ()


def tensors(nest: Any) -> List[tf.Tensor]:
  """Returns the flat tensors of a layer's output, which may contain None."""
  return [t for t in tf.nest.flatten(nest) if tf.is_tensor(t)]


def at_activation(
    layer: compat.Layer, function: Callable[..., Any], tape: tf.GradientTape, args: Tuple[Any, ...],
    kwargs: Dict[str, Any]) -> Tuple[Any, Any, Any]:
  """Taps the input of the layer's `activation`."""
  taps, activation = [], layer.activation
  if activation is None:
    return at_output(layer, function, tape, args, kwargs)

  def tapped(x: tf.Tensor) -> tf.Tensor:
    tape.watch(x)
    taps.append(x)
    return activation(x)

  with swapped(layer, activation=tapped):
    outputs = function(*args, **kwargs)
  tap, = taps
  return outputs, tap, ()


@contextlib.contextmanager
def swapped(owner: Any, **attributes: Any) -> Iterator[None]:
  """Replaces attributes of an object in a `with` block, and restores them afterwards."""
  own = vars(owner)
  before = {name: own[name] for name in attributes if name in own}
  own.update(attributes)
  try:
    yield
  finally:
    for name in attributes:
      del own[name]
    own.update(before)


def register(
    *classes: type, tap: Callable[..., Tuple[Any, Any, Any]] = at_output, whole: bool = False,
    why: Callable[[compat.Layer], str] = lambda layer: '',
    folds: bool = False) -> Callable[[Gradients], Gradients]:
  """Decorates the `gradients` function of layers of exactly these `classes`."""

  def decorate(gradients: Gradients) -> Gradients:
    for layer_class in classes:
      _KINDS[layer_class] = Kind(gradients, tap, whole, why, folds)
    return gradients

  return decorate


def why_unknown(layer: compat.Layer) -> str:
  """Why `find` has no kind for a layer that has one of its own."""
  kind = _kind(type(layer))
  if kind is None:
    return f'{type(layer).__name__} is not registered, see tfdp.clipping.register'
  return f'not known for {type(layer).__name__}: {kind.why(layer)}'


def find(layer: compat.Layer) -> Optional[Kind]:
  """Returns the kind of a layer; None for containers and layers for `generic`."""
  kind = _kind(type(layer))
  return None if kind is None or kind.why(layer) else kind


def _kind(layer_class: type) -> Optional[Kind]:
  """Returns the entry of a class, or of its next base if all classes between are `_HARMLESS`."""
  library = layer_class.__module__.partition('.')[0]
  if library in _LIBRARIES:
    importlib.import_module(_LIBRARIES[library])
  for ancestor in layer_class.__mro__:
    if ancestor in _KINDS:
      return _KINDS[ancestor]
    if not set(vars(ancestor)) <= _HARMLESS:
      return None
  return None
