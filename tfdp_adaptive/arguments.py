"""Arguments of private optimizers: what is required, what is refused, how they are saved."""

import inspect

import numpy as np
import tensorflow as tf

from tfdp_adaptive.rules import base


def privatizer_arguments(
    rule, plan, l2_norm_clip, noise_multiplier, batch_size, mechanism, adjacency):
  """Arguments of the privatizer, from the plan or from the call, never from both."""
  explicit = dict(noise_multiplier=noise_multiplier, batch_size=batch_size, mechanism=mechanism,
                  adjacency=adjacency)
  if plan is not None:
    given = {k: v for k, v in explicit.items() if v is not None}
    if given:
      raise ValueError('With a `plan`, these come from the plan and must not be given again. '
                       f'Received: {given}.')
    plan.check_rule(rule)
    return dict(l2_norm_clip=plan.l2_norm_clip if l2_norm_clip is None else l2_norm_clip,
                noise_multiplier=plan.noise_multiplier, batch_size=plan.batch_size,
                mechanism=plan.mechanism, adjacency=plan.adjacency)
  required = dict(l2_norm_clip=l2_norm_clip, noise_multiplier=noise_multiplier,
                  batch_size=batch_size)
  missing = sorted(k for k, v in required.items() if v is None)
  if missing:
    raise ValueError(f'Missing {missing}: there is no safe default. Give them, or a '
                     '`plan=tfdp.PrivacyPlan(...)`, which also accounts for the privacy.')
  base.check_positive(l2_norm_clip=l2_norm_clip, batch_size=batch_size)
  base.check_not_negative(noise_multiplier=noise_multiplier)
  adjacency = adjacency or 'zero_out'
  base.check_adjacency(adjacency)
  return dict(required, mechanism=mechanism, adjacency=adjacency)


def refuse(kwargs):
  """Keras arguments that would break sensitivity or do something else than they say."""
  fixes = {
      'clipnorm': 'Use `l2_norm_clip`.', 'clipvalue': 'Use `l2_norm_clip`.',
      'global_clipnorm': 'Use `l2_norm_clip`.',
      'gradient_accumulation_steps': 'Use `accumulation_steps`: one noise draw per batch.',
      'loss_scale_factor': 'Losses of single examples are not divided by the batch size and need no scaling.',
  }
  for key, fix in fixes.items():
    if kwargs.pop(key, None) is not None:
      raise ValueError(f'`{key}` cannot be used with a private optimizer. {fix}')


def to_config(value):
  """Arrays, in lists too, as something JSON can hold; see `from_config`."""
  if isinstance(value, (list, tuple)):
    return [to_config(v) for v in value]
  if isinstance(value, np.ndarray) or tf.is_tensor(value):
    return {'array': np.asarray(value).tolist()}
  return value


def from_config(value):
  if isinstance(value, (list, tuple)):
    return [from_config(v) for v in value]
  if isinstance(value, dict) and set(value) == {'array'}:
    return np.asarray(value['array'])
  return value


def parameters(factory):
  """Names of a rule factory's arguments."""
  return tuple(inspect.signature(factory).parameters)
