# SPDX-License-Identifier: Apache-2.0
"""One file per kind of layer: the factors of its per-example gradients."""

from tfdp_adaptive.clipping.layers import convolution
from tfdp_adaptive.clipping.layers import dense
from tfdp_adaptive.clipping.layers import normalization
from tfdp_adaptive.clipping.layers import recurrent
