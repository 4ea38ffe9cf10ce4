# SPDX-License-Identifier: Apache-2.0
"""Differentially private adaptive optimizers for TensorFlow, Keras and TFF.

Public names are imported when they are first used: the NumPy parts (mechanisms,
accounting) do not wait for Keras. As soon as both are imported, in either order, Keras' loaders
know the models and optimizers, and the ledger of weights.
"""

import ast
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import re
import sys
import threading
from typing import Any, Callable, Dict, List, TYPE_CHECKING

from tfdp_adaptive.version import __version__

# A wheel has `federated` and `examples` in this folder; a checkout has them beside it. An editable
# installation of another checkout is asked last, so every checkout runs its own code.
if not os.path.isdir(os.path.join(__path__[0], 'federated')):
  __path__.append(os.path.dirname(__path__[0]))

if TYPE_CHECKING:  # Every public name, once: `_listed` reads it, and so do editors.
  from tfdp_adaptive import advice as advice
  from tfdp_adaptive import audit as audit
  from tfdp_adaptive import clipping as clipping
  from tfdp_adaptive import estimates as estimates
  from tfdp_adaptive import federated as federated
  from tfdp_adaptive import heads as heads
  from tfdp_adaptive import mechanisms as mechanisms
  from tfdp_adaptive import privacy as privacy
  from tfdp_adaptive import queries as queries
  from tfdp_adaptive import rules as rules
  from tfdp_adaptive.accounting import sampling as sampling
  from tfdp_adaptive.advice.advice import advise as advise
  from tfdp_adaptive.advice.public_gradients import public_gradients as public_gradients
  from tfdp_adaptive.advice.recommendation import recommend as recommend
  from tfdp_adaptive.clipping.explain import explain_clipping as explain_clipping
  from tfdp_adaptive.errors import Caution as Caution
  from tfdp_adaptive.errors import PrivacyError as PrivacyError
  from tfdp_adaptive.gate import experimental as experimental
  from tfdp_adaptive.independence.validation import validate_model as validate_model
  from tfdp_adaptive.keras import callbacks as callbacks
  from tfdp_adaptive.keras import diagnostics as diagnostics
  from tfdp_adaptive.keras.arguments import Performance as Performance
  from tfdp_adaptive.keras.fixes import fix_model as fix_model
  from tfdp_adaptive.keras.model import DPModel as DPModel
  from tfdp_adaptive.keras.named_optimizers import *  # noqa: F403
  from tfdp_adaptive.keras.optimizer import DPOptimizer as DPOptimizer
  from tfdp_adaptive.keras.private import DPFunctional as DPFunctional
  from tfdp_adaptive.keras.private import DPSequential as DPSequential
  from tfdp_adaptive.keras.private import DPWrapper as DPWrapper
  from tfdp_adaptive.keras.private import make_private as make_private
  from tfdp_adaptive.privacy.ledger import Ledger as Ledger
  from tfdp_adaptive.privacy.plan import PrivacyPlan as PrivacyPlan
  from tfdp_adaptive.tuning import tune as tune


def _listed(spec: Any) -> Dict[str, str]:
  """`{public name: the module it is imported from}`, of a package's imports for type checkers."""
  source = spec.loader.get_source(spec.name)
  (block,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)
              and ast.unparse(node.test) == 'TYPE_CHECKING']
  return {alias.name: importlib.util.resolve_name(
      '.' * node.level + (node.module or ''), spec.name)
          for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}


_LISTED = _listed(__spec__)
_OPTIMIZERS = str(pkgutil.get_data(__name__, 'keras/named_optimizers.py') or b'', 'utf-8')
_LISTED.update(dict.fromkeys(
    re.findall(r'^(\w+) = _class\(', _OPTIMIZERS, re.MULTILINE), _LISTED.pop('*')))
_EXPORTS = {name: where for name, where in _LISTED.items() if where != __name__}
_SUBPACKAGES = sorted({*_LISTED} - {*_EXPORTS})
# Without what needs a library that not every environment can have.
__all__ = sorted({'__version__', *_EXPORTS, *_SUBPACKAGES} - {'queries'})


def __getattr__(name: str) -> Any:
  if name in _SUBPACKAGES:
    return importlib.import_module(f'{__name__}.{name}')
  if name not in _EXPORTS:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(_EXPORTS[name])
  value = getattr(module, name, None) or importlib.import_module(f'{module.__name__}.{name}')
  globals()[name] = value
  return value


def __dir__() -> List[str]:
  return sorted((*globals(), *__all__))


class _Finder:
  """Has Keras' loaders know the models and the ledger from the end of Keras' import on."""

  def __init__(self) -> None:
    self._inside = threading.local()  # Imports that wait for others, of this thread.

  def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
    found: Any = None
    if name in ('keras', 'tensorflow') or name.startswith(f'{__name__}.'):
      found = importlib.machinery.PathFinder.find_spec(name, path)
    if found is not None and found.loader is not None:
      found.loader.exec_module = functools.partial(self._run, found.loader.exec_module)
    return found

  def _run(self, run: Callable[[Any], None], module: Any) -> None:
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
      with contextlib.suppress(ImportError):  # Whoever uses these names is told.
        importlib.import_module(f'{__name__}.keras.private')
        importlib.import_module(f'{__name__}.keras.named_optimizers')


_finder = _Finder()
sys.meta_path.insert(0, _finder)
_finder.register()
