"""Noise mechanisms, designed offline (NumPy and SciPy, float64, no TensorFlow)."""

from tfdp_adaptive.mechanisms.banded import Banded as Banded
from tfdp_adaptive.mechanisms.banded_inverse import BandedInverse as BandedInverse
from tfdp_adaptive.mechanisms.base import Mechanism as Mechanism
from tfdp_adaptive.mechanisms.blt import BLT as BLT
from tfdp_adaptive.mechanisms.dense_optimal import Dense as Dense
from tfdp_adaptive.mechanisms.independent import IndependentGaussian as IndependentGaussian
from tfdp_adaptive.mechanisms.square_root import SquareRoot as SquareRoot
from tfdp_adaptive.mechanisms.toeplitz import BandedToeplitz as BandedToeplitz
from tfdp_adaptive.mechanisms.tree import Tree as Tree
