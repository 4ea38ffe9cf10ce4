# SPDX-License-Identifier: Apache-2.0
"""Differentially private adaptive optimizers for TensorFlow, Keras and TFF.

Public names are imported when they are first used: the NumPy parts (mechanisms,
accounting) do not wait for Keras. As soon as both are imported, in either order, Keras' loaders
know the models and optimizers, and the ledger of weights.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import os
import sys
import threading
import types
from typing import Any, Callable, List, Optional, Sequence

from tfdp_adaptive import optimizers
from tfdp_adaptive.version import __version__

# A wheel has `federated` and `examples` in this folder; a checkout has them beside it. An editable
# installation of another checkout is asked last, so every checkout runs its own code.
if not os.path.isdir(os.path.join(__path__[0], 'federated')):
  __path__.append(os.path.dirname(__path__[0]))

_SUBPACKAGES = ('advice', 'audit', 'clipping', 'estimates', 'federated', 'heads', 'layers',
                'mechanisms', 'privacy', 'queries', 'rules')
# {module: the public names that it defines}; `__init__.pyi` tells editors their types.
_EXPORTS = {name: module for module, names in {
    'accounting': ('sampling',),
    'advice.recommend': ('recommend',),
    'clipping.explain': ('explain_clipping',),
    'errors': ('Caution', 'PrivacyError'),
    'frozen_features': ('features', 'join'),
    'gate': ('experimental',),
    'independence.validation': ('validate_model',),
    'keras': ('callbacks', 'diagnostics'),
    'keras.arguments': ('Performance',),
    'keras.fixes': ('fix_model', 'train_only'),
    'keras.model': ('DPModel',),
    'keras.named_optimizers': tuple(optimizers.OPTIMIZERS),
    'keras.optimizer': ('DPOptimizer',),
    'keras.private': ('DPFunctional', 'DPSequential', 'DPWrapper', 'make_private'),
    'privacy.ledger': ('Ledger',),
    'privacy.plan': ('PrivacyPlan',),
    'tuning': ('tune',),
}.items() for name in names}
# Without what needs a library that not every environment can have.
__all__ = sorted({'__version__', *_EXPORTS, *_SUBPACKAGES} - {'queries'})


def __getattr__(name: str) -> Any:
  if name in _SUBPACKAGES:
    return importlib.import_module(f'{__name__}.{name}')
  if name not in _EXPORTS:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_EXPORTS[name]}')
  value = getattr(module, name, None) or importlib.import_module(f'{module.__name__}.{name}')
  globals()[name] = value
  return value


def __dir__() -> List[str]:
  return __all__


class _Finder:
  """Registers the models, optimizers and the ledger with Keras, as soon as Keras is imported.

  Keras loads classes that are registered, and files of plain models keep their ledger once
  `keras.weight_ledger` is imported. Keras has no event at the end of its import, and importing it
  here would take seconds that the NumPy parts do not need. So this finder waits for it, and leaves
  `sys.meta_path` when it is done.
  """

  def __init__(self) -> None:
    self._inside = threading.local()  # Imports that wait for others, of this thread.

  def find_spec(self, name: str, path: Optional[Sequence[str]], target: object = None) -> Any:
    found: Any = None
    if name in ('keras', 'tensorflow') or name.startswith(f'{__name__}.'):
      found = importlib.machinery.PathFinder.find_spec(name, path)
    if found is not None and found.loader is not None:
      found.loader.exec_module = functools.partial(self._run, found.loader.exec_module)
    return found

  def _run(self, run: Callable[[Any], None], module: types.ModuleType) -> None:
    before = getattr(self._inside, 'depth', 0)
    self._inside.depth = before + 1
    try:
      run(module)
    finally:
      self._inside.depth = before
    if not before:
      self.register()

  def register(self) -> None:
    if 'keras' in sys.modules and self in sys.meta_path:
      sys.meta_path.remove(self)
      with contextlib.suppress(ImportError):  # Raised again when one of these names is used.
        importlib.import_module(f'{__name__}.keras.private')
        importlib.import_module(f'{__name__}.keras.named_optimizers')


_finder = _Finder()
sys.meta_path.insert(0, _finder)
_finder.register()
