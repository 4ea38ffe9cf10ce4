# SPDX-License-Identifier: Apache-2.0
"""Plans, ledgers and statements of private runs."""

from tfdp_adaptive.accounting import sampling as sampling
from tfdp_adaptive.accounting.private_search import Search as Search
from tfdp_adaptive.accounting.stopping import Looks as Looks
from tfdp_adaptive.privacy.ledger import Ledger as Ledger
from tfdp_adaptive.privacy.plan import PrivacyPlan as PrivacyPlan
