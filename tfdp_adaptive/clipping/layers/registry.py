# SPDX-License-Identifier: Apache-2.0
"""The registry of layers that the book-keeping engine supports.

A layer is known by its class, or by a base class from which it inherits all of its computation. A
subclass that overrides more may compute something else. Other layers go through `generic`, one
example at a time.

    @registry.register(MyScale)
    def my_scale(layer, call, cotangents):
      yield layer.gamma, factors.explicit(tf.reduce_sum(cotangents * call.inputs, axis=1))

The function gets the layer, one recorded `Call` and the gradients of the loss with respect to the
call's taps, shaped like them. It yields a factor per trainable variable of the layer. Examples lie
along the first axis of everything, and no example may depend on another.
"""

from __future__ import annotations

import importlib
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import protocol

# Part of an error: how to clip a model as a whole instead.
WHOLE = "performance=tfdp.Performance('materialized')"


class Unsupported(ValueError):
  """Raised if the book-keeping engine cannot clip a model. The message gives the reason."""


class Call(NamedTuple):
  """A recorded call of a layer.

  Attributes:
    args: Arguments of the call.
    kwargs: Keyword arguments of the call.
    outputs: Outputs of the layer.
    taps: Nest of the tensors whose gradients the factors need; a tape watches them.
    saved: Values that the `tap` of the layer's kind saves for its `gradients`.
    batched: For each flat argument, whether the batch is its first axis.
    times: Rows of the first axis per record (users, TimeDistributed).
    owner: The layer with its kind.
  """

  args: Tuple[trees.Tree, ...]
  kwargs: Dict[str, trees.Tree]
  outputs: trees.Tree = None
  taps: trees.Tree = ()
  saved: Any = ()
  batched: Tuple[bool, ...] = ()
  times: Any = 1
  owner: Owner = None  # type: ignore[assignment]

  @property
  def inputs(self) -> trees.Tree:
    return self.args[0]

  def argument(self, position: int, name: str, default: trees.Tree = None) -> trees.Tree:
    """Returns an argument that may be positional or a keyword."""
    return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

  def of_rows(self, rows: int) -> Call:
    """Returns the call with `batched`, where the batch has as many rows as nothing else."""
    return self._replace(batched=tuple(
        bool(tf.is_tensor(t) and t.shape.rank and t.shape[0] == rows)
        for t in tf.nest.flatten((self.args, self.kwargs))))


Factors = Iterable[Tuple[compat.Variable, protocol.Factor]]
# `(layer, call, gradients by its taps) -> ` the factor of each variable.
Gradients = Callable[[compat.Layer, Call, Any], Factors]
# `(layer, function, call, tape) -> call` with outputs, taps and what is saved.
Tap = Callable[[compat.Layer, Callable[..., trees.Tree], Call, tf.GradientTape], Call]


class Kind(NamedTuple):
  """The engine's treatment of a class of layers.

  Attributes:
    gradients: Yields `(variable, factor)` for each trainable variable; see `Gradients`.
    tap: Returns what the layer's own `function(*call.args, **call.kwargs)` returns, mostly by
      running it, and calls `tape.watch` on the taps; see `Tap`.
    whole: Whether `gradients` covers all variables of the layers inside, too.
    why: `layer -> ` the reason why this instance must go through `generic`, or ''.
    folds: Whether the layer joins the first two axes of its input before it calls
      the layers inside (TimeDistributed on Keras 2).
  """

  gradients: Gradients
  tap: Tap
  whole: bool = False
  why: Callable[[compat.Layer], str] = lambda layer: ''
  folds: bool = False


class Owner(NamedTuple):
  """A layer that owns trainable variables, and its kind."""

  layer: compat.Layer
  kind: Kind
  variables: Tuple[compat.Variable, ...]  # Trainable variables that `kind.gradients` covers.


_KINDS: Dict[type, Kind] = {}
# Libraries whose layers have a file here, imported when one of their layers is found.
_LIBRARIES = {'keras_hub': 'tfdp_adaptive.clipping.layers.keras_hub'}
# Attributes that a subclass may define without changing its computation.
_HARMLESS = {
    '__init__', '__module__', '__qualname__', '__doc__', '__annotations__', '__firstlineno__',
    '__static_attributes__', '__abstractmethods__', '_abc_impl', '_api_export_path',
    '_api_export_symbol_id', 'get_config', 'from_config', 'compute_output_shape',
    'compute_output_spec'}


def at_output(
    layer: compat.Layer, function: Callable[..., trees.Tree], call: Call,
    tape: tf.GradientTape) -> Call:
  """Taps the layer's output."""
  del layer
  outputs = function(*call.args, **call.kwargs)
  watched = tensors(outputs)
  tape.watch(watched)
  complete = len(watched) == len(tf.nest.flatten(outputs))
  return call._replace(outputs=outputs, taps=outputs if complete else watched)


def tensors(nest: trees.Tree) -> List[tf.Tensor]:
  """Returns the flat tensors of a layer's output, which may contain None."""
  return [t for t in tf.nest.flatten(nest) if tf.is_tensor(t)]


def at_activation(
    layer: compat.Layer, function: Callable[..., trees.Tree], call: Call,
    tape: tf.GradientTape) -> Call:
  """Taps the input of the layer's `activation`."""
  taps, activation = [], layer.activation
  if activation is None:
    return at_output(layer, function, call, tape)

  def tapped(x: tf.Tensor) -> tf.Tensor:
    tape.watch(x)
    taps.append(x)
    return activation(x)

  with compat.swapped(layer, activation=tapped):
    outputs = function(*call.args, **call.kwargs)
  tap, = taps
  return call._replace(outputs=outputs, taps=tap)


def register(
    *classes: type, tap: Tap = at_output, whole: bool = False,
    why: Callable[[compat.Layer], str] = lambda layer: '',
    folds: bool = False) -> Callable[[Gradients], Gradients]:
  """Decorates the function `gradients` for layers whose class is one of `classes`."""

  def decorate(gradients: Gradients) -> Gradients:
    for layer_class in classes:
      _KINDS[layer_class] = Kind(gradients, tap, whole, why, folds)
    return gradients

  return decorate


def why_unknown(layer: compat.Layer) -> str:
  """Returns why `find` has no kind for a layer."""
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
