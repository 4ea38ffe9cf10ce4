# SPDX-License-Identifier: Apache-2.0
"""Chooses which weights of a model train, weight by weight."""

from typing import Any, Callable, List, Union

from tfdp_adaptive import compat

_BIASES = ('bias', 'beta', 'gamma', 'scale', 'gain')  # BiTFiT also trains normalizations.


def train_only(model: compat.Model, what: Union[str, Callable[[Any], bool]]) -> List[Any]:
  """Freezes all weights of a model except some, which may be single weights of a layer.

  Frozen weights do not change, have no state in the optimizer, and do not count in an example's
  norm. Fewer trained weights mean less noise. Weights that were frozen before the first call stay
  frozen. A second call chooses again among all others. Call it before `compile`. The choice is
  saved with a compiled private model; after other ways of loading, make it again. With Keras 2,
  only private models respect the choice.

  Args:
    model: A built model, private or to be made private.
    what: 'bias' for biases and the weights of normalizations (BiTFiT, arXiv:2210.00036); 'lora_b'
      for the second matrices of LoRA (FFA-LoRA, arXiv:2403.12313), 'head' for the last layer with
      weights; or a function that returns whether a variable trains.

  Returns:
    The variables that train.

  Raises:
    ValueError: If the model is not built, or if no weight would train.

  Examples:
    >>> layers = compat.keras.layers
    >>> model = compat.keras.Sequential([layers.Input([3]), layers.Dense(4), layers.Dense(2)])
    >>> [tuple(v.shape) for v in train_only(model, 'bias')]
    [(4,), (2,)]
  """
  if not model.built:
    raise ValueError('`model` must be built, or it has no weights to choose from. Received: a '
                     f'model that is not, {model.name!r}. Call it once.')
  for variable in model.variables:
    compat.freeze(variable, False)
  before = list(model.trainable_variables)
  if callable(what):
    chosen = [v for v in before if what(v)]
  elif what == 'bias':
    chosen = [v for v in before if compat.leaf_name(v) in _BIASES]
  elif what == 'lora_b':
    chosen = [v for v in before if compat.leaf_name(v).endswith('_b')
              and compat.leaf_name(v).startswith('lora_')]
  elif what == 'head':
    last = [layer for layer in compat.leaf_layers(model) if layer.weights][-1:]
    own = {compat.variable_key(v) for layer in last for v in layer.weights}
    chosen = [v for v in before if compat.variable_key(v) in own]
  else:
    raise ValueError("`what` must be 'bias', 'lora_b', 'head' or a function of a variable. "
                     f'Received: what={what!r}.')
  if not chosen:
    raise ValueError(
        f'No weight would train. Received: what={what!r} for a model of {len(before)} weights that '
        'are not frozen. LoRA needs `layer.enable_lora(rank)` before; layers with '
        '`trainable=False` stay frozen.')
  keys = {compat.variable_key(v) for v in chosen}
  for variable in before:
    if compat.variable_key(variable) not in keys:
      compat.freeze(variable)
  return chosen
