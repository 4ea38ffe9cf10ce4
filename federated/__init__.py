# SPDX-License-Identifier: Apache-2.0
"""User-level differential privacy with adaptive server optimizers, in TensorFlow Federated."""

from tfdp_adaptive.estimates import vocabulary as vocabulary

from .evaluation import evaluator as evaluator
from .processes import build_private_fed_avg as build_private_fed_avg
from .processes import build_private_fed_sgd as build_private_fed_sgd
from .processes import PrivateFedAvg as PrivateFedAvg
from .rounds import ClientsFailedError as ClientsFailedError
from .server import PrivateMetrics as PrivateMetrics
from .server import QuantileClip as QuantileClip
from .simulation import simulate as simulate
from .simulation import Simulation as Simulation
from .storage import SavedRunError as SavedRunError
from .users import Users as Users
from .workers import check_address as check_address
from .workers import WorkerLostError as WorkerLostError
from .workers import Workers as Workers
