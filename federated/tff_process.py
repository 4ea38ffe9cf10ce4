# SPDX-License-Identifier: Apache-2.0
"""Models of TensorFlow Federated: `PrivateFedAvg` as a `tff.learning` process.

This file has every name of TFF that the library uses, for release 0.87. Later releases have the
language of computations in a package of its own, `federated_language`.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import gc
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Set, Union

import grpc
import tensorflow as tf
import tensorflow_federated as tff

from tfdp_adaptive import trees

from . import engines
from . import groups
from . import in_process
from . import local_training
from . import server as server_lib

ModelFn = Callable[[], tff.learning.models.VariableModel]
Computation = Any  # A computation of TFF.
Value = Any  # A value inside a computation of TFF.
CLIENTS = 8  # The clients of a call: few, since a new number of them compiles everything again.


class FedAvg(tff.learning.templates.LearningProcess, in_process.InProcess):
  """A `tff.learning.templates.LearningProcess` whose rounds are private.

  TFF's own state managers write its SECRET state readable for everyone; `simulate` does not.
  `next` is `server.step` after `client_sums`, in TFF. `simulate` trains the clients in this
  process, in the same steps. It trains those of a functional model, and of a model that may keep
  one client's data for the next, by `client_sums`, where each client has a model of its own.

  Attributes:
    client_sums: TFF computation `(weights, broadcast, datasets) -> Answer`.
  """

  def __init__(
      self, computations: Sequence[Computation], client_sums: Computation, input_spec: trees.Tree,
      **kwargs: Any) -> None:
    tff.learning.templates.LearningProcess.__init__(self, *computations)
    in_process.InProcess.__init__(self, **kwargs)
    self.client_sums, self._input_spec = client_sums, input_spec

  history = engines.PrivateFedAvg.history

  def batch_spec(self, users: engines.ClientData) -> trees.Tree:
    return self._input_spec

  @contextlib.contextmanager
  def reach(self, workers: engines.Workers, users: engines.ClientData
            ) -> Iterator[engines.Engine]:
    if isinstance(workers, engines.Remote):
      raise ValueError("`workers='ray'` is for Keras models. Received: a model of TFF. Give a "
                       'number of clients to train side by side.')
    try:
      self.worker(0, self._input_spec)
      engine = super().reach(workers, users)
    except groups.NotInGroupsError:
      engine = self.one_by_one(users)
    with engine as one:
      yield one

  @contextlib.contextmanager
  def one_by_one(self, users: Any) -> Iterator[engines.Engine]:
    """Returns TFF's own engine, in which each client has a model of its own."""
    context = tff.framework.get_context_stack().current

    def train(*arguments: Any) -> server_lib.Sums:  # Runs in another thread, which has no context.
      with tff.framework.get_context_stack().install(context):
        return server_lib.Sums(self.client_sums(*arguments))

    yield engines.Engine(
        [train], users.create_tf_dataset_for_client,
        functools.partial(groups.calls, most=CLIENTS),
        (grpc.RpcError, tf.errors.OpError, TypeError, ValueError))


def _all_below(kind: type) -> Set[type]:
  children: List[type] = kind.__subclasses__()
  return set(children).union(*map(_all_below, children))


@contextlib.contextmanager
def _keras_classes_kept() -> Iterator[None]:
  """Restores the bases of Keras' classes, so that models can be made in graphs inside.

  Keras 2 changes the bases of a model's class, for good and for all of its objects, when one is
  made inside a graph as TFF does. Models made before then end in "invalid state".
  """
  bases = {kind: kind.__bases__ for kind in _all_below(tf.keras.layers.Layer)}
  try:
    yield
  finally:
    for kind, before in bases.items():
      if kind.__bases__ != before:
        kind.__bases__ = before


@_keras_classes_kept()
def build(
    model_fn: ModelFn, client_optimizer: tff.learning.optimizers.Optimizer,
    make_server: Callable[[trees.Tree], server_lib.Server], *, as_one: bool) -> FedAvg:
  """Returns the process of a TFF model, with the arguments that `processes` makes."""
  if as_one:
    client_optimizer = tff.learning.optimizers.build_sgdm(1.0)
  if not isinstance(client_optimizer, tff.learning.optimizers.Optimizer):
    raise ValueError('`client_optimizer_fn` must be a `tff.learning.optimizers.Optimizer`, or a '
                     f'function that returns one. Received: {client_optimizer!r}.')
  make_model = model_fn = as_function(model_fn)
  model = model_fn()
  if isinstance(model_fn, functools.partial):
    make_model = _refuse_groups
  if not isinstance(model, tff.learning.models.VariableModel):
    raise ValueError('`model_fn` must make a `tff.learning.models.VariableModel`, such as of '
                     f'`tff.learning.models.from_keras_model`. Received: {model!r}.')
  server = make_server(trainable_specs(model))
  init = tff.tensorflow.computation(lambda: server.init(
      tff.learning.models.ModelWeights.from_model(model_fn())))
  state_type = init.type_signature.result
  broadcast = tff.tensorflow.computation(server.broadcast, state_type)
  one_batch = tff.tensorflow.computation(
      lambda data: data.unbatch().batch(2**31 - 1), tff.SequenceType(
          tff.types.tensorflow_to_type(model.input_spec))) if as_one else None
  client_sums = _client_sums(
      model_fn, client_optimizer, one_batch, server=server,
      broadcast_type=broadcast.type_signature.result)
  _, _, data_type = client_sums.type_signature.parameter
  step = tff.tensorflow.computation(
      server.step, state_type, client_sums.type_signature.result.member)

  @tff.federated_computation
  def initialize() -> Value:
    return tff.federated_eval(init, tff.SERVER)

  @tff.federated_computation(tff.FederatedType(state_type, tff.SERVER), data_type)
  def next_round(state: Value, data: Value) -> Value:
    sums = client_sums(
        state.global_model_weights, tff.federated_map(broadcast, state), data)
    state, released = tff.federated_map(step, (state, sums))
    metrics = tff.federated_zip(collections.OrderedDict(released=released))
    return tff.learning.templates.LearningProcessOutput(state, metrics)

  weights_type = state_type.global_model_weights
  computations = (
      initialize, next_round,
      tff.tensorflow.computation(lambda state: state.global_model_weights, state_type),
      tff.tensorflow.computation(
          lambda state, weights: state._replace(global_model_weights=weights),
          state_type, weights_type))
  return FedAvg(
      computations, client_sums, model.input_spec, make_model=make_model,
      server=server, client_optimizer=client_optimizer, as_one=as_one)


def _client_sums(
    model_fn: ModelFn, client_optimizer: tff.learning.optimizers.Optimizer,
    one_batch: Optional[Computation], *, server: server_lib.Server,
    broadcast_type: tff.Type) -> Computation:
  """Returns `(weights, broadcast, datasets) -> Answer`, a TFF computation."""
  # `Dataset.reduce`, TFF's default, builds the graph of the training step again for
  # every client, which costs ten times what a small model's training does.
  work = tff.learning.templates.build_model_delta_client_work(
      model_fn=model_fn, optimizer=client_optimizer,
      client_weighting=tff.learning.ClientWeighting.NUM_EXAMPLES,
      metrics_aggregator=_metrics_aggregator(server),
      loop_implementation=tff.learning.LoopImplementation.DATASET_ITERATOR)
  _, weights_type, data_type = work.next.type_signature.parameter
  result_type = work.next.type_signature.result.result.member

  @tff.tensorflow.computation(broadcast_type, result_type)
  def record(broadcast: Value, result: Value) -> Value:
    return server.record(broadcast, result.update)

  @tff.federated_computation(
      tff.FederatedType(weights_type.member, tff.SERVER),
      tff.FederatedType(broadcast_type, tff.SERVER), data_type)
  def client_sums(weights: Value, broadcast: Value, data: Value) -> Value:
    if one_batch is not None:
      data = tff.federated_map(one_batch, data)
    output = work.next(work.initialize(), tff.federated_broadcast(weights), data)
    sums = tff.federated_sum(
        tff.federated_map(record, (tff.federated_broadcast(broadcast), output.result)))
    return tff.federated_zip(server_lib.Answer(sums.sums, output.measurements.train))

  return client_sums


def _metrics_aggregator(server: server_lib.Server) -> Callable[..., Computation]:
  """Returns a TFF metrics aggregator: the sum of bounded vectors, if they are wanted."""

  def aggregator(finalizers: Mapping[str, local_training.Finalizer],
                 local_unfinalized_metrics_type: Optional[tff.Type] = None) -> Computation:
    del local_unfinalized_metrics_type

    @tff.federated_computation
    def aggregate(metrics: Value) -> Value:
      if server.private_metrics is None:
        return tff.federated_value((), tff.SERVER)
      bounded = tff.tensorflow.computation(
          lambda values: server.bounded_metrics(local_training.finalized(finalizers, values)),
          metrics.type_signature.member)
      return tff.federated_sum(tff.federated_map(bounded, metrics))

    return aggregate

  return aggregator


def as_function(model_fn: Union[ModelFn, tff.learning.models.FunctionalModel]) -> ModelFn:
  """Returns a function that makes a model, also of a functional model."""
  if isinstance(model_fn, tff.learning.models.FunctionalModel):
    return functools.partial(tff.learning.models.model_from_functional, model_fn)
  if not callable(model_fn):
    raise ValueError('`model_fn` must be a function that makes a TFF model, or a FunctionalModel. '
                     f'Received: model_fn={model_fn!r}.')
  return model_fn


def _refuse_groups() -> tff.learning.models.VariableModel:
  raise groups.NotInGroupsError('A functional model runs in a computation of TFF alone.')


def trainable_specs(model: tff.learning.models.VariableModel) -> trees.Tree:
  """Returns the nest of `tf.TensorSpec`s of the trainable weights, as TFF passes them."""
  return tff.types.type_to_tf_tensor_specs(
      tff.learning.models.weights_type_from_model(model).trainable)


@atexit.register
def _end_worker() -> None:
  """Ends TFF's worker, which has Python's output: whoever reads it would wait for ever."""
  tff.test.set_no_default_context()
  gc.collect()
