# SPDX-License-Identifier: Apache-2.0
"""`fit` on the replicas of a `tf.distribute` strategy, in one process or several.

Keras feeds the replicas what `batches.workers` distributes, and all workers begin a `fit` alike:
with the same weights, steps and records, and with the coins that the chief drew for it.
"""

from typing import Any, Dict

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive.batches import sources
from tfdp_adaptive.batches import workers

_TRIED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy,
          tf.distribute.OneDeviceStrategy)


def check() -> None:
  """Refuses what spreads a model in a way of which nobody knows that its steps are private.

  Raises:
    PrivacyError: For a strategy that was not tried, or a distribution of Keras 3.
  """
  strategy = tf.distribute.get_strategy()
  if tf.distribute.has_strategy() and not isinstance(strategy, _TRIED):
    why = ('Its workers take steps at different times, on one state of the noise'
           if 'ParameterServer' in type(strategy).__name__ else
           'Private steps were not tried under it')
    raise errors.PrivacyError(
        f'{why}. Received: {type(strategy).__name__}. Use tf.distribute.MirroredStrategy for the '
        'devices of one machine, or tf.distribute.MultiWorkerMirroredStrategy for several.')
  if compat.keras_distribution() is not None:
    raise errors.PrivacyError(
        'A distribution of Keras trains on one device with the TensorFlow backend, and says '
        f'nothing of it. Received: {type(compat.keras_distribution()).__name__}. Take it back by '
        '`keras.distribution.set_distribution(None)`, and use tf.distribute.MirroredStrategy or '
        'MultiWorkerMirroredStrategy.')


def fed(model: compat.Model, x: Any, kwargs: Dict[str, Any]) -> Any:
  """What Keras is to be given for batches `x` of a plan; other data are left as they are.

  Args:
    model: A `DPModel`.
    x: What `fit` was given.
    kwargs: Other arguments of `fit`; steps and callbacks are added to them.
  """
  strategy = model.distribute_strategy
  plan = getattr(x, 'tfdp_plan', None)
  if strategy.num_replicas_in_sync == 1 or plan is None:
    return x
  callbacks = [one for one in tf.nest.flatten(kwargs.get('callbacks')) if one is not None]
  if not compat.BACKUPS_KNOW_WORKERS and compat.has_workers(strategy) and any(
      type(one) is compat.keras.callbacks.BackupAndRestore for one in callbacks):
    raise errors.PrivacyError(
        'A backup must be written by one worker, or steps are lost or taken twice. Received: '
        '`keras.callbacks.BackupAndRestore`, which every worker would write. Use '
        '`tfdp.callbacks.BackupAndRestore`.')
  distributed = workers.Distributed(strategy, x)
  # Data on replicas do not tell how many there are.
  kwargs['steps_per_epoch'] = kwargs.get('steps_per_epoch') or (
      plan.steps - model.optimizer.steps_done)
  kwargs['callbacks'] = [*callbacks, _Begin(distributed)]
  return distributed.batches


class _Begin(compat.keras.callbacks.Callback):
  """Lets all workers begin together, when a backup was restored and no batch was read."""

  def __init__(self, distributed: workers.Distributed) -> None:
    super().__init__()
    self._distributed = distributed

  def on_train_begin(self, logs: Any = None) -> None:
    optimizer = self.model.optimizer
    state = [*self.model.trainable_variables]
    if optimizer.run.state is not None:
      state += tf.nest.flatten(optimizer.rule_state)
    self._distributed.begin(optimizer.steps_done, weights=sources.fingerprint(
        tuple(compat.read(v) for v in state)))
