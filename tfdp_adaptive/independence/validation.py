# SPDX-License-Identifier: Apache-2.0
"""Finds parts of a model in which one example changes another's gradient."""

from concurrent import futures
import math
from typing import Any, Callable, Dict, Iterator, List, MutableMapping, Optional, Sequence
import weakref

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import comparison
from tfdp_adaptive.independence import constants
from tfdp_adaptive.independence import disclosures
from tfdp_adaptive.independence import independence

# Tried for axes of inputs that are open: deep convolutions need more, short tables take less.
_LENGTHS = (8, 64, 32, 16, 4, 2, 1)
_NUMBERS = 16  # Integers without a vocabulary are below: unscaled pixels saturate what they reach.
_SCALES = (0.03, 1, 2, 0.3, 5, 1, 0.1)  # Scales of examples: some stand out, some do not.

# Layers that mix the examples of a batch in training; the first ones when they are frozen, too.
_BLENDING = ('MixUp', 'CutMix')
_BY_EXAMPLE = 'LayerNormalization or GroupNormalization, as `tfdp.fix_model(model)` does'
_MIXING = {
    'BatchNormalization': _BY_EXAMPLE,
    'BatchNormalizationV1': _BY_EXAMPLE,
    'SyncBatchNormalization': _BY_EXAMPLE,
    'SpectralNormalization': 'a weight constraint (its power iteration is stateful)',
}


_SEEN: MutableMapping[Any, constants.Held] = weakref.WeakKeyDictionary()  # Keys are models.
_UNSEEN: MutableMapping[Any, Any] = weakref.WeakKeyDictionary()  # Model -> specs of its inputs.
_PASSED: Any = weakref.WeakSet()


def validate_structure(model: compat.Model) -> None:
  """Raises `PrivacyError` for layers known to mix examples, or to leak through losses."""
  layers: Dict[str, List[str]] = {}  # Names of layers by problem.
  for layer in model._flatten_layers():
    name = type(layer).__name__
    for problem in _problems(layer, name):
      layers.setdefault(problem, []).append(f'{layer.name} ({name})')
  if layers:
    raise errors.PrivacyError('The model cannot be trained privately. Received: ' + ' '.join(
        f'{_listed(names)}, which {problem}.' for problem, names in layers.items()))


def _problems(layer: compat.Layer, name: str) -> Iterator[str]:
  if name in _MIXING and layer.trainable:
    yield (f'normalises over the batch; use {_MIXING[name]}, or freeze the layer (trainable=False)')
  if name in _BLENDING:
    yield 'blends the examples of a batch; leave the layer out'
  if getattr(layer, 'activity_regularizer', None) is not None:
    yield ('has an activity_regularizer, a loss that depends on the data outside the compiled '
           'loss; put it into `loss`')
  if getattr(layer, 'stateful', False) and not isinstance(layer, compat.keras.metrics.Metric):
    yield 'is stateful: it carries data from batch to batch; set stateful=False'


def _listed(names: Sequence[str], most: int = 3) -> str:
  """Returns the first names, and how many there are besides."""
  more = len(names) - most
  return ', '.join(names[:most]) + (f' and {more} more' if more > 0 else '')


def validate_model(model: compat.Model, x: trees.Tree = None) -> None:
  """Checks that the gradient of every example depends on that example alone.

  It looks at the structure (batch normalization, activity regularizers, stateful layers), and
  compares values. In inference mode, the output of an example must not change when another example
  joins the batch. In training mode, neither outputs nor gradients of an example may depend on the
  others. No step may write data into variables or tables, wherever they are kept. If a step takes
  one example at a time anyway, only writes are checked. What Python code does with data
  (`tf.py_function`, `tf.print`) is not seen.

  Args:
    model: A built Keras model.
    x: Inputs for the check, at least two examples, or their specs. By default, inputs are made up
      from the model's input specification, if it has one.

  Raises:
    PrivacyError: Naming every problem found.
    ValueError: If the model is not built and no `x` is given.
  """
  if x is not None and not model.built:
    build(model, x)
  if not model.built:
    raise ValueError('`model` must be built before it can be validated. Call it once, or pass `x`.')
  if tf.distribute.in_cross_replica_context():
    return on_a_thread(validate_model, model, x)
  validate_structure(model)
  x = compat.input_specs(model) if x is None else x
  if x is None:
    return
  first = tf.nest.flatten(x)[0]  # Batches of arrays may have any size in training.
  static = first.shape[0] if isinstance(first, tf.TensorSpec) else independence.SIZE
  examples = accepted(model, x)
  _check_inference(model, examples)
  comparison.registered(model, _rows(examples, 0, independence.SIZE))
  _SEEN[model] = independence.check(
      model, tf.nest.flatten(examples), examples, static, lambda: refuse_data_losses(model))
  _PASSED.add(model)


def on_a_thread(function: Callable[..., Any], *args: object) -> Any:
  """Runs a function eagerly, and in no strategy's scope, while this thread traces or is in one."""
  with futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(function, *args).result()


def seen(model: compat.Model) -> constants.Held:
  """Returns what a model holds, as seen in a trace; nothing for a model that was not remembered."""
  if model in _UNSEEN and model not in _SEEN:
    traced = tf.function(lambda x: model(x, training=True), autograph=False)
    with tf.init_scope():
      _SEEN[model] = constants.held(traced.get_concrete_function(_UNSEEN[model]))
  return _SEEN.get(model, constants.Held([], ()))


def remember(*models: compat.Model) -> None:
  """Remembers models that `seen` traces if they are not validated before it is called."""
  for model in models:
    specs = compat.input_specs(model)
    if specs is not None:
      _UNSEEN[model] = specs


def check_held(model: compat.Model, functions: Sequence[Any],
               public: Optional[str] = None) -> List[float]:
  """Raises `PrivacyError` for losses, penalties, constraints and schedules that hold arrays.

  What they hold reaches the weights unclipped, and mostly after the noise: they may read weights,
  what they are given, and plain numbers.

  Args:
    model: A built model.
    functions: Other functions that a step calls, such as the loss.
    public: The source of arrays in them, if the caller declares the arrays public.

  Returns:
    The plain numbers, of which nothing can tell where they come from.
  """
  constraints = [(v, v.constraint) for v in model.trainable_variables if v.constraint is not None]
  found = disclosures.find(*functions, *compat.penalties(model), *(one for _, one in constraints))
  read = [*found.variables, *(
      v for layer in found.layers for v in compat.built_variables(layer))]
  _SEEN[model] = seen(model)._replace(
      variables=(*seen(model).variables, *map(compat.raw_variable, read)))
  if public is None:
    traced = constants.held(tf.function(lambda: (
        compat.weight_regularization(model),
        [constraint(tf.convert_to_tensor(v)) for v, constraint in constraints]),
        autograph=False).get_concrete_function())
    shapes = traced.shapes + [disclosures.shape(one) for one in found.arrays]
    own = {id(compat.raw_variable(v)) for v in model.variables}
    others = sorted({v.name for v in [*traced.variables, *found.variables]
                     if id(compat.raw_variable(v)) not in own})
    _refuse_held(traced, shapes, others)
  return found.numbers


def check_traced(model: compat.Model, concrete: constants.Concrete,
                 public: Optional[str] = None) -> None:
  """Raises `PrivacyError` for a traced loss or schedule that holds what may be data.

  Python code may bring numbers from anywhere: from text, files, other modules. However it does,
  they are in the graph.

  Args:
    model: The model, whose variables may be read.
    concrete: The graph.
    public: As in `check_held`.
  """
  if public is not None:
    return
  traced = constants.held(concrete)
  known = {id(compat.raw_variable(v)) for v in (*model.variables, *seen(model).variables)}
  _refuse_held(
      traced, [one for one in traced.shapes if math.prod(one) > disclosures.SETTINGS],
      sorted(v.name for v in traced.variables if id(compat.raw_variable(v)) not in known))


def _refuse_held(traced: constants.Held, shapes: Sequence[Any], others: Sequence[str]) -> None:
  if shapes or others or traced.tables or traced.unseen:
    raise errors.PrivacyError(
        'What a loss, penalty, constraint or learning-rate schedule holds reaches the weights '
        'unclipped, so it may hold plain numbers only. Received: one that holds arrays of shapes '
        f'{shapes} and variables {others}, reads {traced.tables} lookup tables, and calls '
        f'{list(traced.unseen)}. Write settings as numbers of Python. If arrays come from public '
        "data, say so: `model.compile(..., public_penalty='where they come from')`.")


def check_probed(model: compat.Model) -> None:
  """Raises `PrivacyError` for a model that has not passed the probes of `validate_model`."""
  if model not in _PASSED:
    raise errors.PrivacyError(
        'With several replicas the model must be validated before its first step, which cannot do '
        'it. Received: a model that is not. Call `tfdp.validate_model(model, x)` with two '
        'examples, or use `fit`.')


def build(model: compat.Model, x: trees.Tree) -> None:
  """Makes the weights of a model by calling it on an example of `x`, inputs or their specs."""
  for length in _LENGTHS:
    try:
      model(_rows(_examples(x, length), 0, 1), training=False)
      return
    except (ValueError, tf.errors.InvalidArgumentError):
      if length == _LENGTHS[-1]:
        raise


def accepted(model: compat.Model, x: trees.Tree) -> Any:
  """Returns examples that the model accepts: words of its vocabulary, axes as long as it needs."""
  words = [layer.input_dim for layer in model._flatten_layers()
           if isinstance(layer, compat.keras.layers.Embedding)]
  failures = []
  for length in _LENGTHS:
    for most in sorted({2, *words[:1], min(words, default=_NUMBERS)}, reverse=True):
      examples = _examples(x, length, most, whole=bool(words))
      try:
        model(_rows(examples, 0, independence.SIZE), training=False)
        return examples
      except (ValueError, tf.errors.InvalidArgumentError) as failure:
        failures.append(failure)
  raise failures[0]


def _check_inference(model: compat.Model, x: trees.Tree) -> None:
  run = lambda start, stop: [np.asarray(t, np.float64) for t in tf.nest.flatten(
      model(_rows(x, start, stop), training=False))]
  together = run(0, 2)
  drawn = any(not np.array_equal(*pair, equal_nan=True) for pair in zip(together, run(0, 2)))
  for row in range(2):
    for i, (single, both) in enumerate(zip(run(row, row + 1), together)):
      if both.shape[0] != 2 or single.shape[0] != 1:
        raise errors.PrivacyError(
            'The first axis of every output must be the batch. Received: outputs of '
            f'shape {single.shape} for one example and {both.shape} for two.')
      near = lambda least: np.allclose(single[0], both[row], rtol=1e-3, atol=least, equal_nan=True)
      if not (drawn or near(1e-4) or near(  # Sums of two sizes keep what cancels in them.
          1e-5 * independence.typical(run(0, independence.SIZE)[i]))):
        raise independence.mixes('the output for one example changes by '
                                 f'{np.max(np.abs(single[0] - both[row])):.3g} when another joins '
                                 'the batch')
  refuse_data_losses(model)


def refuse_data_losses(model: compat.Model) -> None:
  """Raises PrivacyError if a loss was added that depends on the data."""
  if compat.has_data_losses(model):
    raise errors.PrivacyError(
        'The model adds losses that depend on the data (`add_loss`), which would bypass clipping. '
        'Put them into the compiled `loss` of an example. If it needs inner values, as a '
        'variational autoencoder does, join them to the output: '
        '`Concatenate()([decoded, mean, log_variance])`.')


def _rows(x: trees.Tree, start: int, stop: int) -> Any:
  return tf.nest.map_structure(lambda t: tf.convert_to_tensor(t[start:stop]), x)


def _examples(x: trees.Tree, length: int, words: int = 2, whole: bool = False) -> Any:
  """Returns `independence.SIZE` examples as arrays: random for specs, else the first ones of `x`.

  Args:
    x: Nest of inputs or of their specs.
    length: The length of axes of unknown size.
    words: Random integers are below this.
    whole: Whether floating-point inputs get integers, too, because they may be word ids.
  """
  rng = np.random.default_rng(0)

  def leaf(t: Any) -> np.ndarray:
    if not isinstance(t, tf.TensorSpec):
      values = tf.convert_to_tensor(t).numpy()
      return values[np.arange(independence.SIZE) % len(values)]
    shape = [independence.SIZE] + [length if d is None else d for d in t.shape[1:]]
    scales = np.reshape(_SCALES, [-1] + [1] * (len(shape) - 1))
    if t.dtype.is_floating and not whole:
      return (scales * rng.normal(size=shape)).astype(t.dtype.as_numpy_dtype)
    if t.dtype.is_bool:
      return rng.integers(0, 2, size=shape).astype(bool)
    least = 0 if words == 2 else 1  # Zeros are padding, which comes later.
    most = np.clip(np.ceil(scales * words), min(least + 3, words), words).astype(int)
    values = rng.integers(least, most, size=shape)
    values[1] = least + (values[0] - least + 1) % (words - least)  # Inference compares these.
    return values.astype(str) if t.dtype == tf.string else values.astype(t.dtype.as_numpy_dtype)

  return tf.nest.map_structure(leaf, x)
