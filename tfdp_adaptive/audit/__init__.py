# SPDX-License-Identifier: Apache-2.0
"""Audits: lower bounds on the privacy loss, by attacks or by inspecting every release."""

from tfdp_adaptive.audit.bounds import canaries_to_refute as canaries_to_refute
from tfdp_adaptive.audit.bounds import gaussian_estimate as gaussian_estimate
from tfdp_adaptive.audit.bounds import LARGEST_CONFIDENCE as LARGEST_CONFIDENCE
from tfdp_adaptive.audit.bounds import one_run_epsilon as one_run_epsilon
from tfdp_adaptive.audit.bounds import one_run_gaussian_epsilon as one_run_gaussian_epsilon
from tfdp_adaptive.audit.bounds import provable_epsilon as provable_epsilon
from tfdp_adaptive.audit.canaries import Canaries as Canaries
from tfdp_adaptive.audit.canaries import insert as insert
from tfdp_adaptive.audit.canaries import loss_scores as loss_scores
from tfdp_adaptive.audit.canaries import Report as Report
from tfdp_adaptive.audit.canaries import report as report
from tfdp_adaptive.audit.canaries import run as run
from tfdp_adaptive.audit.shadow_models import logit_scores as logit_scores
from tfdp_adaptive.audit.shadow_models import shadow_models as shadow_models
from tfdp_adaptive.audit.shadow_models import ShadowReport as ShadowReport
from tfdp_adaptive.audit.white_box import white_box as white_box
from tfdp_adaptive.audit.white_box import WhiteBoxReport as WhiteBoxReport
