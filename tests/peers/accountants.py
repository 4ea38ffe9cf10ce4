# SPDX-License-Identifier: Apache-2.0
"""dp_accounting's abstract test of accountants, run on the library's own composition."""

import dp_accounting
from dp_accounting import privacy_accountant_test

from tfdp_adaptive.accounting import cost
