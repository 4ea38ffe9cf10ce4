# SPDX-License-Identifier: Apache-2.0
"""What Keras users do every day: taken as Keras takes it, or refused in one sentence."""

import dis
import inspect
import itertools
from typing import Any, Callable, Dict, Optional, Sequence, Tuple
import warnings

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors

Shapes = Optional[Callable[[], Any]]  # Of a nest; hidden from Keras, which tracks attributes.


def by_name(function: Callable[..., Any], skip: int, args: Sequence[Any],
            kwargs: Dict[str, Any]) -> Dict[str, Any]:
  """Keyword arguments for what was given by position, in the order of this Keras.

  Args:
    function: A method of `keras.Model`.
    skip: How many of its parameters, `self` included, were taken before `args`.
    args: By position.
    kwargs: By name.
  """
  names = list(inspect.signature(function).parameters)[skip:]
  if len(args) > len(names):
    raise TypeError(f'`{function.__name__}` takes at most {skip - 1 + len(names)} arguments. '
                    f'Received: {skip - 1 + len(args)}.')
  placed = dict(zip(names, args))
  twice = sorted(set(placed) & set(kwargs))
  if twice:
    raise TypeError(f'`{function.__name__}` was given {twice} by position and by name.')
  return {**kwargs, **placed}


def loss_weights(value: Any) -> Any:
  """As they are, if they are numbers: in Keras 3 metrics stand in another place."""
  for weight in tf.nest.flatten(value):
    if isinstance(weight, str) or callable(weight):
      raise ValueError(
          '`loss_weights` must be numbers, one per output. Received: '
          f'{value!r}. In Keras 3 they come after `loss` by position; pass `metrics=` by name.')
  return value


def refuse_changed(model: Any) -> None:
  """Raises `PrivacyError` where Keras would train what is frozen now, or leave out what is not."""
  changed = compat.changed_since_compile(model)
  if changed:
    raise errors.PrivacyError(
        'Keras 2 trains what was trainable when the model was compiled. Received: layers '
        f'{changed}, frozen or thawed since. Compile again, with a new optimizer (and plan) if '
        'this one has taken steps: what was spent stays in `model.ledger`.')


def on_host(optimizer: Any, kwargs: Dict[str, Any]) -> Dict[str, Any]:
  """`compile`'s arguments, without XLA where noise comes from the operating system."""
  mechanism = getattr(optimizer, 'mechanism', None)
  if getattr(mechanism, 'rounding', None) is None:
    return kwargs
  if kwargs.get('jit_compile') not in (None, False, 'auto'):
    raise ValueError('Noise of the operating system is drawn in Python, which XLA cannot compile. '
                     f'Received: jit_compile={kwargs["jit_compile"]} with {mechanism!r}. Use '
                     'jit_compile=False, or IndependentGaussian() without `rounding`.')
  return {**kwargs, 'jit_compile': False}


def refuse_ragged(*data: Any) -> None:
  """Raises ValueError for examples of different lengths."""
  kinds = (tf.RaggedTensor, tf.RaggedTensorSpec, tf.SparseTensor, tf.SparseTensorSpec)
  for part in data:
    leaves = tf.nest.flatten(part.element_spec if isinstance(part, tf.data.Dataset) else part)
    for leaf in leaves:
      if isinstance(leaf, kinds):
        raise ValueError(
            'A private step needs dense tensors: the gradient of each example is its own. '
            f'Received: a {type(leaf).__name__}. Pad ragged data with `.to_tensor()` (and let '
            'the model mask the padding), or densify sparse data with `tf.sparse.to_dense`.')


def refuse_plain_clone(model: Any) -> None:
  """Raises `PrivacyError` where Keras is about to make a plain Sequential of a private one."""
  if compat.is_cloned_as_sequential():
    raise errors.PrivacyError(
        '`keras.models.clone_model` makes a plain Sequential of every Sequential, which would '
        f'train without privacy. Received: {type(model).__name__} {model.name!r}. Use '
        '`type(model).from_config(model.get_config())`, a private model with new weights.')


def warn_of_padding(model: Any, metrics: Any) -> None:
  """Warns of metrics of one's own that take no notice of weights, which tell what is padding."""
  names = [type(metric).__name__ for metric in tf.nest.flatten(metrics)
           if _ignores_weights(getattr(type(metric), 'update_state', None))]
  if compat.overrides(model, 'compute_metrics') and _ignores_weights(type(model).compute_metrics):
    names.append('compute_metrics')
  if names:
    warnings.warn(
        f'{", ".join(names)}: under a plan batches are padded with empty rows, which metrics count '
        'unless they read `sample_weight`, zero for padding. These do not, so what they say is '
        'wrong. Multiply by the weights, and divide by their sum.',
        errors.Caution, stacklevel=3)


def _ignores_weights(function: Any) -> bool:
  """Whether a function has an argument `sample_weight` that it never reads."""
  code = getattr(inspect.unwrap(function), '__code__', None) if callable(function) else None
  if code is None or 'sample_weight' not in code.co_varnames[:code.co_argcount
                                                              + code.co_kwonlyargcount]:
    return False
  return not any(
      'sample_weight' in (one.argval if isinstance(one.argval, tuple) else (one.argval,))
      for one in dis.get_instructions(code) if 'LOAD' in one.opname or 'CELL' in one.opname)


def first_shapes(x: Any) -> Tuple[Any, Shapes]:
  """`(x, shapes)` of batches from a generator or Sequence, of which Keras 2 tells ranks only."""
  if compat.TELLS_SHAPES or isinstance(x, tf.data.Dataset) or hasattr(x, 'element_spec'):
    return x, None
  if isinstance(x, compat.keras.utils.Sequence):
    first = x[0]
  elif hasattr(x, '__next__'):
    first = next(x, None)
    if first is None:
      return x, None
    x = itertools.chain([first], x)
  else:
    return x, None
  if not all(hasattr(leaf, 'shape') for leaf in tf.nest.flatten(first)):
    return x, None
  shapes = tf.nest.map_structure(lambda t: tf.TensorShape([None, *t.shape[1:]]), first)
  return x, lambda: shapes


def with_shapes(model: Any, data: Any) -> Any:
  """Batches whose axes have the lengths that the model's inputs, or the first batch, say."""
  refuse_ragged(data)
  x, y, weight = compat.keras.utils.unpack_x_y_sample_weight(data)
  unknown = [t for t in tf.nest.flatten(x) if tf.is_tensor(t) and (
      t.shape.rank is None or None in t.shape[1:])]
  inputs = getattr(model, 'inputs', None) if model.built else None
  get_shapes = getattr(model, '_first_shapes', None)
  if not unknown or not inputs and get_shapes is None:
    return data
  if inputs and isinstance(x, dict) and not isinstance(compat.input_structure(model), dict):
    return data  # By the inputs' names, in another order than theirs.
  shapes = None if get_shapes is None else get_shapes()
  if inputs:
    known = [t.shape for t in inputs]
  else:
    known = tf.nest.flatten(shapes[0] if isinstance(shapes, tuple) else shapes)
  leaves = tf.nest.flatten(x)
  if len(leaves) != len(known):
    return data
  leaves = [tf.ensure_shape(t, [None, *shape[1:]]) if shape.rank is not None and (
      t.shape.rank in (None, shape.rank)) else t for t, shape in zip(leaves, known)]
  x = tf.nest.pack_sequence_as(x, leaves)
  if isinstance(shapes, tuple) and len(shapes) > 1 and y is not None:
    y = tf.nest.map_structure(_column, y, shapes[1])
  return compat.keras.utils.pack_x_y_sample_weight(x, y, weight)


def _column(target: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
  """Targets of shape [n, 1] are classes or numbers, where [n, k] are not."""
  if shape.rank and shape.rank > 1 and shape[-1] == 1 and target.shape.rank in (None, shape.rank):
    return tf.ensure_shape(target, [None] * (shape.rank - 1) + [1])
  return target
