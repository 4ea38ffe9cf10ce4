# SPDX-License-Identifier: Apache-2.0
"""Federated training with differential privacy: of users at a server, or of records in silos.

Names are imported when they are first used, since some need libraries of their own.
"""

import importlib
from typing import Any, List

# {name: its module}; `__init__.pyi` tells editors their types.
_EXPORTS = {name: f'{__name__}.{module}' for module, names in {
    'engines': ('PrivateFedAvg',), 'keras_model': ('evaluator',),
    'processes': ('build_private_fed_avg', 'build_private_fed_sgd'),
    'rounds': ('ClientsFailedError', 'WorkerLostError'),
    'server': ('ModelWeights', 'PrivateMetrics', 'QuantileClip'),
    'silo': ('Silo',), 'simulation': ('simulate', 'Simulation'), 'storage': ('SavedRunError',),
    'users': ('Users',)}.items() for name in names}
_EXPORTS.update(flower=__name__, tasks=__name__, vocabulary='tfdp_adaptive.estimates')


def __getattr__(name: str) -> Any:
  if name not in _EXPORTS:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(_EXPORTS[name])
  value = (importlib.import_module(f'{module.__name__}.{name}') if hasattr(module, '__path__')
           else getattr(module, name))
  globals()[name] = value
  return value


def __dir__() -> List[str]:
  return sorted(_EXPORTS)
