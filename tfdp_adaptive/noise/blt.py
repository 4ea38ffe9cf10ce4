"""Noise of a buffered linear Toeplitz C (arXiv:2404.16706, 2408.08868): d rows of memory.

    x_t = z_t / c_0 - sum_i w_i s_i,    s_i <- theta_i s_i + x_t
"""

from tfdp_adaptive.mechanisms import blt
from tfdp_adaptive.noise import base
from tfdp_adaptive.noise import gaussian
from tfdp_adaptive.noise import keys


@base.stream.register(blt.BLT)
def buffered(mechanism, key_source=keys.from_system):
  """History: one row per buffer, s_i."""
  run = base.as_run(mechanism)
  output_scale = float(run.output_scale)
  weights = [float(w) for w in run.weights]
  decays = [float(theta) for theta in run.decays]

  def empty(flat):
    return tuple(base.zeros(flat) for _ in decays)

  def advance(key, row, history, flat):
    del row
    outputs = []
    for i, z in enumerate(gaussian.vectors(key, flat)):
      x = z / output_scale
      for w, buffer in zip(weights, history):
        x -= w * buffer[i]
      outputs.append(x)
    history = tuple(
        tuple(theta * s + x for s, x in zip(buffer, outputs))
        for theta, buffer in zip(decays, history))
    return tuple(outputs), history

  return base.build(mechanism, key_source, empty, advance)
