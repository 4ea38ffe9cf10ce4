# SPDX-License-Identifier: Apache-2.0
"""Private estimates before training, with their own budget.

This package and the optimizers' noise (`privatizer`) are the only code that adds noise to values
computed from records. The cost of an estimate comes on top of the cost of training.
"""

from tfdp_adaptive.estimates.adaptation import adapt as adapt
from tfdp_adaptive.estimates.moments import second_moments as second_moments
from tfdp_adaptive.estimates.stddevs import private_stddevs as private_stddevs
from tfdp_adaptive.estimates.vocabulary import private_vocabulary as private_vocabulary
