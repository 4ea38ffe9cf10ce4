# SPDX-License-Identifier: Apache-2.0
"""Online noise streams of the mechanisms (TensorFlow)."""

# Importing a file of streams registers them with `stream`.
from tfdp_adaptive.mechanisms import KINDS as _KINDS
from tfdp_adaptive.noise import banded as banded
from tfdp_adaptive.noise import blt as blt
from tfdp_adaptive.noise import regenerated as regenerated
from tfdp_adaptive.noise import tree as tree
from tfdp_adaptive.noise.base import as_run as as_run
from tfdp_adaptive.noise.base import Noise as Noise
from tfdp_adaptive.noise.base import require_streams as _require_streams
from tfdp_adaptive.noise.base import State as State
from tfdp_adaptive.noise.base import stream as stream
from tfdp_adaptive.noise.base import within as within
from tfdp_adaptive.noise.filtered import filtered_variance as filtered_variance
from tfdp_adaptive.noise.filtered import FilteredVariance as FilteredVariance

_require_streams(_KINDS.values())
