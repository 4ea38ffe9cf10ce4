# SPDX-License-Identifier: Apache-2.0
"""Private estimates that are made before training, with a budget of their own.

Besides the privatizer these are the only places that add noise to what they saw of
records: their cost comes on top of that of training.
"""

from tfdp_adaptive.estimates.adaptation import adapt as adapt
from tfdp_adaptive.estimates.stddevs import private_stddevs as private_stddevs
from tfdp_adaptive.estimates.vocabulary import private_vocabulary as private_vocabulary
