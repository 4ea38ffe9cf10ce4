# SPDX-License-Identifier: Apache-2.0
"""Recommends an optimizer, a mechanism and a plan from public constants and public data."""

from tfdp_adaptive.advice.advice import advise as advise
from tfdp_adaptive.advice.budget import batch_and_steps as batch_and_steps
from tfdp_adaptive.advice.choice import choose as choose
from tfdp_adaptive.advice.choice import choose_plan as choose_plan
