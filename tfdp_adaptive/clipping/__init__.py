# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients, clipped and summed: the only layer that sees private data.

`Hard()`, `AutoS()`, `Quantile(0.5)`, `Slack()`, `PerLayer()` and the like are ways of clipping, for
the argument `clipping` of every optimizer.

`register` adds a layer of your own to the book-keeping engine. The registered function yields
explicit gradients, or an `Outer` product of inputs and cotangents:

    @tfdp.clipping.register(MyScale)
    def my_scale(layer, call, cotangents):
      yield layer.gain, tfdp.clipping.explicit(tf.reduce_sum(cotangents * call.inputs, axis=1))

See `layers/registry.py` for what the function is given.
"""

import importlib
from typing import Any

_EXPORTS = {
    'check': 'comparison', 'register': 'layers.registry', 'Unsupported': 'layers.registry',
    'explicit': 'factors', 'Outer': 'factors', 'Rows': 'rows',
    **dict.fromkeys((
        'Hard', 'AutoV', 'AutoS', 'PSAC', 'Tanh', 'PNorm', 'Quantile', 'Slack',
        'Automatic', 'Groups',
        'PerLayer', 'PerVariable'), 'choices')}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
  if name not in _EXPORTS:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'{__name__}.{_EXPORTS[name]}'), name)
