# SPDX-License-Identifier: Apache-2.0
"""Describes the parts of a run that must be equal when it resumes.

A run's noise, cohorts and accounting belong to one plan, one rule and one order of
clients: groups and fixed orders go by a client's POSITION. So all of it is written down
with the state. No address of an object may get in, since it is new in every process.
"""

import functools
import math
import types
from typing import Any, Callable, Dict, Iterable, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive.batches import sources

from . import engines

Json = Any  # Numbers, texts, lists and dicts.
_OWN = __name__.partition('.')[0]


class NotDescribableError(TypeError):
  """Something has no description that would be the same in another process."""


def of_clients(client_ids: Iterable[engines.Client]) -> Dict[str, Any]:
  """Returns digests of the number, identity and order of clients."""
  ids = np.array([_client(client_id) for client_id in client_ids], object)
  return {'count': len(ids), 'who': sources.fingerprint(np.sort(ids)),
          'order': sources.fingerprint(ids)}


def of_data(train_data: engines.ClientData) -> Dict[str, Any]:
  """Returns the form of the clients' data, a digest of some of it, and what a round uses of it.

  Data of another class than `Users` may differ whenever it is read: it has no digest.
  """
  spec = getattr(train_data, 'element_type_structure', None)
  digest = getattr(train_data, 'sample_digest', lambda: None)
  return {'element': None if spec is None else [str(leaf) for leaf in tf.nest.flatten(spec)],
          'sample': digest(),
          **{name: describe(value, name)
             for name, value in getattr(train_data, 'settings', {}).items()}}


def describe(value: object, name: str) -> Json:
  """Returns `value` as JSON that is equal for equal values, also in another process.

  Objects are described by their `get_config()` or their fields, functions by
  their name and what they hold (their code may change), arrays by a digest.

  Args:
    value: A number, a text, a nest, a function, a Keras object, a rule ...
    name: The name of the argument, for the error.

  Raises:
    NotDescribableError: There is a lambda, or an object of another kind, in it.
  """
  return _describe(value, name, ())


def _describe(value: Any, name: str, above: Tuple[int, ...]) -> Json:
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)  # NaN is not equal to itself.
  if value is None or isinstance(value, (bool, int, float, str)):
    return value
  if id(value) in above:
    return 'itself'
  inner = lambda child: _describe(child, name, above + (id(value),))
  kind = f'{type(value).__module__}.{type(value).__qualname__}'
  if isinstance(value, (np.generic, np.ndarray)) or tf.is_tensor(value):
    return _array(value, name)
  if isinstance(value, (tf.DType, tf.TensorSpec, np.dtype)):
    return str(value)
  if isinstance(value, tuple) and hasattr(value, '_fields'):
    # `cautions` are text for people, and no part of what a rule does.
    fields: Any = value
    return {'kind': kind, **{field: inner(child) for field, child in fields._asdict().items()
                             if field != 'cautions'}}
  if isinstance(value, dict) or hasattr(value, 'items'):
    return {str(key): inner(child) for key, child in value.items()}
  if isinstance(value, (list, tuple)):
    return [inner(child) for child in value]
  if isinstance(value, (type, types.BuiltinFunctionType)):
    return f'{value.__module__}.{value.__qualname__}'
  if hasattr(value, 'get_config'):
    # Keras numbers the names of optimizers in the order in which they are made.
    return {'kind': kind, 'config': inner({
        key: child for key, child in value.get_config().items() if key != 'name'})}
  if hasattr(value, 'python_function'):  # A `tf.function`.
    return inner(value.python_function)
  if isinstance(value, functools.partial):
    return [inner(value.func), inner(value.args), inner(value.keywords)]
  if isinstance(value, types.MethodType):
    return [inner(value.__self__), value.__name__]
  if isinstance(value, types.FunctionType):
    return _function(value, name, inner)
  if hasattr(value, '__dict__') and not isinstance(value, types.ModuleType):
    return {'kind': kind, **{key: inner(child) for key, child in sorted(vars(value).items())}}
  raise NotDescribableError(_refusal(name, value))


def _function(function: Any, name: str, inner: Callable[[Any], Json]) -> Json:
  """Returns a function's name and the values it holds. Other libraries' lambdas have no name."""
  if '<lambda>' in function.__qualname__ and function.__module__.partition('.')[0] != _OWN:
    raise NotDescribableError(_refusal(name, function))
  captured = dict(zip(function.__code__.co_freevars,
                      (cell.cell_contents for cell in function.__closure__ or ())))
  return {'function': f'{function.__module__}.{function.__qualname__}',
          **{key: inner(child) for key, child in captured.items()},
          **({'defaults': inner(function.__defaults__)} if function.__defaults__ else {})}


def _array(value: Any, name: str) -> Json:
  if not hasattr(value, 'numpy') and tf.is_tensor(value):
    raise NotDescribableError(_refusal(name, value))
  array = np.asarray(value)
  if array.size == 1 and array.dtype.kind in 'biuf':
    return array.item()
  return {'dtype': str(array.dtype), 'shape': list(array.shape),
          'digest': sources.fingerprint(array)}


def _client(client_id: engines.Client) -> str:
  value = client_id.item() if isinstance(client_id, np.generic) else client_id
  if not isinstance(value, (str, int, bytes)):
    raise NotDescribableError(
        '`client_ids` must be texts or whole numbers, so that a saved run knows its clients '
        f'again. Received: {client_id!r}.')
  return f'{type(value).__name__}:{value!r}'


def _refusal(name: str, value: object) -> str:
  return (f'`{name}` must be something that a saved run knows again in another process: a number, '
          'a Keras schedule or another object with `get_config()`, a TFF optimizer, or a function '
          'that has a name of its own (`def`, no lambda). Give such a one, or leave `out` out. '
          f'Received: {value!r}.')
