# SPDX-License-Identifier: Apache-2.0
"""Online noise streams of the mechanisms (TensorFlow)."""

# Importing a file of streams registers them with `stream`.
from tfdp_adaptive.mechanisms import KINDS as _KINDS
from tfdp_adaptive.noise import banded as banded
from tfdp_adaptive.noise import blt as blt
from tfdp_adaptive.noise import regenerated as regenerated
from tfdp_adaptive.noise import tree as tree
from tfdp_adaptive.noise.streams import as_run as as_run
from tfdp_adaptive.noise.streams import Noise as Noise
from tfdp_adaptive.noise.streams import require_streams as _require_streams
from tfdp_adaptive.noise.streams import State as State
from tfdp_adaptive.noise.streams import stream as stream
from tfdp_adaptive.noise.streams import unflatten as unflatten
from tfdp_adaptive.noise.streams import within as within

_require_streams(_KINDS.values())
