"""Adapters to tensorflow_privacy's DPQuery, which TensorFlow Federated builds on."""

from tfdp_adaptive.queries.rule_query import RuleQuery as RuleQuery
