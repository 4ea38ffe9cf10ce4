# SPDX-License-Identifier: Apache-2.0
"""Finds the numbers that functions in Python bring along: closures, defaults, globals, attributes.

A loss, penalty, constraint or learning-rate schedule that brings an array may bring the training
data, which then reach the weights without clipping and noise. Objects and modules are followed by
the names that the code uses. Numbers that a library's own class has from its config are settings.
"""

import collections.abc
import enum
import functools
import inspect
import numbers
import types
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors

_LIBRARIES = ('builtins', 'keras', 'keras_hub', 'numpy', 'tensorflow', 'tfdp_adaptive')
_CALLS = ('call', '__call__')
_SETTINGS = 32  # More numbers than these are data.
_MOST = 10_000  # Objects that a search visits.


class Captured(NamedTuple):
  """The objects that were found.

  Attributes:
    arrays: Arrays, tensors and scalars of NumPy or TensorFlow, bytes, data sets, lookup tables.
    variables: Variables.
    numbers: Numbers of Python, booleans included.
    layers: Layers and models, whose weights have a history of their own.
  """

  arrays: List[Any]
  variables: List[Any]
  numbers: List[Any]
  layers: List[Any]


def find(*functions: Any) -> Captured:
  """Returns the objects that functions, methods and callable objects refer to.

  Examples:
    >>> mean, rate = np.float64(0.3), 0.5
    >>> found = find(lambda w: rate * (w - mean) ** 2)
    >>> len(found.arrays), found.numbers
    (1, [0.5])
  """
  found, waiting = Captured([], [], [], []), list(functions)
  seen: Dict[Any, Any] = {}
  while waiting:
    one = waiting.pop()
    # Python makes another object whenever a method is looked up.
    key = (id(one.__self__), id(one.__func__)) if inspect.ismethod(one) else id(one)
    if key in seen:
      continue
    if len(seen) > _MOST:
      raise errors.PrivacyError(
          'A loss, penalty, constraint or schedule must refer to few objects, which are searched '
          f'for private data. Received: one that refers to more than {_MOST}, such as a '
          f'{type(one).__name__}. Write it as a function of its arguments and plain numbers.')
    seen[key] = one  # Kept, so that no other object gets its id.
    if compat.is_variable(one):
      found.variables.append(one)
    elif _is_data(one):
      found.arrays.append(one)
    elif compat.is_layer(one) and not isinstance(one, compat.keras.metrics.Metric):
      found.layers.append(one)
    elif _is_number(one):
      found.numbers.append(one)
    elif _is_container(one):  # Equal numbers are one object, and many data.
      found.numbers.extend(part for part in one if _is_number(part))
      waiting.extend(part for part in one if not _is_number(part))
    else:
      waiting.extend(_brought(one))
  if len(found.numbers) > _SETTINGS:
    found.arrays.append(np.array(found.numbers))
  return found


def _is_number(one: object) -> bool:
  return isinstance(one, numbers.Number) and not isinstance(one, (np.generic, complex, enum.Enum))


def _is_data(one: object) -> bool:
  """Whether an object holds numbers in another form than a plain number of Python."""
  if isinstance(one, np.generic):
    return isinstance(one, (np.number, np.bool_))
  if isinstance(one, type):
    return False
  return isinstance(one, (np.ndarray, tf.Tensor, tf.data.Dataset, bytes, bytearray, complex)) or (
      hasattr(type(one), '__array__') or hasattr(type(one), 'resource_handle'))


def shape(one: object) -> Tuple[int, ...]:
  """Returns the shape of an entry of `Captured.arrays`, without reading a data set."""
  if isinstance(one, (bytes, bytearray)):
    return (len(one),)
  return tuple(getattr(one, 'shape', None) or ())


def _is_container(one: object) -> bool:
  """Whether an object is a list, set or the like of others."""
  return isinstance(one, (collections.abc.Sequence, collections.abc.Set,
                          collections.abc.ValuesView)) and not isinstance(one, (str, range))


def _brought(one: object) -> Iterator[Any]:
  """Returns the objects that a non-numeric object refers to."""
  if isinstance(one, collections.abc.Mapping):
    yield from (one.keys(), one.values())
  elif isinstance(one, functools.partial):
    yield from (one.func, one.args, one.keywords)
  elif inspect.ismethod(one):
    yield from _of_function(one.__func__, [one.__self__])
  elif inspect.isfunction(one):
    yield from _of_function(one, [])
  elif isinstance(one, (type, types.ModuleType)):
    return
  elif of_library(type(one)):
    held = [value for value in getattr(one, '__dict__', {}).values() if callable(value)]
    yield from held
    if not all(map(of_library, held)):  # Keras keeps the other arguments of a function, too.
      yield getattr(one, '_fn_kwargs', None)
  else:
    yield from (getattr(one, name) for name in _CALLS if inspect.ismethod(getattr(one, name, None)))


def _of_function(function: Any, held: List[Any]) -> Iterator[Any]:
  """Returns the objects that a function closes over or uses by name."""
  names = set(_names(function.__code__))
  for cell in function.__closure__ or ():
    try:
      inner = cell.cell_contents
    except ValueError:  # It is empty so far.
      continue
    if callable(inner) or not of_library(function):
      held.append(inner)
  if not of_library(function):
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(),
             *(function.__globals__[name] for name in names & set(function.__globals__))]
  for one in held:
    yield one
    if of_library(one if isinstance(one, types.ModuleType) else type(one)):
      continue
    kinds = [kind for kind in type(one).__mro__ if not of_library(kind)]
    for name in names & set(getattr(one, '__dict__', ())).union(*map(vars, kinds)):
      yield getattr(one, name, None)
      # Methods of bases, too, which `super` finds.
      yield from (types.MethodType(vars(kind)[name], one) for kind in kinds
                  if inspect.isfunction(vars(kind).get(name)))


def _names(code: types.CodeType) -> Iterator[str]:
  yield from code.co_names
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      yield from _names(constant)


def is_own(one: object) -> bool:
  """Whether a function or object, or a function that it calls, is of no library."""
  return any(callable(part) and not compat.is_layer(part) and not of_library(part) for part in (
      one, type(one), *getattr(one, '__dict__', {}).values()))


def of_library(one: object) -> bool:
  """Whether a function, class or module comes with Keras, TensorFlow, NumPy or this library."""
  module = one.__name__ if isinstance(one, types.ModuleType) else (
      getattr(one, '__module__', None) or type(one).__module__)
  return str(module).split('.', maxsplit=1)[0] in _LIBRARIES
