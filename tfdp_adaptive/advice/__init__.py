# SPDX-License-Identifier: Apache-2.0
"""Recommends how to train a model privately, from public constants and public examples."""

from tfdp_adaptive.advice.choice import choose as choose
from tfdp_adaptive.advice.choice import default_delta as default_delta
