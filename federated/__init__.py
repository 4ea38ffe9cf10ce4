# SPDX-License-Identifier: Apache-2.0
"""User-level differential privacy with adaptive server optimizers, in process or in TFF.

Names are imported when they are first used: `isolated_worker` must run without TensorFlow.
"""

import importlib
import importlib.util
from typing import Any, List, TYPE_CHECKING

import tfdp_adaptive

if TYPE_CHECKING:  # Every public name, once, as in `tfdp_adaptive`.
  from tfdp_adaptive.estimates import vocabulary as vocabulary

  from . import flower as flower
  from . import tasks as tasks
  from .engines import PrivateFedAvg as PrivateFedAvg
  from .evaluation import evaluator as evaluator
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
  from .workers import check_address as check_address
  from .workers import Workers as Workers


_EXPORTS = tfdp_adaptive._listed(__spec__)


def __getattr__(name: str) -> Any:
  if name not in _EXPORTS:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  if _EXPORTS[name].endswith('.workers') and (
      importlib.util.find_spec('tensorflow_federated') is None):
    raise ModuleNotFoundError(
        f'`tfdp.federated.{name}` needs tensorflow_federated, which runs on Python 3.9 to 3.11 '
        'with TensorFlow 2.14: install requirements/federated.lock, see README.md. Without it '
        'clients are trained in process.')
  module = importlib.import_module(_EXPORTS[name])
  value = (importlib.import_module(f'{module.__name__}.{name}') if hasattr(module, '__path__')
           else getattr(module, name))
  globals()[name] = value
  return value


def __dir__() -> List[str]:
  return sorted((*globals(), *_EXPORTS))
