"""Online noise streams of the mechanisms (TensorFlow)."""

from tfdp_adaptive.noise.base import Noise as Noise
from tfdp_adaptive.noise.base import State as State
from tfdp_adaptive.noise.base import stream as stream
