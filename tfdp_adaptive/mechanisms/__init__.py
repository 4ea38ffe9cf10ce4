# SPDX-License-Identifier: Apache-2.0
"""Noise mechanisms, designed offline (NumPy and SciPy, float64, no TensorFlow)."""

from tfdp_adaptive.mechanisms.banded import Banded as Banded
from tfdp_adaptive.mechanisms.banded_inverse import BandedInverse as BandedInverse
from tfdp_adaptive.mechanisms.banded_inverse import SquareRoot as SquareRoot
from tfdp_adaptive.mechanisms.blt import BLT as BLT
from tfdp_adaptive.mechanisms.dense_optimal import Dense as Dense
from tfdp_adaptive.mechanisms.interface import Mechanism as Mechanism
from tfdp_adaptive.mechanisms.registry import DESIGNS as DESIGNS
from tfdp_adaptive.mechanisms.registry import from_config as from_config
from tfdp_adaptive.mechanisms.registry import from_json as from_json
from tfdp_adaptive.mechanisms.registry import KINDS as KINDS
from tfdp_adaptive.mechanisms.registry import load as load
from tfdp_adaptive.mechanisms.registry import to_config as to_config
from tfdp_adaptive.mechanisms.toeplitz import BandedToeplitz as BandedToeplitz
from tfdp_adaptive.mechanisms.toeplitz import IndependentGaussian as IndependentGaussian
from tfdp_adaptive.mechanisms.tree import Tree as Tree
from tfdp_adaptive.mechanisms.workload import Workload as Workload
