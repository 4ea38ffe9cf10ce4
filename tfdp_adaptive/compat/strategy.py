# SPDX-License-Identifier: Apache-2.0
"""Replicas and workers of `tf.distribute`, under either Keras."""

from typing import Any, Dict, Optional

import tensorflow as tf

from tfdp_adaptive.compat import stack


def replicated_variable(value: stack.Tree, name: str) -> tf.Variable:
  """Creates a variable to which all replicas assign the same value."""
  return tf.Variable(value, trainable=False, name=name,
                     aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)


def is_strategy(strategy: tf.distribute.Strategy) -> bool:
  """Returns whether a strategy is not the default one of TensorFlow."""
  return not type(strategy).__name__.startswith('_DefaultDistributionStrategy')


def has_replicas() -> bool:
  return tf.distribute.get_strategy().num_replicas_in_sync > 1


def has_workers(strategy: Optional[tf.distribute.Strategy] = None) -> bool:
  """Returns whether some replicas are in other processes."""
  strategy = strategy or tf.distribute.get_strategy()
  replicas = strategy.num_replicas_in_sync
  return replicas > 1 and replicas > len(strategy.extended.worker_devices)


def keras_distribution() -> Any:
  """Returns the argument of `keras.distribution.set_distribution`, or None."""
  return stack.keras.distribution.distribution() if hasattr(stack.keras, 'distribution') else None


def logs_of_replica(logs: Dict[str, Any]) -> Dict[str, Any]:
  """Returns the result of a step on workers, of which Keras 3 averages the first axis."""
  if not (stack.KERAS_3 and has_workers()):
    return logs
  return {name: tf.reshape(value, [1]) for name, value in logs.items()}


def build_symbolically(model: stack.Model, iterator: Any, specs: stack.Tree = None) -> None:
  """Creates the weights and metrics of a Keras 3 model under a strategy, without a batch.

  Args:
    model: The model.
    iterator: The iterator that Keras would read.
    specs: Nest of the specs of a batch. By default those of its data set.
  """
  if model._distribute_strategy is None:
    return
  if specs is None:
    specs = iterator.data_adapter.get_tf_dataset().element_spec
  specs = tf.nest.map_structure(lambda s: s if isinstance(s, tf.TensorSpec) else None, specs)
  with model._distribute_strategy.scope():
    model._symbolic_build(data_batch=specs)


def read(variable: stack.Variable) -> Any:
  """Returns the value of a variable, which may be on several replicas, as a NumPy array."""
  return tf.convert_to_tensor(variable).numpy()


def gather_replicas(vector: tf.Tensor) -> tf.Tensor:
  """Returns the vectors [n] of all replicas as [replicas, n], on each of them."""
  context = tf.distribute.get_replica_context()
  if not has_replicas() or context is None:
    return vector[tf.newaxis]
  mine = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync,
                    dtype=vector.dtype)
  return sum_over_replicas(mine[:, tf.newaxis] * vector)


def sum_over_replicas(tree: stack.Tree) -> stack.Tree:
  """Returns the sum over all replicas, on each of them."""
  context = tf.distribute.get_replica_context()
  if not has_replicas() or context is None:
    return tree
  flat = tf.nest.flatten(tree)
  return tf.nest.pack_sequence_as(tree, context.all_reduce(tf.distribute.ReduceOp.SUM, flat))
