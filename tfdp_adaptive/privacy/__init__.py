# SPDX-License-Identifier: Apache-2.0
"""What a training run costs in privacy, decided before it starts and stated after it."""

from tfdp_adaptive.privacy import sampling as sampling
from tfdp_adaptive.privacy.advice import advise as advise
from tfdp_adaptive.privacy.choice import choose as choose
from tfdp_adaptive.privacy.choice import choose_plan as choose_plan
from tfdp_adaptive.privacy.ledger import Ledger as Ledger
from tfdp_adaptive.privacy.plan import PrivacyPlan as PrivacyPlan
from tfdp_adaptive.privacy.private_search import Search as Search
from tfdp_adaptive.privacy.recommendation import recommend as recommend
