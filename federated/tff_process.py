# SPDX-License-Identifier: Apache-2.0
"""Clients trained by TensorFlow Federated: `PrivateFedAvg` as a `tff.learning` process."""

from __future__ import annotations

import collections
import contextlib
import functools
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence

import grpc
import tensorflow as tf

from . import engines
from . import groups
from . import keras_classes
from . import local_training
from . import server as server_lib
from . import tff

CLIENTS_PER_CALL = 64  # One at a time; bounds a worker's memory, which holds all answers.
CLIENTS_STEP = 8
GROUPS = 8  # Groups of a call, trained side by side; each needs a model of its own.


class InGroups(NamedTuple):
  """Attributes:

    sums: TFF computation `(weights, broadcast, groups) -> Sums`.
    input_spec: The input spec of a client's batch.
    as_one: Whether all examples of a client make one batch.
  """

  sums: Any
  input_spec: Any
  as_one: bool


class FedAvg(engines.PrivateFedAvg, tff.LearningProcess):
  """A `tff.learning.templates.LearningProcess` whose rounds are private.

  TFF's own state managers write its SECRET state readable for everyone; `simulate` does not.
  `next` is `server.step` after `client_sums`; `simulate` calls the two itself, so that the
  state of the server stays where it is and any number of workers share the clients.

  Attributes:
    client_sums: TFF computation `(weights, broadcast, datasets) -> Sums`.
    in_groups: `() -> InGroups`, the same for many clients in one call; None where the
      model or its data do not allow for that.
  """

  def __init__(self, computations: Any, client_sums: Any, in_groups: Any, **kwargs: Any) -> None:
    tff.LearningProcess.__init__(self, *computations)
    engines.PrivateFedAvg.__init__(self, **kwargs)
    self.client_sums = client_sums
    self.in_groups = functools.lru_cache(None)(in_groups)  # Traced when it is first needed.

  next, initialize, get_model_weights = (
      tff.LearningProcess.next, tff.LearningProcess.initialize,
      tff.LearningProcess.get_model_weights)

  @contextlib.contextmanager
  def reach(self, workers: Any, users: Any) -> Iterator[engines.Engine]:
    if workers not in ((), 1):
      raise ValueError('`workers` is for Keras models: TFF trains the clients of its own models in '
                       f'its own process. Received: workers={workers!r}.')
    in_groups = self.in_groups()
    if in_groups is None:
      compute, calls = self.client_sums, _split
      read = users.create_tf_dataset_for_client
    else:
      compute, calls = functools.partial(_compute_in_groups, in_groups), groups.calls
      read = lambda client: groups.batches_of(
          users, client, in_groups.input_spec, in_groups.as_one)
    yield engines.Engine([_lane(tff.get_context_stack().current, compute)], read, calls,
                         (grpc.RpcError, tf.errors.OpError, TypeError, ValueError))


def _lane(context: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
  def lane(*arguments: Any) -> Any:
    with tff.get_context_stack().install(context):
      return compute(*arguments)

  return lane


def _compute_in_groups(in_groups: Any, weights: Any, broadcast: Any, clients: Sequence[Any]) -> Any:
  """The `Sums` of the clients of one call, by their batches."""
  specs = groups.specs(in_groups.input_spec)
  parts = [collections.OrderedDict(groups.pack(part, specs)._asdict())
           for part in groups.divide(clients, GROUPS)]
  return in_groups.sums(weights, broadcast, parts)


def _split(clients: Any) -> List[Any]:
  """Calls of few different sizes, since a new size compiles everything again in the worker.

  As many as fit into calls of multiples of `CLIENTS_STEP`, `CLIENTS_PER_CALL` at
  most; the rest, if any, in one more.
  """
  clients = list(clients)
  calls, start = [], 0
  while start < len(clients):
    left = min(len(clients) - start, CLIENTS_PER_CALL)
    size = left - left % CLIENTS_STEP or left
    calls.append(clients[start:start + size])
    start += size
  return calls


@keras_classes.kept()
def build(
    model_fn: Any, client_optimizer: Any, make_server: Callable[..., server_lib.Server], *,
    as_one: bool, full_weight: Optional[int], exact_metrics: bool, **settings: Any) -> FedAvg:
  """The process of a TFF model; arguments as `processes` makes them."""
  if as_one:
    client_optimizer = tff.build_sgdm(1.0)
  _check(model_fn, client_optimizer)
  server = make_server(trainable_specs(model_fn))
  init = tff.tf_computation(lambda: server.init(initial_weights(model_fn)))
  state_type = init.type_signature.result
  broadcast = tff.tf_computation(server.broadcast, state_type)
  one_batch = tff.tf_computation(
      lambda data: data.unbatch().batch(2**31 - 1), _data_type(model_fn)) if as_one else None
  arguments = dict(
      server=server, broadcast_type=broadcast.type_signature.result, full_weight=full_weight,
      exact_metrics=exact_metrics)
  client_sums = _client_sums(model_fn, client_optimizer, one_batch, **arguments)
  _, _, data_type = client_sums.type_signature.parameter
  step = tff.tf_computation(
      server.step, state_type, client_sums.type_signature.result.member.answers)

  @tff.federated_computation
  def initialize() -> Any:
    return tff.federated_eval(init, tff.SERVER)

  @tff.federated_computation(tff.FederatedType(state_type, tff.SERVER), data_type)
  def next_round(state: Any, data: Any) -> Any:
    sums = client_sums(
        state.global_model_weights, tff.federated_map(broadcast, state), data)
    state, released = tff.federated_map(step, (state, sums.answers))
    metrics = tff.federated_zip(
        collections.OrderedDict(released=released, not_private=sums.not_private))
    return tff.LearningProcessOutput(state, metrics)

  weights_type = state_type.global_model_weights
  computations = (
      initialize, next_round,
      tff.tf_computation(lambda state: state.global_model_weights, state_type),
      tff.tf_computation(
          lambda state, weights: state._replace(global_model_weights=weights),
          state_type, weights_type))
  return FedAvg(
      computations, client_sums, lambda: _in_groups(
          model_fn, client_optimizer, as_one, weights_type, **arguments),
      server=server, client_optimizer=client_optimizer, **settings)


def _client_sums(
    model_fn: Any, client_optimizer: Any, one_batch: Any, *, server: server_lib.Server,
    broadcast_type: Any, full_weight: Optional[int], exact_metrics: bool) -> Any:
  """`(weights, broadcast, datasets) -> Sums`, a TFF computation."""
  work = _client_work(
      model_fn, client_optimizer, _metrics_aggregator(server, exact_metrics))
  _, weights_type, data_type = work.next.type_signature.parameter
  result_type = work.next.type_signature.result.result.member

  @tff.tf_computation(broadcast_type, result_type)
  def record(broadcast: Any, result: Any) -> Any:
    return server.record(broadcast, local_training.weighted(
        result.update, result.update_weight, full_weight))

  @tff.federated_computation(
      tff.FederatedType(weights_type.member, tff.SERVER),
      tff.FederatedType(broadcast_type, tff.SERVER), data_type)
  def client_sums(weights: Any, broadcast: Any, data: Any) -> Any:
    if one_batch is not None:
      data = tff.federated_map(one_batch, data)
    output = work.next(work.initialize(), tff.federated_broadcast(weights), data)
    sums = tff.federated_sum(
        tff.federated_map(record, (tff.federated_broadcast(broadcast), output.result)))
    metrics = output.measurements.train
    return tff.federated_zip(server_lib.Sums(
        server_lib.Answer(sums.sums, metrics.private), metrics.not_private))

  return client_sums


@keras_classes.kept()
def _in_groups(
    model_fn: Any, client_optimizer: Any, as_one: Any, weights_type: Any, *,
    server: server_lib.Server, broadcast_type: Any, full_weight: Optional[int],
    exact_metrics: bool) -> Optional[InGroups]:
  """`InGroups`, or None where clients must be trained one at a time."""
  with tf.Graph().as_default():
    model = make_model(model_fn)
    finalizers, input_spec = model.metric_finalizers(), model.input_spec
    finalize = tff.sum_then_finalize(finalizers) if exact_metrics else None
  try:
    train = _computation(
        model_fn, client_optimizer,
        local_training.answering(server, finalizers, full_weight), server.zero,
        weights_type=weights_type, broadcast_type=broadcast_type)
  except groups.NotInGroupsError:
    return None
  group_type = train.type_signature.parameter[2]

  @tff.federated_computation(
      tff.FederatedType(weights_type, tff.SERVER), tff.FederatedType(broadcast_type, tff.SERVER),
      tff.FederatedType(group_type, tff.CLIENTS))
  def sums(weights: Any, broadcast: Any, parts: Any) -> Any:
    answers, metrics = tff.federated_map(
        train, (tff.federated_broadcast(weights), tff.federated_broadcast(broadcast), parts))
    exact = (tff.federated_value(collections.OrderedDict(), tff.SERVER) if finalize is None
             else finalize(metrics))
    return tff.federated_zip(server_lib.Sums(tff.federated_sum(answers), exact))

  return InGroups(sums, input_spec, as_one)


def _client_work(model_fn: Any, client_optimizer: Any, metrics_aggregator: Any) -> Any:
  # `Dataset.reduce`, TFF's default, builds the graph of the training step again for
  # every client, which costs ten times what a small model's training does.
  arguments = dict(client_weighting=tff.ClientWeighting.NUM_EXAMPLES,
                   optimizer=client_optimizer, metrics_aggregator=metrics_aggregator,
                   loop_implementation=tff.LoopImplementation.DATASET_ITERATOR)
  if isinstance(model_fn, tff.FunctionalModel):
    return tff.build_functional_client_work(
        model=model_fn, **arguments)
  return tff.build_client_work(model_fn=model_fn, **arguments)


def _metrics_aggregator(server: server_lib.Server, exact_metrics: bool) -> Callable[..., Any]:
  """A TFF metrics aggregator: the sum of bounded vectors, and exact values if asked for."""

  def aggregator(finalizers: Any, local_unfinalized_metrics_type: Any = None) -> Any:
    del local_unfinalized_metrics_type

    @tff.federated_computation
    def aggregate(metrics: Any) -> Any:
      private = tff.federated_value((), tff.SERVER)
      exact = tff.federated_value(collections.OrderedDict(), tff.SERVER)
      if server.private_metrics is not None:
        bounded = tff.tf_computation(
            lambda values: server.bounded_metrics(local_training.finalized(finalizers, values)),
            metrics.type_signature.member)
        private = tff.federated_sum(tff.federated_map(bounded, metrics))
      if exact_metrics:
        exact = tff.sum_then_finalize(finalizers)(metrics)
      return tff.federated_zip(collections.OrderedDict(private=private, not_private=exact))

    return aggregate

  return aggregator


def _computation(
    model_fn: Any, optimizer: Any, answer: Callable[..., Any], zero: Any, *, weights_type: Any,
    broadcast_type: Any) -> Any:
  """The TFF computation `(weights, broadcast, group) -> (sum of answers, sum of metrics)`.

  Args:
    model_fn: As for `build_private_fed_avg`.
    optimizer: The clients' `tff.learning.optimizers.Optimizer`.
    answer: `(broadcast, update, number of examples, metrics) -> the clipped answer of a
      client`; the update is a flat list, metrics are not finalized.
    zero: `() -> the sum of no answers`.
    weights_type: TFF type of the model's weights.
    broadcast_type: TFF type of what else is broadcast.

  Raises:
    NotInGroupsError: The model keeps something that cannot be set back.
  """
  # Variables of the model, and of metrics' finalizers, which write theirs before reading them.
  variables: List[Any] = []
  passing: List[Any] = []
  unknown: List[Any] = []
  made_by = [unknown]

  def record(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    made_by[-1].append(next_creator(**kwargs))
    return made_by[-1][-1]

  @contextlib.contextmanager
  def recorded(made: Any) -> Iterator[None]:
    made_by.append(made)
    yield
    made_by.pop()

  def one_answer(*arguments: Any) -> Any:
    with recorded(passing):
      return answer(*arguments)

  input_spec = _input_spec(model_fn)
  graphs = []

  def train(weights: Any, broadcast: Any, group: Any) -> Any:
    variables.clear()
    with tf.variable_creator_scope(record):  # All others lift theirs into it.
      with recorded(variables):
        model = make_model(model_fn)
      weights_of = {v.ref() for v in tf.nest.flatten(tff.ModelWeights.from_model(model))}
      train_all = local_training.loop(
          model, input_spec, local_training.FunctionalOptimizer(optimizer), one_answer, zero,
          [v for v in variables if v.ref() not in weights_of])
      graphs.append(train_all.get_concrete_function(weights, broadcast, group).graph)
      return train_all(weights, broadcast, group)

  group_type = tff.tensorflow_to_type(collections.OrderedDict(groups.specs(input_spec)._asdict()))
  result = tff.tf_computation(train, weights_type, broadcast_type, group_type)
  local_training.check_memory(graphs[-1], variables + passing)
  return result


def _check(model_fn: Any, client_optimizer: Any) -> None:
  if not callable(model_fn) and not isinstance(model_fn, tff.FunctionalModel):
    raise ValueError('`model_fn` must be a function that makes a TFF model, or a FunctionalModel. '
                     f'Received: model_fn={model_fn!r}.')
  if not isinstance(client_optimizer, tff.Optimizer):
    raise ValueError('`client_optimizer_fn` must be a `tff.learning.optimizers.Optimizer`, or a '
                     f'function that returns one. Received: {client_optimizer!r}.')


def make_model(model_fn: Any) -> Any:
  """A `tff.learning.models.VariableModel`."""
  return (tff.model_from_functional(model_fn)
          if isinstance(model_fn, tff.FunctionalModel) else model_fn())


def initial_weights(model_fn: Any) -> Any:
  """`tff.learning.models.ModelWeights` of a new model."""
  if isinstance(model_fn, tff.FunctionalModel):
    trainable, non_trainable = model_fn.initial_weights
    return tff.ModelWeights(
        tuple(tf.convert_to_tensor(w) for w in trainable),
        tuple(tf.convert_to_tensor(w) for w in non_trainable))
  return tff.ModelWeights.from_model(model_fn())


def trainable_specs(model_fn: Any) -> Any:
  """Nest of `tf.TensorSpec` of a model's trainable weights, as TFF passes them."""
  if isinstance(model_fn, tff.FunctionalModel):
    return tuple(tf.TensorSpec(w.shape, w.dtype) for w in model_fn.initial_weights[0])
  with tf.Graph().as_default():
    model = model_fn()
    if not isinstance(model, tff.VariableModel):
      raise ValueError('`model_fn` must make a `tff.learning.models.VariableModel`, such as of '
                       f'`tff.learning.models.from_keras_model`. Received: {model!r}.')
    weights = tff.weights_type_from_model(model)
  return tff.type_to_tf_tensor_specs(weights.trainable)


def _data_type(model_fn: Any) -> Any:
  """The TFF type of a client's data set."""
  return tff.SequenceType(tff.tensorflow_to_type(_input_spec(model_fn)))


def _input_spec(model_fn: Any) -> Any:
  """Nest of `tf.TensorSpec` of a batch of the model."""
  if isinstance(model_fn, tff.FunctionalModel):
    return model_fn.input_spec
  with tf.Graph().as_default():
    return model_fn().input_spec
