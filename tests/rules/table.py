# SPDX-License-Identifier: Apache-2.0
"""Every rule beside its oracle: the `CASES` of the oracle modules drive the tests of all rules."""

import oracles_convex
import oracles_matrix
import oracles_moments
import oracles_public
import oracles_wrapped

RULES = (*oracles_convex.CASES, *oracles_matrix.CASES, *oracles_moments.CASES,
         *oracles_public.CASES, *oracles_wrapped.CASES)
