# SPDX-License-Identifier: Apache-2.0
"""The only package that knows which Keras and which tensorflow_privacy is installed."""

from tfdp_adaptive.compat.compiled import *  # noqa: F403
from tfdp_adaptive.compat.model import *  # noqa: F403  # noqa: F403
from tfdp_adaptive.compat.saving import *  # noqa: F403
from tfdp_adaptive.compat.stack import *  # noqa: F403
from tfdp_adaptive.compat.strategy import *  # noqa: F403
