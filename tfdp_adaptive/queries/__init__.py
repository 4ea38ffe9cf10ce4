# SPDX-License-Identifier: Apache-2.0
"""Adapters to tensorflow_privacy's DPQuery, which TensorFlow Federated builds on."""

from tfdp_adaptive.queries.mechanism_sum import MechanismSumQuery as MechanismSumQuery
from tfdp_adaptive.queries.rule_query import RuleQuery as RuleQuery
