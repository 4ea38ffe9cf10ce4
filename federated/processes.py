"""Federated averaging with user-level privacy and an adaptive server optimizer.

Clients train from the server's weights and answer with `initial - final`, which
is gradient-like. The answer of every client is clipped in the geometry of the
round, the sum is noised and divided by the EXPECTED number of clients, and the
rule turns it into a direction of descent:

    weights <- weights - server_learning_rate * direction
"""

import collections

import tensorflow as tf
import tensorflow_federated as tff

from tfdp_adaptive import privacy
from tfdp_adaptive import queries


class PrivateFedAvg(tff.learning.templates.LearningProcess):
  """A `tff.learning.templates.LearningProcess` that knows what it promises.

  Its state is SECRET: the aggregator's part holds the noise still to come. Only
  `get_model_weights(state)` may be published.

  Attributes:
    plan: The `tfdp.PrivacyPlan` of the run.
    rule: The server's rule.
    query: The `RuleQuery` that clips, noises and updates.
    model_fn: What the process was built from.
  """

  def __init__(self, process, *, plan, rule, query, model_fn):
    super().__init__(process.initialize, process.next, process.get_model_weights,
                     process.set_model_weights, get_hparams_fn=process.get_hparams,
                     set_hparams_fn=process.set_hparams)
    self.plan, self.rule, self.query, self.model_fn = plan, rule, query, model_fn


def build_private_fed_avg(model_fn, *, server_rule, plan, server_learning_rate,
                          client_optimizer_fn, client_weighting='uniform', exact_metrics=False,
                          seed=None):
  """Builds federated averaging with user-level differential privacy.

  Args:
    model_fn: A no-argument function that makes a `tff.learning.models.VariableModel`,
      or a `tff.learning.models.FunctionalModel`.
    server_rule: A `tfdp.rules` rule that needs neither public gradients nor the
      parameters.
    plan: A `tfdp.PrivacyPlan` with unit='user': `batch_size` is the expected
      number of clients per round, `steps` the number of rounds, `l2_norm_clip`
      bounds a client's update, in the units of the rule's scaled records.
    server_learning_rate: Step size of the server, > 0.
    client_optimizer_fn: A `tff.learning.optimizers.Optimizer` (or a function that
      returns one) for the training on the clients.
    client_weighting: 'uniform'. Weights by number of examples are refused: they
      would multiply the clipped update, and so the sensitivity, by a number that
      is private and has no bound.
    exact_metrics: Whether rounds also return TFF's sums of the clients' training
      metrics. They are exact: NOT PRIVATE, for diagnosis only.
    seed: For tests only: fixed noise protects nobody.

  Returns:
    A `PrivateFedAvg`.
  """
  if not isinstance(plan, privacy.PrivacyPlan) or plan.unit != 'user':
    raise ValueError("`plan` must be a `tfdp.PrivacyPlan` with unit='user': what is clipped and "
                     f'noised here is the update of a whole user. Received: plan={plan!r}.')
  if client_weighting != 'uniform':
    raise ValueError("`client_weighting` must be 'uniform': a weight such as the number of "
                     'examples is private and unbounded, and would multiply the sensitivity. '
                     f'Received: client_weighting={client_weighting!r}.')
  if not server_learning_rate > 0:
    raise ValueError('`server_learning_rate` must be positive. '
                     f'Received: server_learning_rate={server_learning_rate}.')
  if not isinstance(client_optimizer_fn, tff.learning.optimizers.Optimizer):
    client_optimizer_fn = client_optimizer_fn()
  query = queries.RuleQuery(server_rule, trainable_specs(model_fn), plan=plan, seed=seed)
  process = tff.learning.algorithms.build_unweighted_fed_avg(
      model_fn,
      client_optimizer_fn=client_optimizer_fn,
      server_optimizer_fn=tff.learning.optimizers.build_sgdm(server_learning_rate),
      model_aggregator=tff.aggregators.DifferentiallyPrivateFactory(query),
      metrics_aggregator=(
          tff.learning.metrics.sum_then_finalize if exact_metrics else _no_metrics))
  return PrivateFedAvg(process, plan=plan, rule=server_rule, query=query, model_fn=model_fn)


def trainable_specs(model_fn):
  """Nest of `tf.TensorSpec` of a model's trainable weights, as TFF passes them."""
  if isinstance(model_fn, tff.learning.models.FunctionalModel):
    return tuple(tf.TensorSpec(w.shape, w.dtype) for w in model_fn.initial_weights[0])
  with tf.Graph().as_default():
    weights = tff.learning.models.weights_type_from_model(model_fn())
  return tff.types.type_to_tf_tensor_specs(weights.trainable)


def _no_metrics(metric_finalizers, local_unfinalized_metrics_type=None):
  """A TFF metrics aggregator that lets nothing of the clients' metrics out."""
  del metric_finalizers, local_unfinalized_metrics_type
  return lambda metrics: tff.federated_value(collections.OrderedDict(), tff.SERVER)
