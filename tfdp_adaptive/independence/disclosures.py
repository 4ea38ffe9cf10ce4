# SPDX-License-Identifier: Apache-2.0
"""Finds possible private data in functions and models, and lists it in the statement.

A loss, penalty, constraint or learning-rate schedule may hold training data in an array of a
closure, default, global or attribute. These data would reach the weights without clipping and
noise. Objects and modules are searched for the names that the code uses. Numbers in the config of
a class of a library count as settings.
"""

import collections.abc
import dis
import enum
import functools
import hashlib
import inspect
import numbers
import sys
import types
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.independence import constants

_LIBRARIES = ('builtins', 'keras', 'keras_hub', 'numpy', 'tensorflow', 'tfdp_adaptive')
# Methods that Python calls where code does not name them.
_CALLS = ('call', '__call__', '__getattr__', '__getitem__', '__iter__', '__next__')
SETTINGS = 32  # More numbers, or digits of a text, than these are data.
_MOST = 10_000  # Objects that a search visits.
_PUBLIC = '_tfdp_public'  # On layers.
_STATE = 'adapt_mean', 'adapt_variance', 'bin_boundaries'  # Of layers that are adapted.
_LISTED = 8  # Numbers that a sentence lists.


class Captured(NamedTuple):
  """The objects that were found.

  Attributes:
    arrays: Arrays, tensors and scalars of NumPy or TensorFlow, bytes, texts of many digits,
      data sets, lookup tables.
    variables: Variables.
    numbers: Numbers of Python, booleans included.
    layers: Layers and models, whose weights have a history of their own.
  """

  arrays: List[Any]
  variables: List[Any]
  numbers: List[Any]
  layers: List[Any]


def find(*functions: Any, most: int = _MOST) -> Captured:
  """Returns the objects that functions, methods and callable objects refer to.

  Args:
    *functions: Them.
    most: The largest number of objects to visit.

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
    if len(seen) > most:
      raise errors.PrivacyError(
          'A function must refer to few objects, which are searched for private data and for '
          f'weights of private runs. Received: one that refers to more than {most}, such as a '
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
  if len(found.numbers) > SETTINGS:
    found.arrays.append(np.array(found.numbers))
  return found


def _is_number(one: object) -> bool:
  return isinstance(one, numbers.Number) and not isinstance(one, (np.generic, complex, enum.Enum))


def _is_data(one: object) -> bool:
  """Whether an object holds numbers in another form than a plain number of Python."""
  if isinstance(one, np.generic):
    return isinstance(one, (np.number, np.bool_))
  if isinstance(one, str):
    return sum(map(str.isdigit, one)) > SETTINGS
  if isinstance(one, type):
    return False
  return isinstance(one, (np.ndarray, tf.Tensor, tf.data.Dataset, bytes, bytearray, complex)) or (
      hasattr(type(one), '__array__') or hasattr(type(one), 'resource_handle'))


def shape(one: object) -> Tuple[int, ...]:
  """Returns the shape of an entry of `Captured.arrays`, without reading a data set."""
  if isinstance(one, (bytes, bytearray, str)):
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
  elif inspect.ismethod(one):  # `tf.function` holds the owner of a method by a weak reference.
    owner = getattr(one.__self__, 'weakrefself_target__', lambda: one.__self__)
    yield from _of_function(one.__func__, [owner()])
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
    yield getattr(one, '__wrapped__', None)  # A cache of results holds this function.
    calls = [getattr(one, name, None) for name in _CALLS]
    yield from (call for call in calls if inspect.ismethod(call) or hasattr(
        call, 'python_function'))  # `tf.function` made it.


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
             *(function.__globals__[name] for name in names & set(function.__globals__)),
             *(sys.modules[name] for name in _imported(function.__code__) & set(sys.modules))]
  for one in held:
    yield one
    if of_library(one if isinstance(one, (types.ModuleType, type)) else type(one)):
      continue
    kinds = [kind for kind in (one if isinstance(one, type) else type(one)).__mro__
             if not of_library(kind)]
    for name in names & set(getattr(one, '__dict__', ())).union(*map(vars, kinds)):
      yield getattr(one, name, None)
      # Methods of bases, too, which `super` finds.
      yield from (types.MethodType(vars(kind)[name], one) for kind in kinds
                  if inspect.isfunction(vars(kind).get(name)))


def _names(code: types.CodeType) -> Iterator[str]:
  """Returns the names that code uses, those written as texts for `getattr` among them."""
  yield from code.co_names
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      yield from _names(constant)
    elif isinstance(constant, str):
      yield constant


def _imported(code: types.CodeType) -> Set[str]:
  """Returns the modules that code imports when it runs."""
  inner = (_imported(one) for one in code.co_consts if isinstance(one, types.CodeType))
  return {one.argval for one in dis.get_instructions(code)
          if one.opname == 'IMPORT_NAME'}.union(*inner)


def is_own(one: object) -> bool:
  """Whether a function or object, or a function that it calls, is of no library."""
  return any(callable(part) and not compat.is_layer(part) and not of_library(part) for part in (
      one, type(one), *getattr(one, '__dict__', {}).values()))


def of_library(one: object) -> bool:
  """Whether a function, class or module comes with Keras, TensorFlow, NumPy or this library."""
  module = one.__name__ if isinstance(one, types.ModuleType) else (
      getattr(one, '__module__', None) or type(one).__module__)
  return str(module).split('.', maxsplit=1)[0] in _LIBRARIES


def check(model: compat.Model, held: constants.Held, population_size: Optional[int]) -> None:
  """Raises `PrivacyError` for a model that holds an array with a row for each record."""
  shapes = _shapes(model, held)
  if any(shape and shape[0] == population_size for shape in shapes):
    raise errors.PrivacyError(
        f'A layer holds an array with a row for each of the {population_size} records, so that '
        f'every gradient may depend on all of them. Received: {model.name}, with arrays {shapes} '
        'that are no weights. Give the layer public data of another length, or leave it out.')


def check_alone(augment: Callable[..., Any]) -> None:
  """Raises `PrivacyError` for a function of one example that holds arrays, perhaps of others."""
  found = find(augment)
  held = [v for layer in found.layers for v in layer.weights]  # Seeds are none of them.
  shapes = [tuple(one.shape) for one in (*found.variables, *held) if hasattr(one, 'assign')]
  shapes = [one for one in (*map(np.shape, found.arrays), *shapes) if one]
  if shapes:
    raise errors.PrivacyError(
        '`augment` must make a view of an example of this example alone. Received: a function that '
        f'holds arrays of shapes {shapes}, which may be other examples. Write settings as numbers '
        'of Python. If the arrays are public, make the views in a source of your own that is read '
        'anew, and say so: `plan.batches(source, changing="how")`.')


def sentences(
    model: compat.Model, held: constants.Held, numbers: Sequence[float] = (),
    covered: Callable[[Any], bool] = lambda layer: False) -> Iterator[str]:
  """Yields sentences for the statement about all that may have been computed from private data.

  Args:
    model: A model that was validated.
    held: What it was seen to hold, see `validation.seen`.
    numbers: Plain numbers of its loss, penalties, constraints and schedule.
    covered: Whether the cost of a layer's adaptation is in the ledger.
  """
  yield from _about('Functions that are not of Keras hold', numbers)
  shapes = _shapes(model, held)
  if held.tables:
    yield f'Layers read {held.tables} lookup tables that are no weights; they are taken as public.'
  if held.unseen:
    yield (f'Layers call operations {list(held.unseen)}: the data that their Python code or files '
           'bring cannot be seen, and are taken as public.')
  if shapes:
    yield (f'Layers hold arrays of shapes {shapes} that are no weights; they are taken as public.')
  layers = compat.all_layers(model)
  yield from _about('Functions that are not of Keras hold', _numbers_of(*(
      layer.function for layer in layers if hasattr(layer, 'function'))))  # `Lambda`s.
  try:
    used = _numbers_of(*(
        layer.call for layer in layers if hasattr(layer, 'call') and is_own(layer.call)))
    # Most booleans are defaults such as `training=False`.
    yield from _about('Layers that are not of Keras hold', [
        one for one in used if not isinstance(one, bool)])
  except errors.PrivacyError:
    yield (f'Layers that are not of Keras refer to more than {_MOST} objects. If these were '
           'computed from private data, no epsilon covers them.')
  # Such as the logarithm of the labels' frequencies, as a bias.
  yield from _about('Weights begin with', list({
      float(one.value) for layer in layers for one in compat.initializers(layer)
      if type(one).__name__ == 'Constant' and np.ndim(one.value) == 0} - {0, 1}))
  yield from _adapted(layers, covered)


def label(layer: compat.Layer) -> str:
  """Returns the name in the ledger of a layer's private adaptation to its present state."""
  return f'estimates.adapt({layer.name}, {digest_of(layer)})'


def say_public(layer: compat.Layer, source: str) -> None:
  """Records that a layer was adapted to public data."""
  object.__setattr__(layer, _PUBLIC, (source, digest_of(layer)))


def _shapes(model: compat.Model, held: constants.Held) -> List[Any]:
  """Returns the shapes of arrays that are no weights, in the graph or in initializers."""
  return held.shapes + [
      np.shape(value) for layer in compat.all_layers(model)
      for one in compat.initializers(layer)
      for value in [*find(one).arrays, *getattr(one, '__dict__', {}).values()]
      if np.ndim(value)]


def _numbers_of(*functions: Any) -> List[Any]:
  """Returns the single numbers that functions refer to, arrays without axes among them."""
  found = find(*functions)
  return found.numbers + [np.asarray(one).item() for one in found.arrays
                          if shape(one) == () and np.asarray(one).dtype.kind in 'fiub']


def _about(holders: str, numbers: Sequence[float]) -> Iterator[str]:
  """Yields a sentence about numbers that may be settings or may be computed from data."""
  distinct = sorted(set(numbers))
  if distinct:
    more = len(distinct) - _LISTED
    yield (f'{holders} the numbers {distinct[:_LISTED]}'
           f'{f" and {more} more" if more > 0 else ""}. If these were computed from private data, '
           'no epsilon covers them.')


def _adapted(layers: Sequence[Any], covered: Callable[[Any], bool]) -> Iterator[str]:
  """Warns of adapted layers whose cost is not in the ledger. Yields these, and public ones."""
  inner = [getattr(layer, '_lookup_layer', None) for layer in layers]
  public = {id(layer): source for layer in layers for source, digest in [
      getattr(layer, _PUBLIC, ('', None))] if digest == digest_of(layer)}  # Not adapted again.
  unknown = [layer.name for layer in layers
             if all(layer is not one for one in inner) and _is_adapted(layer)
             and id(layer) not in public and not covered(layer)]
  for layer in layers:
    if id(layer) in public:
      yield (f'{layer.name} was adapted to data that are public in the words of whoever '
             f'trained the model: {public[id(layer)]!r}.')
  if unknown:
    sentence = (
        f'NOT COVERED IF PRIVATE: layers {unknown} hold a vocabulary or exact statistics. If '
        'these come from private data, no epsilon covers them.')
    yield sentence
    errors.caution(
        f'{sentence} Use `tfdp.estimates.adapt(layer, data, ...)`, whose cost is in the ledger. '
        'If they are public, say so: `tfdp.estimates.adapt(layer, data, '
        "public='where the data come from')`.")


def _is_adapted(layer: compat.Layer) -> bool:
  """Whether a layer holds something that it may have computed from data."""
  if not hasattr(layer, 'adapt'):
    return False
  inner = getattr(layer, '_lookup_layer', layer)
  if hasattr(inner, 'get_vocabulary'):
    return getattr(inner, 'input_vocabulary', None) is None and bool(_words(inner))
  if hasattr(layer, 'num_bins'):
    return layer.num_bins is not None and bool(len(layer.bin_boundaries or ()))
  mean, variance = (getattr(layer, name, None) for name in ('adapt_mean', 'adapt_variance'))
  return mean is not None and bool(
      np.any(np.asarray(mean) != 0) or np.any(np.asarray(variance) != 1))


def digest_of(layer: compat.Layer) -> str:
  """Returns a digest of what a layer has computed from data, which another `adapt` changes."""
  inner = getattr(layer, '_lookup_layer', layer)
  state = _words(inner) if hasattr(inner, 'get_vocabulary') else [
      np.asarray(getattr(layer, name)).tolist() for name in _STATE
      if getattr(layer, name, None) is not None]
  return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def _words(layer: compat.Layer) -> List[Any]:
  try:
    return list(layer.get_vocabulary(include_special_tokens=False))
  except (AttributeError, RuntimeError, ValueError):  # It has none yet.
    return []
