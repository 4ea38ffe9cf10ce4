"""User-level differential privacy with adaptive server optimizers, in TensorFlow Federated."""

from tfdp_adaptive.federated.evaluation import evaluator as evaluator
from tfdp_adaptive.federated.processes import build_private_fed_avg as build_private_fed_avg
from tfdp_adaptive.federated.processes import build_private_fed_sgd as build_private_fed_sgd
from tfdp_adaptive.federated.processes import PrivateFedAvg as PrivateFedAvg
from tfdp_adaptive.federated.rounds import ClientsFailedError as ClientsFailedError
from tfdp_adaptive.federated.server import PrivateMetrics as PrivateMetrics
from tfdp_adaptive.federated.server import QuantileClip as QuantileClip
from tfdp_adaptive.federated.simulation import simulate as simulate
from tfdp_adaptive.federated.simulation import Simulation as Simulation
from tfdp_adaptive.federated.storage import SavedRunError as SavedRunError
from tfdp_adaptive.federated.users import Users as Users
from tfdp_adaptive.federated.workers import check_address as check_address
from tfdp_adaptive.federated.workers import WorkerLostError as WorkerLostError
from tfdp_adaptive.federated.workers import Workers as Workers
