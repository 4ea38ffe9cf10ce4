# SPDX-License-Identifier: Apache-2.0
"""Changes of a model before private training: layers replaced, and weights frozen."""

from typing import Any, Callable, Dict, List, Sequence, Set, Tuple, Union

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.keras import model as model_lib
from tfdp_adaptive.keras import private as private_lib
from tfdp_adaptive.keras import weight_ledger

keras: Any = compat.keras
GROUPS = 32  # At most, as in Wu & He (2018), arXiv:1803.08494.
_SHOWN = 5  # Changes that are printed.
_KEPT = ('dtype', 'trainable', 'epsilon', 'center', 'scale', 'beta_initializer',
         'gamma_initializer', 'beta_regularizer', 'gamma_regularizer', 'beta_constraint',
         'gamma_constraint')
_BIASES = ('bias', 'beta', 'gamma', 'scale', 'gain')  # BiTFiT also trains normalizations.


def fix_model(model: compat.Model, groups: int = GROUPS, verbose: bool = True) -> Any:
  """Returns a copy whose BatchNormalization is replaced by a normalization of each example.

  Images and sequences get a GroupNormalization, vectors a LayerNormalization. The new layer is
  named after the old one: `bn` becomes `bn_group_normalization`. All weights are copied, gamma
  and beta of the normalizations among them. Moving averages are dropped, so the outputs of the copy
  differ from those of the model. Train the copy before you use it. Frozen BatchNormalization stays,
  since it does not look at the batch.

  Args:
    model: A built Sequential or functional model. It may contain other models.
    groups: The largest number of groups of channels. The chosen number divides the channels and
      leaves at least two channels per group, because a single value would be normalized to zero.
    verbose: Whether to print what was changed.

  Returns:
    The copy, which you must compile. It is private if the model is. Its attribute `tfdp_changes`, a
    tuple of strings, lists all changes.

  Raises:
    PrivacyError: If a layer cannot be replaced; the message names it.

  Examples:
    >>> model = tfdp.fix_model(keras.Sequential([
    ...     keras.Input([8, 8, 4]), keras.layers.BatchNormalization(name='bn')]))
    Replaced 1 layer; train the copy before you use it:
      bn: BatchNormalization -> GroupNormalization of 4 channels in 2 groups
    >>> model.layers[-1].name
    'bn_group_normalization'
  """
  if not isinstance(model, keras.Model) or not model.built:
    raise ValueError('`model` must be a Keras model that is built. Received: '
                     f'{model!r}. Call it once on an input, or give it an `Input`.')
  _refuse_hidden(model)
  changes: List[str] = []
  pairs: Dict[int, Tuple[Any, Any]] = {}
  copy = _cloned(model, int(groups), changes, pairs)
  for old, new in pairs.values():
    if _mixes(old):
      new.set_weights([w for name in ('gamma', 'beta') for w in _values(old, name)])
    else:
      new.set_weights(old.get_weights())
    for before, after in zip(old.weights, new.weights):  # Gamma and beta come first.
      compat.freeze(after, compat.is_frozen(before))
  if isinstance(model, model_lib.DPModel):
    copy = private_lib.make_private(copy)
  weight_ledger.Ledger.of(copy).attach(weight_ledger.Ledger.of(model).ledger().entries)
  copy.tfdp_changes = tuple(changes)
  if verbose:
    _show(changes)
  return copy


def _show(changes: Sequence[str]) -> None:
  if not changes:
    print('Nothing to replace: no layer normalizes over the batch.')
    return
  layers = f'{len(changes)} layer{"s" * (len(changes) > 1)}'
  print(f'Replaced {layers}; train the copy before you use it:')
  for change in changes[:_SHOWN]:
    print(f'  {change}')
  if len(changes) > _SHOWN:
    print(f'  and {len(changes) - _SHOWN} more, see `tfdp_changes` of the copy')


def _cloned(model: compat.Model, groups: int, changes: List[str],
            pairs: Dict[int, Tuple[Any, Any]]) -> Any:
  replaced: Set[int] = set()

  def clone(layer: compat.Layer) -> Any:
    if _is_container(layer):
      return _cloned(layer, groups, changes, pairs)
    if _mixes(layer):
      new = _replacement(layer, groups, changes)
      replaced.add(id(new))
    else:
      new = type(layer).from_config(layer.get_config())
    if isinstance(layer, keras.layers.Layer):  # Operations have no weights.
      pairs[id(layer)] = layer, new
    return new

  def call(layer: compat.Layer, *args: object, **kwargs: object) -> Any:
    if id(layer) in replaced:  # Keras 3 passes masks by name to layers that took them.
      kwargs = {key: value for key, value in kwargs.items() if key not in ('mask', 'training')}
    return layer(*args, **kwargs)

  return compat.clone_model(model, clone, call)


def _is_container(layer: compat.Layer) -> bool:
  return isinstance(layer, keras.Sequential) or (
      isinstance(layer, keras.Model) and compat.input_structure(layer) is not None)


def _mixes(layer: compat.Layer) -> bool:
  return isinstance(layer, keras.layers.BatchNormalization) and layer.trainable


def _refuse_hidden(model: compat.Model) -> None:
  """Refuses layers that a layer-by-layer copy cannot replace."""
  reached = [model]
  for one in reached:
    reached += one.layers if _is_container(one) else []
  hidden = [layer.name for layer in model._flatten_layers()
            if _mixes(layer) and all(layer is not one for one in reached)]
  if hidden or not _is_container(model):
    raise errors.PrivacyError(
        'Only layers of Sequential and functional models can be replaced. Received: '
        f'{type(model).__name__} {model.name!r}'
        + (f' with BatchNormalization inside other layers: {hidden}' if hidden else '')
        + '. Use GroupNormalization where these are made.')


def _replacement(layer: compat.Layer, groups: int, changes: List[str]) -> Any:
  size, axis, rank = _channels(layer)
  config = {key: value for key, value in layer.get_config().items() if key in _KEPT}
  if rank == 2:
    if size == 1:
      raise errors.PrivacyError(
          f'{layer.name} (BatchNormalization) normalises a single number per example, of which '
          'nothing is left without the batch. Leave the layer out.')
    changes.append(f'{layer.name}: BatchNormalization -> LayerNormalization of {size} values')
    return keras.layers.LayerNormalization(
        axis=axis, name=f'{layer.name}_layer_normalization', **config)
  count = number_of_groups(size, groups)
  changes.append(f'{layer.name}: BatchNormalization -> GroupNormalization of {size} channels in '
                 f'{count} groups')
  return keras.layers.GroupNormalization(
      groups=count, axis=axis, name=f'{layer.name}_group_normalization', **config)


def number_of_groups(channels: int, most: int = GROUPS) -> int:
  """Returns the largest divisor up to `most` that leaves two channels for each group, or one."""
  return max((g for g in range(1, most + 1) if channels % g == 0 and channels // g > 1),
             default=1)


def _channels(layer: compat.Layer) -> Tuple[int, int, int]:
  """Returns `(number of channels, their axis, rank of the inputs)`."""
  axes = [layer.axis] if isinstance(layer.axis, int) else list(layer.axis)
  if len(axes) != 1:
    raise errors.PrivacyError(
        f'{layer.name} (BatchNormalization) must have one axis of channels. Received: '
        f'axis={axes}. Use a GroupNormalization of your own.')
  return int(layer.moving_mean.shape[0]), axes[0], layer.input_spec.ndim


def _values(layer: compat.Layer, name: str) -> List[Any]:
  variable = getattr(layer, name, None)
  return [] if variable is None else [variable.numpy()]


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
