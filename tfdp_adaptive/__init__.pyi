# SPDX-License-Identifier: Apache-2.0
# The types of the public names, for editors and type checkers.

from tfdp_adaptive import advice as advice
from tfdp_adaptive import audit as audit
from tfdp_adaptive import clipping as clipping
from tfdp_adaptive import estimates as estimates
from tfdp_adaptive import federated as federated
from tfdp_adaptive import heads as heads
from tfdp_adaptive import layers as layers
from tfdp_adaptive import mechanisms as mechanisms
from tfdp_adaptive import privacy as privacy
from tfdp_adaptive import queries as queries
from tfdp_adaptive import rules as rules
from tfdp_adaptive.accounting import sampling as sampling
from tfdp_adaptive.advice.recommend import recommend as recommend
from tfdp_adaptive.clipping.explain import explain_clipping as explain_clipping
from tfdp_adaptive.errors import Caution as Caution
from tfdp_adaptive.errors import PrivacyError as PrivacyError
from tfdp_adaptive.frozen_features import features as features
from tfdp_adaptive.frozen_features import join as join
from tfdp_adaptive.gate import experimental as experimental
from tfdp_adaptive.independence.validation import validate_model as validate_model
from tfdp_adaptive.keras import callbacks as callbacks
from tfdp_adaptive.keras import diagnostics as diagnostics
from tfdp_adaptive.keras.arguments import Performance as Performance
from tfdp_adaptive.keras.fixes import fix_model as fix_model
from tfdp_adaptive.keras.fixes import train_only as train_only
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
from tfdp_adaptive.version import __version__ as __version__
