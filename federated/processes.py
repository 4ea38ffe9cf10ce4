# SPDX-License-Identifier: Apache-2.0
"""Federated averaging with user-level privacy and an adaptive server optimizer.

Clients train from the server's weights and answer with `initial - final`, which
is gradient-like. The answer of every client is clipped in the geometry of the
round, the sum is noised and divided by the EXPECTED number of clients, and the
rule turns it into a direction of descent:

    weights <- weights - server_learning_rate * direction
"""

from __future__ import annotations

import collections
import functools
from typing import Any, Callable, Dict, NamedTuple, Optional

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import privacy

from . import groups
from . import keras_classes
from . import server as server_lib
from . import tff


class Sums(NamedTuple):
  """Of the clients of a round, or of some of them; SECRET, and so is `not_private`."""

  answers: server_lib.Answer
  not_private: Any


class InGroups(NamedTuple):
  """Attributes:

    sums: TFF computation `(weights, broadcast, groups) -> Sums`.
    input_spec: Of a client's batch.
    as_one: Whether all examples of a client make one batch.
  """

  sums: Any
  input_spec: Any
  as_one: bool


class PrivateFedAvg(tff.LearningProcess):
  """A `tff.learning.templates.LearningProcess` that knows what it promises.

  Its state is SECRET: it holds the noise still to come. Only
  `get_model_weights(state)` and `metrics['released']` may be published. TFF's own state
  managers write it readable for everyone; `simulate` does not.

  Whoever calls `next` answers for the cohort: it must be drawn as the plan says, and
  every client must be in it once at most. A data set does not say whose it is, so
  `next` takes one client five times, and one user then moves five clip norms;
  `simulate` draws and checks.

  `next` is `server.step` after `client_sums`. Whoever drives rounds can call the
  two themselves, as `simulate` does: the state of the server then stays where it
  is, and any number of workers share the clients.

  Attributes:
    plan: The `tfdp.PrivacyPlan` of the run.
    rule: The server's rule.
    model_fn: What the process was built from.
    server: The `Server`.
    client_sums: TFF computation `(weights, broadcast, datasets) -> Sums`.
    in_groups: `() -> InGroups`, the same for many clients in one call; None where the
      model or its data do not allow for that.
    settings: {argument: value}, for the statement and to recognize a saved run.
    seed: The seed of a test, or None.
  """

  def __init__(
      self, computations: Any, *, plan: privacy.PrivacyPlan, rule: contract.Rule, model_fn: Any,
      server: server_lib.Server, client_sums: Any, in_groups: Any, settings: Dict[str, Any],
      seed: Optional[int]) -> None:
    super().__init__(*computations)
    self.plan, self.rule, self.model_fn, self.server = plan, rule, model_fn, server
    self.client_sums, self.settings, self.seed = client_sums, settings, seed
    self.in_groups = functools.lru_cache(None)(in_groups)  # Traced when it is first needed.


def build_private_fed_avg(
    model_fn: Any, *, server_rule: contract.Rule, plan: privacy.PrivacyPlan,
    server_learning_rate: float, client_optimizer_fn: Any, client_weighting: str = 'uniform',
    max_examples_per_client: Optional[int] = None,
    quantile_clip: Optional[server_lib.QuantileClip] = None,
    private_metrics: Optional[server_lib.PrivateMetrics] = None, exact_metrics: bool = False,
    seed: Optional[int] = None) -> PrivateFedAvg:
  """Builds federated averaging with user-level differential privacy.

  Args:
    model_fn: A no-argument function that makes a `tff.learning.models.VariableModel`,
      or a `tff.learning.models.FunctionalModel`.
    server_rule: A `tfdp.rules` rule that needs no public gradients.
    plan: A `tfdp.PrivacyPlan` with unit='user': `batch_size` is the expected
      number of clients per round, `steps` the number of rounds, `l2_norm_clip`
      bounds a client's update, in the units of the rule's scaled records.
    server_learning_rate: Step size of the server, > 0, or a TensorFlow function
      of the number of rounds done (a Keras schedule, for instance).
    client_optimizer_fn: A `tff.learning.optimizers.Optimizer` (or a function that
      returns one) for the training on the clients.
    client_weighting: 'uniform', or 'num_examples': an update counts in proportion
      to the client's examples, up to `max_examples_per_client`, whose weight is
      one. Weights above one are refused: they would multiply the sensitivity.
    max_examples_per_client: For 'num_examples'; a public constant.
    quantile_clip: A `QuantileClip`, or None for a fixed clip norm.
    private_metrics: `PrivateMetrics` of the clients' training, or None.
    exact_metrics: Whether rounds also return TFF's sums of the clients' training
      metrics, as `metrics['not_private']`: exact, for diagnosis only.
    seed: For tests only: fixed noise protects nobody.

  Returns:
    A `PrivateFedAvg`. `next` returns `metrics` with what was `released` privately
    beside the weights, and what is `not_private`.
  """
  if callable(client_optimizer_fn) and not isinstance(client_optimizer_fn, tff.Optimizer):
    client_optimizer_fn = client_optimizer_fn()
  return _build(
      model_fn, client_optimizer_fn, None, rule=server_rule, plan=plan,
      learning_rate=server_learning_rate, client_weighting=client_weighting,
      max_examples=max_examples_per_client, quantile_clip=quantile_clip,
      private_metrics=private_metrics, exact_metrics=exact_metrics, seed=seed)


def build_private_fed_sgd(
    model_fn: Any, *, server_rule: contract.Rule, plan: privacy.PrivacyPlan,
    server_learning_rate: float, client_weighting: str = 'uniform',
    max_examples_per_client: Optional[int] = None,
    quantile_clip: Optional[server_lib.QuantileClip] = None,
    private_metrics: Optional[server_lib.PrivateMetrics] = None, exact_metrics: bool = False,
    seed: Optional[int] = None) -> PrivateFedAvg:
  """Federated SGD: a client's answer is its gradient, the mean over its examples.

  All of a client's examples of a round make one batch of one step of size one.
  For the arguments see `build_private_fed_avg`.
  """
  one_batch = tff.tf_computation(
      lambda data: data.unbatch().batch(2**31 - 1), _data_type(model_fn))
  return _build(
      model_fn, tff.build_sgdm(1.0), one_batch, rule=server_rule, plan=plan,
      learning_rate=server_learning_rate, client_weighting=client_weighting,
      max_examples=max_examples_per_client, quantile_clip=quantile_clip,
      private_metrics=private_metrics, exact_metrics=exact_metrics, seed=seed)


@keras_classes.kept()
def _build(
    model_fn: Any, client_optimizer: Any, one_batch: Any, *, rule: contract.Rule,
    plan: privacy.PrivacyPlan, learning_rate: float, client_weighting: str,
    max_examples: Optional[int], quantile_clip: Optional[server_lib.QuantileClip],
    private_metrics: Optional[server_lib.PrivateMetrics], exact_metrics: bool,
    seed: Optional[int]) -> PrivateFedAvg:
  _check(model_fn, client_optimizer, rule, plan, learning_rate, client_weighting, max_examples,
         seed)
  server = server_lib.Server(rule, trainable_specs(model_fn), plan, learning_rate, quantile_clip,
                             private_metrics, seed)
  init = tff.tf_computation(lambda: server.init(initial_weights(model_fn)))
  state_type = init.type_signature.result
  broadcast = tff.tf_computation(server.broadcast, state_type)
  arguments = dict(
      server=server, broadcast_type=broadcast.type_signature.result,
      full_weight=max_examples if client_weighting == 'num_examples' else None,
      private_metrics=private_metrics, exact_metrics=exact_metrics)
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
  settings = dict(
      server_rule=rule, server_learning_rate=learning_rate, client_optimizer=client_optimizer,
      client_weighting=client_weighting, max_examples_per_client=max_examples,
      quantile_clip=quantile_clip, private_metrics=private_metrics)
  return PrivateFedAvg(computations, plan=plan, rule=rule, model_fn=model_fn, server=server,
                       client_sums=client_sums, settings=settings, seed=seed,
                       in_groups=lambda: _in_groups(
                           model_fn, client_optimizer, one_batch is not None,
                           state_type.global_model_weights, **arguments))


def _client_sums(
    model_fn: Any, client_optimizer: Any, one_batch: Any, *, server: server_lib.Server,
    broadcast_type: Any, full_weight: Optional[int],
    private_metrics: Optional[server_lib.PrivateMetrics], exact_metrics: bool) -> Any:
  """`(weights, broadcast, datasets) -> Sums`, a TFF computation."""
  work = _client_work(
      model_fn, client_optimizer, _metrics_aggregator(server, private_metrics, exact_metrics))
  _, weights_type, data_type = work.next.type_signature.parameter
  result_type = work.next.type_signature.result.result.member

  @tff.tf_computation(broadcast_type, result_type)
  def record(broadcast: Any, result: Any) -> Any:
    return server.record(broadcast, _weighted(result.update, result.update_weight, full_weight))

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
    return tff.federated_zip(Sums(
        server_lib.Answer(sums.sums, sums.within, metrics.private), metrics.not_private))

  return client_sums


def _weighted(update: Any, examples: Any, full_weight: Optional[int]) -> Any:
  """An update that counts in proportion to its examples, up to a weight of one."""
  if full_weight is None:
    return update
  weight = tf.minimum(tf.cast(examples, tf.float32) / full_weight, 1.0)
  return tf.nest.map_structure(lambda u: tf.cast(weight, u.dtype) * u, update)


@keras_classes.kept()
def _in_groups(
    model_fn: Any, client_optimizer: Any, as_one: Any, weights_type: Any, *,
    server: server_lib.Server, broadcast_type: Any, full_weight: Optional[int],
    private_metrics: Optional[server_lib.PrivateMetrics],
    exact_metrics: bool) -> Optional[InGroups]:
  """`InGroups`, or None where clients must be trained one at a time."""
  with tf.Graph().as_default():
    model = (tff.model_from_functional(model_fn)
             if isinstance(model_fn, tff.FunctionalModel) else model_fn())
    finalizers, input_spec = model.metric_finalizers(), model.input_spec
    finalize = tff.sum_then_finalize(finalizers) if exact_metrics else None
  specs = trainable_specs(model_fn)

  def answer(broadcast: Any, update: Any, examples: Any, metrics: Any) -> Any:
    update = _weighted(tf.nest.pack_sequence_as(specs, update), examples, full_weight)
    bounded = (server.bounded_metrics(_finalized(finalizers, metrics))
               if private_metrics is not None else ())
    return server.record(broadcast, update, bounded)

  try:
    train = groups.computation(model_fn, client_optimizer, answer, server.zero,
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
    return tff.federated_zip(Sums(tff.federated_sum(answers), exact))

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


def _metrics_aggregator(
    server: server_lib.Server, private_metrics: Optional[server_lib.PrivateMetrics],
    exact_metrics: bool) -> Callable[..., Any]:
  """A TFF metrics aggregator: the sum of bounded vectors, and exact values if asked for."""

  def aggregator(finalizers: Any, local_unfinalized_metrics_type: Any = None) -> Any:
    del local_unfinalized_metrics_type

    @tff.federated_computation
    def aggregate(metrics: Any) -> Any:
      private = tff.federated_value((), tff.SERVER)
      exact = tff.federated_value(collections.OrderedDict(), tff.SERVER)
      if private_metrics is not None:
        bounded = tff.tf_computation(
            lambda values: server.bounded_metrics(_finalized(finalizers, values)),
            metrics.type_signature.member)
        private = tff.federated_sum(tff.federated_map(bounded, metrics))
      if exact_metrics:
        exact = tff.sum_then_finalize(finalizers)(metrics)
      return tff.federated_zip(collections.OrderedDict(private=private, not_private=exact))

    return aggregate

  return aggregator


def _finalized(finalizers: Any, values: Any) -> Any:
  if callable(finalizers):
    return finalizers(values)
  return {name: finalize(values[name]) for name, finalize in finalizers.items()}


def _check(
    model_fn: Any, client_optimizer: Any, rule: contract.Rule, plan: privacy.PrivacyPlan,
    learning_rate: float, client_weighting: str, max_examples: Optional[int],
    seed: Optional[int]) -> None:
  if not isinstance(plan, privacy.PrivacyPlan) or plan.unit != 'user':
    raise ValueError("`plan` must be a `tfdp.PrivacyPlan` with unit='user': what is clipped and "
                     f'noised here is the update of a whole user. Received: plan={plan!r}.')
  if not isinstance(rule, contract.Rule):
    raise ValueError('`server_rule` must be a rule of `tfdp.rules`, such as `dp_adam()`. '
                     f'Received: server_rule={rule!r}.')
  if not callable(model_fn) and not isinstance(model_fn, tff.FunctionalModel):
    raise ValueError('`model_fn` must be a function that makes a TFF model, or a FunctionalModel. '
                     f'Received: model_fn={model_fn!r}.')
  if not isinstance(client_optimizer, tff.Optimizer):
    raise ValueError('`client_optimizer_fn` must be a `tff.learning.optimizers.Optimizer`, or a '
                     f'function that returns one. Received: {client_optimizer!r}.')
  if not callable(learning_rate):
    checks.positive(server_learning_rate=learning_rate)
  checks.one_of(('uniform', 'num_examples'), client_weighting=client_weighting)
  if max_examples is not None:
    checks.whole(max_examples_per_client=max_examples)
  if seed is not None:
    checks.whole(0, seed=seed)
  if client_weighting == 'num_examples' and max_examples is None:
    raise ValueError(
        '`max_examples_per_client` must be given with client_weighting="num_examples": the number '
        'of examples is private and unbounded, and would multiply the sensitivity. '
        f'Received: max_examples_per_client={max_examples}.')


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
  if not isinstance(model_fn, tff.FunctionalModel):
    with tf.Graph().as_default():
      model_fn = model_fn()
  return tff.SequenceType(tff.tensorflow_to_type(model_fn.input_spec))
