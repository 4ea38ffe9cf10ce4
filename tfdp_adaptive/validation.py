"""Finds what would let one example change the gradients of another."""

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.optimizers import PrivacyError

# Layers whose training-time output mixes the examples of a batch.
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
    if getattr(layer, 'activity_regularizer', None) is not None:
      problems.append(f'{layer.name} has an activity_regularizer, a loss that depends on the data '
                      'outside the compiled loss; put it into `loss`')
    if getattr(layer, 'stateful', False) and hasattr(layer, 'reset_states'):
      problems.append(f'{layer.name} is stateful: it carries data from batch to batch')
  if problems:
    raise PrivacyError('The model cannot be trained privately: ' + '; '.join(problems) + '.')


def validate_model(model, x=None):
  """Checks that every example's output depends on that example alone.

  Structurally (batch normalization, activity regularizers, stateful layers) and by
  a numeric probe: the output of an example must not move when the others do.

  Args:
    model: A built Keras model.
    x: Inputs for the probe, at least two examples; made up from the model's input
      specification where it has one.

  Raises:
    PrivacyError: Naming every problem found.
    ValueError: If the model is not built and no `x` is given.
  """
  if x is not None and not model.built:
    model(base_slice(x, 1), training=False)
  if not model.built:
    raise ValueError('`model` must be built before it can be validated. Call it once, or pass `x`.')
  validate_structure(model)
  x = _probe_inputs(model) if x is None else tf.nest.map_structure(tf.convert_to_tensor, x)
  if x is None:
    return
  pair = base_slice(x, 2)
  alone = _run(model, base_slice(x, 1))
  together = _run(model, pair)
  for single, both in zip(tf.nest.flatten(alone), tf.nest.flatten(together)):
    if both.shape[0] != 2 or single.shape[0] != 1:
      raise PrivacyError('The first axis of every output must be the batch. Received: outputs of '
                         f'shape {single.shape} for one example and {both.shape} for two.')
    if not np.allclose(single[0], both[0], rtol=1e-3, atol=1e-4, equal_nan=True):
      raise PrivacyError(
          'The model mixes examples: the output for one example changes by '
          f'{float(np.max(np.abs(single[0] - both[0]))):.3g} when another joins the batch. '
          'Per-example clipping then bounds nothing. Remove the layer that looks across axis 0.')
  if compat.has_data_losses(model):
    raise PrivacyError('The model adds losses that depend on the data (`add_loss`), which would '
                       'bypass clipping. Put them into the compiled `loss`.')


def base_slice(x, count):
  return tf.nest.map_structure(lambda t: t[:count], x)


def _run(model, x):
  # Inference mode for determinism (dropout); training-only mixing is caught structurally.
  return tf.nest.map_structure(lambda t: np.asarray(t, np.float64), model(x, training=False))


def _probe_inputs(model):
  """Two made-up examples, or None where the model does not tell its inputs."""
  inputs = getattr(model, 'inputs', None)
  if not inputs:
    return None
  rng = np.random.default_rng(0)

  def example(spec):
    shape = [2] + [4 if d is None else d for d in spec.shape[1:]]
    dtype = tf.as_dtype(spec.dtype)
    if dtype.is_floating:
      return tf.constant(rng.normal(size=shape), dtype)
    return tf.cast(tf.constant(rng.integers(0, 2, size=shape)), dtype)

  values = [example(spec) for spec in inputs]
  structure = compat.input_structure(model)
  if structure is not None and len(tf.nest.flatten(structure)) == len(values):
    return tf.nest.pack_sequence_as(structure, values)
  return values[0] if len(values) == 1 else values
