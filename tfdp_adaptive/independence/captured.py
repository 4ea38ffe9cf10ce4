# SPDX-License-Identifier: Apache-2.0
"""Finds the numbers that functions in Python bring along: closures, defaults, globals, attributes.

A loss, penalty, constraint or learning-rate schedule that brings an array may bring the training
data, which then reach the weights without clipping and noise. Objects and modules are followed by
the names that the code uses. Numbers that a library's own class has from its config are settings.
"""

import functools
import inspect
import types
from typing import Any, Iterator, List, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat

_LIBRARIES = ('builtins', 'keras', 'keras_hub', 'numpy', 'tensorflow', 'tfdp_adaptive')
_CALLS = ('call', '__call__')
_SETTINGS = 32  # More numbers than these are data.


class Captured(NamedTuple):
  """The objects that were found.

  Attributes:
    arrays: Arrays, tensors and scalars of NumPy or TensorFlow.
    variables: Variables.
    numbers: Floating-point numbers of Python.
    layers: Layers and models, whose weights have a history of their own.
  """

  arrays: List[Any]
  variables: List[Any]
  numbers: List[float]
  layers: List[Any]


def find(*functions: Any) -> Captured:
  """Returns the objects that functions, methods and callable objects refer to.

  Examples:
    >>> mean, rate = np.float64(0.3), 0.5
    >>> found = find(lambda w: rate * (w - mean) ** 2)
    >>> len(found.arrays), found.numbers
    (1, [0.5])
  """
  found, waiting, seen = Captured([], [], [], []), list(functions), {}
  while waiting:
    one = waiting.pop()
    if id(one) in seen:
      continue
    seen[id(one)] = one  # Kept, so that no other object gets its id.
    if compat.is_variable(one):
      found.variables.append(one)
    elif isinstance(one, (np.ndarray, np.floating, tf.Tensor)) or (
        hasattr(type(one), '__array__') and not isinstance(one, (np.generic, type))):
      found.arrays.append(one)
    elif compat.is_layer(one):
      found.layers.append(one)
    elif isinstance(one, float):
      found.numbers.append(one)
    else:
      waiting.extend(_brought(one))
  if len(found.numbers) > _SETTINGS:
    found.arrays.append(np.array(found.numbers))
  return found


def _brought(one: Any) -> Iterator[Any]:
  """Returns the objects that a non-numeric object refers to."""
  if isinstance(one, dict):
    yield from one.values()
  elif isinstance(one, (list, tuple, set, frozenset)):
    yield from one
  elif isinstance(one, functools.partial):
    yield from (one.func, one.args, one.keywords)
  elif inspect.ismethod(one):
    yield from _of_function(one.__func__, [one.__self__])
  elif inspect.isfunction(one):
    yield from _of_function(one, [])
  elif isinstance(one, (type, types.ModuleType)):
    return
  elif of_library(type(one)):
    yield from (value for value in getattr(one, '__dict__', {}).values() if callable(value))
  else:
    yield from (getattr(one, name) for name in _CALLS if inspect.ismethod(getattr(one, name, None)))


def _of_function(function: Any, held: List[Any]) -> Iterator[Any]:
  """Returns the objects that a function closes over or uses by name."""
  names = set(_names(function.__code__))
  for cell in function.__closure__ or ():
    try:
      held.append(cell.cell_contents)
    except ValueError:  # It is empty so far.
      continue
  if not of_library(function):
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(),
             *(function.__globals__[name] for name in names & set(function.__globals__))]
  for one in held:
    yield one
    known = set(getattr(one, '__dict__', ())).union(
        *(vars(kind) for kind in type(one).__mro__ if not of_library(kind)))
    if not of_library(one if isinstance(one, types.ModuleType) else type(one)):
      yield from (getattr(one, name, None) for name in names & known)


def _names(code: Any) -> Iterator[str]:
  yield from code.co_names
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      yield from _names(constant)


def is_own(one: Any) -> bool:
  """Whether a function or object, or a function that it calls, is of no library."""
  return any(callable(part) and not compat.is_layer(part) and not of_library(part) for part in (
      one, type(one), *getattr(one, '__dict__', {}).values()))


def of_library(one: Any) -> bool:
  """Whether a function, class or module comes with Keras, TensorFlow, NumPy or this library."""
  module = one.__name__ if isinstance(one, types.ModuleType) else (
      getattr(one, '__module__', None) or type(one).__module__)
  return str(module).split('.', maxsplit=1)[0] in _LIBRARIES
