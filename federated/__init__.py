# SPDX-License-Identifier: Apache-2.0
"""Federated training with differential privacy: of users at a server, or of records in silos.

Names are imported when they are first used, since some need libraries of their own.
"""

import importlib
from typing import Any, List, TYPE_CHECKING

if TYPE_CHECKING:  # Every public name, once, as in `tfdp_adaptive`.
  from tfdp_adaptive.estimates import vocabulary as vocabulary

  from . import flower as flower
  from . import tasks as tasks
  from .engines import PrivateFedAvg as PrivateFedAvg
  from .keras_model import evaluator as evaluator
  from .processes import build_private_fed_avg as build_private_fed_avg
  from .processes import build_private_fed_sgd as build_private_fed_sgd
  from .rounds import ClientsFailedError as ClientsFailedError
  from .rounds import WorkerLostError as WorkerLostError
  from .server import ModelWeights as ModelWeights
  from .server import PrivateMetrics as PrivateMetrics
  from .server import QuantileClip as QuantileClip
  from .silo import Silo as Silo
  from .simulation import simulate as simulate
  from .simulation import Simulation as Simulation
  from .storage import SavedRunError as SavedRunError
  from .users import Users as Users


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
