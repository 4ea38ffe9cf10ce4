# SPDX-License-Identifier: Apache-2.0
"""The base class of every DPQuery of this library."""

from typing import Any

from tfdp_adaptive import compat

_dp_query = compat.privacy_module('dp_query')
if _dp_query is None:
  raise ModuleNotFoundError(
      '`tfdp_adaptive.queries` needs tensorflow_privacy. Install it with '
      '`pip install --no-deps --ignore-requires-python tensorflow-privacy==0.9.0`.')

SumAggregationDPQuery: Any = _dp_query.SumAggregationDPQuery
