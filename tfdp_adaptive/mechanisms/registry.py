# SPDX-License-Identifier: Apache-2.0
"""Every noise mechanism by name: its class, its designs, its JSON, and the cache on disk.

Files name a mechanism by its class, the command line by its designs; both are
looked up here, and `tfdp_adaptive.noise` refuses to be imported while a kind
has no noise stream.

Only numbers are stored, never a sensitivity: whatever a file says, the
accountant sees the sensitivity of the C that runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple, TypeVar, Union
import warnings

import numpy as np
import numpy.typing as npt

from tfdp_adaptive import checks
from tfdp_adaptive import errors
from tfdp_adaptive import gate
from tfdp_adaptive import runfolder

_Class = TypeVar('_Class', bound=type)
KINDS: Dict[str, Any] = {}  # Class name -> a class of `interface.Mechanism`.
DESIGNS: Dict[str, Tuple[Any, Design]] = {}  # Keys are names on the command line.


class Design(NamedTuple):
  """The name of a mechanism in `tfdp mechanism`: `NAME` or `NAME:SIZE`.

  Attributes:
    name: As typed on the command line.
    size: The constructor's argument that SIZE is; None for a mechanism without.
    arguments: Other arguments of the constructor, and their values.
  """

  name: str
  size: Optional[str] = None
  arguments: Tuple[Tuple[str, Any], ...] = ()


def register(*designs: Design) -> Callable[[_Class], _Class]:
  """Returns a decorator that makes a `Mechanism` known by its class name and by `designs`."""

  def decorate(kind: _Class) -> _Class:
    taken = [name for name in (design.name for design in designs) if name in DESIGNS]
    if not designs or taken or kind.__name__ in KINDS:
      raise ValueError('A mechanism must be registered once, with at least one design whose name '
                       f'is new. Received: {kind.__name__} with {designs}. Known: '
                       f'{tuple(KINDS)} with {tuple(DESIGNS)}.')
    KINDS[kind.__name__] = kind
    DESIGNS.update({design.name: (kind, design) for design in designs})
    return kind

  return decorate


def design(
    name: str, steps: int, size: Optional[int] = None, **options: Any) -> Any:
  """Returns the mechanism of a name in `DESIGNS`, with the options that its constructor takes."""
  kind, entry = DESIGNS[name]
  if entry.size is not None:
    options[entry.size] = size
  return kind.for_run(steps=steps, **dict(entry.arguments), **options)


FORMAT = 'tfdp_adaptive.mechanism'
VERSION = 1  # Version of the file format and of the cached designs.
CACHE_SWITCH = 'TFDP_MECHANISM_CACHE'  # '0' or 'off': no cache; a path: that folder.


def to_json(
    mechanism: Any, arrays: Optional[Mapping[str, np.ndarray]] = None) -> str:
  """Returns kind, constructor arguments, dtype, unrounded numbers and their checksum, as text."""
  arrays = mechanism.rounded('float64').arrays if arrays is None else arrays
  return json.dumps({
      'format': FORMAT, 'version': VERSION, 'kind': type(mechanism).__name__,
      'config': mechanism.get_config(), 'dtype': mechanism.dtype, **_numbers(arrays)})


def from_json(text: str) -> Any:
  """Returns the mechanism `to_json` described, with the same numbers.

  Raises:
    ValueError: If the text is not such a description or has a newer version, or if its numbers are
      damaged or do not have maximal column norm one.
  """
  content = checks.read_json(text, 'a mechanism', FORMAT, VERSION)
  if 'arrays' not in content:
    raise ValueError('The JSON of a mechanism must hold its numbers. Received: no `arrays`. '
                     'Save the mechanism again.')
  return from_config(content)


def load(path: Union[str, os.PathLike]) -> Any:
  """Reads what `Mechanism.save` wrote."""
  return from_json(pathlib.Path(path).read_text(encoding='utf-8'))


def to_config(mechanism: Any) -> dict:
  """Returns JSON values from which `from_config` makes an equal mechanism.

  The values include numbers that were given or loaded. They leave out numbers that the mechanism
  designs itself, because `from_config` designs them again.
  """
  content = {'kind': type(mechanism).__name__, 'config': mechanism.get_config()}
  if mechanism.dtype != 'float64':
    content['dtype'] = mechanism.dtype
  if mechanism.loaded:
    content.update(_numbers(mechanism.rounded('float64').arrays))
  return content


def from_config(content: dict) -> Any:
  """Returns the mechanism that `to_config` or `to_json` described.

  Raises:
    ValueError: If the content is no such description, or its numbers are damaged.
  """
  try:
    kind, config = content['kind'], content['config']
    arrays = {name: checks.rectangular(value, f'`{name}` must be an array.', np.float64)
              for name, value in content.get('arrays', {}).items()}
    checks.one_of(KINDS, kind=kind)
    with gate.loading():
      mechanism = KINDS[kind](**config)
    if 'arrays' in content:
      if checksum(arrays) != content['checksum']:
        raise ValueError('The numbers of the mechanism must match their checksum. Received: a '
                         'description that was damaged or edited. Design the mechanism again.')
      mechanism = mechanism.with_numbers(arrays)
    return mechanism.rounded(content.get('dtype', 'float64'))
  except (KeyError, TypeError, AttributeError, OverflowError) as error:
    raise ValueError('The description of a mechanism must be what `to_config` or `to_json` '
                     f'returned. Received: {str(content)[:60]} ({error!r}).') from error


def cached(mechanism: Any) -> Mapping[str, npt.ArrayLike]:
  """Returns `mechanism.design()`, kept on disk by a key of all that decides it."""
  folder = cache_folder()
  if folder is None:
    return mechanism.design()
  key = json.dumps([VERSION, to_config(mechanism)], sort_keys=True)
  path = folder / (hashlib.sha256(key.encode()).hexdigest() + '.json')
  if path.exists():
    try:
      loaded = load(path)
      of = lambda m: (type(m).__name__, m.get_config(), m.dtype)  # Equality would need the design.
      if of(loaded) != of(mechanism):
        raise ValueError('The file describes another mechanism.')
      return loaded.arrays
    except (OSError, ValueError, KeyError, TypeError) as error:
      warnings.warn(f'Designing {mechanism!r} again: its cache file {path} cannot be used '
                    f'({error}).', errors.Caution, stacklevel=2)
  arrays = {name: np.asarray(value, np.float64) for name, value in mechanism.design().items()}
  _write(path, to_json(mechanism, arrays))
  return arrays


def cache_folder() -> Optional[pathlib.Path]:
  """Returns the folder that caches designs, or None if the user opted out."""
  choice = os.environ.get(CACHE_SWITCH, '')
  if choice.lower() in ('0', 'off', 'no', 'false'):
    return None
  if choice and choice != '1':
    return pathlib.Path(choice)
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'tfdp_adaptive' / 'mechanisms'


def _write(path: pathlib.Path, text: str) -> None:
  """Writes a cache file. A cache that cannot be written is no reason to fail."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    runfolder.replace(path, text.encode(), 0o666)
  except OSError as error:
    warnings.warn(f'The design cannot be kept in {path.parent} ({error}).', errors.Caution,
                  stacklevel=3)


def _numbers(arrays: Mapping[str, np.ndarray]) -> Dict[str, Any]:
  return {'arrays': {name: np.asarray(value, np.float64).tolist()
                     for name, value in arrays.items()}, 'checksum': checksum(arrays)}


def checksum(arrays: Mapping[str, np.ndarray]) -> str:
  """Returns a hash of names, shapes and numbers, equal if and only if all bits are."""
  digest = hashlib.sha256()
  for name in sorted(arrays):
    array = np.ascontiguousarray(arrays[name], '<f8')
    digest.update(f'{name}{array.shape}'.encode() + array.tobytes())
  return digest.hexdigest()
