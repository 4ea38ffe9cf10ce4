# SPDX-License-Identifier: Apache-2.0
"""Element-wise functions that go through memory once."""

from typing import Callable

import tensorflow as tf

WORTH_COMPILING = 2**16  # Elements of all arguments; compiling takes some tenths of a second.


def one_pass(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
  """Returns an element-wise `function` of tensors that reads and writes each tensor once.

  Without it, TensorFlow reads and writes memory for every product. The function is compiled by XLA,
  also within graphs that are not compiled. On a GPU it is not compiled, because the compiler is
  often missing there and memory is fast. (A product of matrices would also be one pass, but GPUs
  round its factors to TF32.)
  """
  compiled = tf.function(function, jit_compile=True, autograph=False)

  def call(*arguments: tf.Tensor) -> tf.Tensor:
    sizes = [t.shape.num_elements() or 0 for t in tf.nest.flatten(arguments)]
    small = sum(sizes) < WORTH_COMPILING
    where = function if small or tf.config.list_physical_devices('GPU') else compiled
    return where(*arguments)

  return call
