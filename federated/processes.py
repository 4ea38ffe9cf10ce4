# SPDX-License-Identifier: Apache-2.0
"""Federated averaging with user-level privacy and an adaptive server optimizer.

Clients train from the server's weights and answer with `initial - final`, which is gradient-like.
The answer of every client is clipped in the geometry of the round. Noise is added to the sum, which
is divided by the EXPECTED number of clients. The rule turns the result into a direction of descent:

    weights <- weights - server_learning_rate * direction
"""

import functools
import importlib
import importlib.util
from typing import Any, Callable, Dict, Optional, Sequence, Union

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import privacy

from . import engines
from . import in_process
from . import keras_model
from . import local_training
from . import server as server_lib

Part = Any  # An object of Keras, or a function that makes one.
ClientOptimizerFn = Union[Part, Callable[[], Part]]
_ONE_STEP = 'one step'  # In place of the optimizer of clients that answer with a gradient.


def build_private_fed_avg(
    model_fn: local_training.ModelFn, *, server_rule: contract.Rule, plan: privacy.PrivacyPlan,
    server_learning_rate: server_lib.Rate, client_optimizer_fn: ClientOptimizerFn,
    loss: Optional[keras_model.Loss] = None, metrics: Sequence[keras_model.Metric] = (),
    quantile_clip: Optional[server_lib.QuantileClip] = None,
    private_metrics: Optional[server_lib.PrivateMetrics] = None,
    seed: Optional[int] = None) -> engines.PrivateFedAvg:
  """Builds federated averaging with user-level differential privacy.

  Args:
    model_fn: A function without arguments that makes a Keras model or a
      `tff.learning.models.VariableModel`; or a `tff.learning.models.FunctionalModel`. Clients
      of a Keras model are trained in this process, the others by TFF.
    server_rule: A `tfdp.rules` rule that needs no public gradients.
    plan: A `tfdp.PrivacyPlan` with unit='user'. `batch_size` is the expected number of clients per
      round, and `steps` the number of rounds. `l2_norm_clip` bounds a client's update, in the units
      of the rule's scaled records.
    server_learning_rate: Step size of the server, > 0, or a TensorFlow function
      of the number of rounds done (a Keras schedule, for instance).
    client_optimizer_fn: A Keras optimizer (or a function that returns one) for the
      training on the clients; a `tff.learning.optimizers.Optimizer` for a TFF model.
    loss: The loss of a Keras model: `tf.keras.losses.Loss`, or `(y_true, y_pred) -> losses`.
      Batches are `(x, y)`, or dicts with the keys `x` and `y`.
    metrics: The metrics of a Keras model: Keras metrics of the clients' training, copied.
    quantile_clip: A `QuantileClip`, or None for a fixed clip norm.
    private_metrics: `PrivateMetrics` of the clients' training, or None.
    seed: For tests only: fixed noise protects nobody.

  Returns:
    A `PrivateFedAvg`, see `engines`. `metrics['released']` of what `next` returns is private.
  """
  arguments = dict(locals())
  as_one = client_optimizer_fn == _ONE_STEP
  client_optimizer = client_optimizer_fn
  if callable(client_optimizer_fn) and not as_one:
    client_optimizer = client_optimizer_fn()
  if seed is not None:
    checks.whole(0, seed=seed)
  make_server = functools.partial(
      server_lib.Server, server_rule, plan=plan, learning_rate=server_learning_rate,
      quantile_clip=quantile_clip, private_metrics=private_metrics, seed=seed)
  if loss is None:
    return _tff_process().build(
        model_fn, client_optimizer, make_server, as_one=as_one)
  if as_one:
    client_optimizer = tf.keras.optimizers.SGD(1.0)
  if not hasattr(client_optimizer, 'get_config') and not hasattr(client_optimizer, 'next'):
    raise ValueError('`client_optimizer_fn` must be a Keras optimizer for a Keras model, or a '
                     f'function that returns one. Received: {client_optimizer!r}.')
  checks.require(callable(model_fn), 'be a function that makes a Keras model', model_fn=model_fn)
  recipe = functools.partial(_again, {
      **arguments, 'loss': _maker(loss), 'client_optimizer_fn': _maker(client_optimizer_fn),
      'metrics': [*map(_maker, metrics)]})
  make_model = functools.partial(keras_model.KerasModel, model_fn, loss, tuple(metrics))
  model = make_model()
  specs = [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables]
  return in_process.InProcess(
      make_model=make_model, client_optimizer=client_optimizer, server=make_server(specs),
      recipe=recipe, as_one=as_one)


def build_private_fed_sgd(
    model_fn: local_training.ModelFn, *, server_rule: contract.Rule, plan: privacy.PrivacyPlan,
    server_learning_rate: server_lib.Rate, **arguments: Any) -> engines.PrivateFedAvg:
  """Builds federated SGD: each client sends the mean gradient over its examples.

  A client's examples of a round are one batch, with one step of learning rate one.

  Args:
    model_fn: As for `build_private_fed_avg`.
    server_rule: As for `build_private_fed_avg`.
    plan: As for `build_private_fed_avg`.
    server_learning_rate: As for `build_private_fed_avg`.
    **arguments: The other arguments of `build_private_fed_avg`, but no `client_optimizer_fn`.
  """
  return build_private_fed_avg(
      model_fn, server_rule=server_rule, plan=plan, server_learning_rate=server_learning_rate,
      client_optimizer_fn=_ONE_STEP, **arguments)


def _maker(value: Part) -> Part:
  """Returns a function that makes an object of Keras again. Anything else stays as it is."""
  if isinstance(value, type) or not hasattr(value, 'get_config'):
    return value
  return functools.partial(_make, type(value), value.get_config())


def _make(kind: Any, config: Dict[str, Any]) -> Part:
  return kind.from_config(config)


def _again(arguments: Dict[str, Any]) -> engines.PrivateFedAvg:
  """Builds a process on another machine, where objects with variables cannot be sent."""
  loss = arguments['loss']
  made = getattr(loss, 'func', None) is _make
  return build_private_fed_avg(**{**arguments, 'loss': loss() if made else loss})


def _tff_process() -> Any:
  """Returns the module of TFF's engine."""
  if importlib.util.find_spec('tensorflow_federated') is None:
    raise ValueError(
        '`loss` must be given, with a function that makes a Keras model: it is trained in process. '
        'A TFF model, which has its loss, needs tensorflow_federated, which is not installed here. '
        'Received: loss=None.')
  return importlib.import_module('.tff_process', __package__)
