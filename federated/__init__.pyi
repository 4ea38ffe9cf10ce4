# SPDX-License-Identifier: Apache-2.0
# The types of the public names, for editors and type checkers.

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
