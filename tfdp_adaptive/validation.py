"""Finds what would let one example change the gradients of another."""

import weakref

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.clipping import bookkeeping

_PROBES = 8  # A layer may mix some examples only, or draw which.
_PROBED = weakref.WeakSet()  # Models that passed.

# Layers that mix the examples of a batch in training; the first ones when they are frozen, too.
_BLENDING = ('MixUp', 'CutMix')
_MIXING = {
    'BatchNormalization': 'LayerNormalization or GroupNormalization',
    'BatchNormalizationV1': 'LayerNormalization or GroupNormalization',
    'SyncBatchNormalization': 'LayerNormalization or GroupNormalization',
    'SpectralNormalization': 'a weight constraint (its power iteration is stateful)',
}


def validate_structure(model):
  """Raises `PrivacyError` for layers known to mix examples, or to leak through losses."""
  problems = []
  for layer in model._flatten_layers():
    name = type(layer).__name__
    if name in _MIXING and layer.trainable:
      problems.append(f'{layer.name} ({name}) normalises over the batch; use {_MIXING[name]}, '
                      'or freeze it (trainable=False)')
    if name in _BLENDING:
      problems.append(f'{layer.name} ({name}) blends the examples of a batch; leave it out')
    if getattr(layer, 'activity_regularizer', None) is not None:
      problems.append(f'{layer.name} has an activity_regularizer, a loss that depends on the data '
                      'outside the compiled loss; put it into `loss`')
    if getattr(layer, 'stateful', False) and not isinstance(layer, compat.keras.metrics.Metric):
      problems.append(f'{layer.name} is stateful: it carries data from batch to batch')
  if problems:
    raise errors.PrivacyError('The model cannot be trained privately: ' + '; '.join(problems) + '.')


def validate_model(model, x=None):
  """Checks that every example's output depends on that example alone.

  Structurally (batch normalization, activity regularizers, stateful layers) and by
  numeric probes: in inference mode the output of an example must not move when
  another joins the batch; in training mode it must have no gradient by the others'
  inputs or what layers do for them, and no state may be written but random seeds.

  Args:
    model: A built Keras model.
    x: Inputs for the probe, at least two examples, or their specs; made up from
      the model's own input specification where it has one.

  Raises:
    PrivacyError: Naming every problem found.
    ValueError: If the model is not built and no `x` is given.
  """
  if x is not None and not model.built:
    build(model, x)
  if not model.built:
    raise ValueError('`model` must be built before it can be validated. Call it once, or pass `x`.')
  validate_structure(model)
  x = _probe_inputs(model) if x is None else _as_values(x)
  if x is None:
    return
  _check_inference(model, x)
  _check_training(model, x)
  _PROBED.add(model)


def check_probed(model):
  """Raises `PrivacyError` for a model that has not passed the probes of `validate_model`."""
  if model not in _PROBED:
    raise errors.PrivacyError(
        'With several replicas the model must be validated before its first step, which cannot do '
        'it. Received: a model that is not. Call `tfdp.validate_model(model, x)` with two '
        'examples, or use `fit`.')


def build(model, x):
  """Makes the weights of a model by calling it on an example of `x`, inputs or their specs."""
  model(_rows(_as_values(x), 0, 1), training=False)


def _check_inference(model, x):
  run = lambda x: tf.nest.map_structure(
      lambda t: np.asarray(t, np.float64), model(x, training=False))
  together = tf.nest.flatten(run(_rows(x, 0, 2)))
  for row in range(2):
    for single, both in zip(tf.nest.flatten(run(_rows(x, row, row + 1))), together):
      if both.shape[0] != 2 or single.shape[0] != 1:
        raise errors.PrivacyError(
            'The first axis of every output must be the batch. Received: outputs of '
            f'shape {single.shape} for one example and {both.shape} for two.')
      if not np.allclose(single[0], both[row], rtol=1e-3, atol=1e-4, equal_nan=True):
        _mixes('the output for one example changes by '
               f'{np.max(np.abs(single[0] - both[row])):.3g} when another joins the batch')
  _refuse_data_losses(model)


def _refuse_data_losses(model):
  if compat.has_data_losses(model):
    raise errors.PrivacyError(
        'The model adds losses that depend on the data (`add_loss`), which would bypass clipping. '
        'Put them into the compiled `loss`.')


def _check_training(model, x):
  """Dropout makes runs incomparable, so gradients across examples are looked at instead."""
  weights = model.non_trainable_variables
  before = _values(weights)
  worst = 0.0
  if bookkeeping.supports(model, x)[0]:  # Else another engine runs every example by itself.
    probe = tf.function(lambda row: bookkeeping.influence(model, x, row), autograph=False)
    count = tf.nest.flatten(x)[0].shape[0]
    worst = max(float(probe(tf.constant(i % count))) for i in range(_PROBES))
  states = [_values(weights)]
  for data in [x] + [tf.nest.map_structure(lambda t: tf.repeat(t[i:i + 1], t.shape[0], 0), x)
                     for i in range(2)] * 2:
    model(data, training=True)
    states.append(_values(weights))
  written = []
  for variable, start, *after in zip(weights, before, *states):
    if tf.as_dtype(variable.dtype).is_floating:
      if not np.array_equal(start, after[-1]):
        written.append(compat.describe(variable))
        variable.assign(start)
    elif np.any(np.diff(np.stack(after), 2, axis=0)):  # Seeds count the steps.
      written.append(compat.describe(variable))
  _refuse_data_losses(model)
  if written:
    raise errors.PrivacyError(
        'Layers write statistics of the data into weights that are not trained, around clipping '
        f'and noise. Received: {written}. Freeze these layers.')
  if worst > 0:
    _mixes(f"an example's outputs have a gradient of {worst:.3g} by another's inputs or "
           'activations')


def _values(weights):
  """Integers as Python's, whose differences do not overflow."""
  return [np.array(v.numpy(), None if tf.as_dtype(v.dtype).is_floating else object)
          for v in weights]


def _mixes(how):
  raise errors.PrivacyError(
      f'The model mixes examples: {how}. Per-example clipping then bounds nothing. '
      'Remove the layer that looks across axis 0.')


def _rows(x, start, stop):
  return tf.nest.map_structure(lambda t: t[start:stop], x)


def _as_values(x):
  """Made-up examples for specs; values as they are."""
  return tf.nest.map_structure(
      lambda t: _example(t.shape, t.dtype) if isinstance(t, tf.TensorSpec)
      else tf.convert_to_tensor(t), x)


def _example(shape, dtype):
  rng = np.random.default_rng(0)
  shape = [8] + [4 if d is None else d for d in shape[1:]]
  dtype = tf.as_dtype(dtype)
  if dtype.is_floating:
    return tf.constant(rng.normal(size=shape), dtype)
  values = rng.integers(0, 2, size=shape)
  values[1] = 1 - values[0]  # The two that inference is checked with differ.
  return tf.cast(tf.constant(values), dtype)


def tells_inputs(model):
  """Whether examples can be made up from the model alone."""
  return bool(model.built and getattr(model, 'inputs', None))


def _probe_inputs(model):
  """Made-up examples, or None where the model does not tell its inputs."""
  if not tells_inputs(model):
    return None
  values = [_example(spec.shape, spec.dtype) for spec in model.inputs]
  structure = compat.input_structure(model)
  if structure is not None and len(tf.nest.flatten(structure)) == len(values):
    return tf.nest.pack_sequence_as(structure, values)
  return values[0] if len(values) == 1 else values
