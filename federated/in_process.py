# SPDX-License-Identifier: Apache-2.0
"""Clients trained in this process, of a Keras model, on any stack: one traced function.

A simulation on one machine: no networking. It computes the same rounds as the TFF engine.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import private_rule
from tfdp_adaptive import trees
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib

from . import engines
from . import groups
from . import keras_model
from . import local_training
from . import rounds
from . import server as server_lib

ClientOptimizer = Any  # An optimizer of Keras, or of `tff.learning`.


class InProcess(engines.PrivateFedAvg):
  """Federated averaging of clients that are trained here.

  Args:
    make_model: `() -> KerasModel`, or what has its methods.
    client_optimizer: As `build_private_fed_avg` takes it.
    as_one: Whether all examples of a client make one batch.
    **kwargs: Of `PrivateFedAvg`.
  """

  def __init__(
      self, *, make_model: Callable[[], local_training.Model], client_optimizer: ClientOptimizer,
      as_one: bool, **kwargs: Any) -> None:
    super().__init__(client_optimizer=client_optimizer, **kwargs)
    self.make_model, self.client_optimizer = make_model, client_optimizer
    self._as_one = as_one
    self._workers: Dict[Tuple[int, str], _Worker] = {}
    self._step = tf.function(self.server.step, autograph=False)
    self._tracing = threading.Lock()

  def history(self) -> Sequence[ledger_lib.Entry]:
    return weight_ledger.Ledger.of(self.make_model().keras).ledger().entries

  def initialize(self) -> server_lib.State:
    model = self.make_model()
    return self.server.init(server_lib.ModelWeights(
        [tf.identity(v) for v in model.trainable_variables],
        [tf.identity(v) for v in model.non_trainable_variables]))

  def get_model_weights(self, state: server_lib.State) -> server_lib.ModelWeights:
    mine = self.entry(min(int(state.round), self.plan.steps), own_sampler=(
        'the caller of `next` drew the users of each round'))
    return engines.trained(
        state.global_model_weights, ledger_lib.Ledger((*self.history(), mine)))

  def next(self, state: server_lib.State, client_data: Sequence[tf.data.Dataset]) -> RoundOutput:
    """Returns `(state, metrics)` after a round of these data sets."""
    users = types.SimpleNamespace(  # Known by their positions.
        client_ids=range(len(client_data)), create_tf_dataset_for_client=client_data.__getitem__,
        element_type_structure=client_data[0].element_spec if client_data else None)
    with self.reach(1, users) as engine:
      outcome = rounds.run(self, engine, state, users.client_ids)
    state, released = self._step(state, outcome.answers)
    return RoundOutput(state, dict(released=released))

  @contextlib.contextmanager
  def reach(self, workers: engines.Workers, users: engines.ClientData
            ) -> Iterator[engines.Engine]:
    if isinstance(workers, engines.Remote):
      from . import ray_engine  # pylint: disable=import-outside-toplevel
      with ray_engine.reach(self, workers, users) as engine:
        yield engine
      return
    if not isinstance(workers, int):
      raise ValueError("`workers` must be a number of clients to train side by side, or 'ray'. "
                       f'Received: workers={workers!r}.')
    checks.whole(workers=workers)
    spec = self.batch_spec(users)

    def train(number: int, *arguments: Any) -> server_lib.Sums:
      return self.worker(number, spec)(*arguments)

    yield engines.Engine(
        [functools.partial(train, number) for number in range(workers)],
        lambda client: groups.batches_of(users, client, spec, self._as_one),
        functools.partial(groups.calls, size=groups.size),
        (tf.errors.OpError, TypeError, ValueError))

  def batch_spec(self, users: engines.ClientData) -> trees.Tree:
    """Returns the spec of a batch. A client's data must not determine it."""
    try:
      return users.element_type_structure  # type: ignore[attr-defined]
    except AttributeError:
      raise ValueError('`train_data` must have `element_type_structure`, the `tf.TensorSpec`s of a '
                       f'batch, as `Users` has. Received: {type(users).__name__}.') from None

  def worker(self, number: int, spec: trees.Tree) -> _Worker:
    """Returns the worker of this number, made at its first use."""
    key = number, str(spec)
    with self._tracing:
      if key not in self._workers:
        self._workers[key] = _Worker(self, spec)
      return self._workers[key]


class RoundOutput(NamedTuple):
  """SECRET state, and `metrics` of which `released` may be published."""

  state: server_lib.State
  metrics: Dict[str, Any]


class _Worker:
  """A model of its own and the function that trains clients with it.

  Raises:
    ValueError: Batches or the model do not allow for it.
  """

  def __init__(self, process: InProcess, input_spec: trees.Tree) -> None:
    made: List[Tuple[tf.Variable, tf.Tensor]] = []  # Variables and their first values.

    def record(next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable:
      variable = next_creator(**kwargs)
      with tf.init_scope():
        made.append((variable, tf.identity(variable)))
      return variable

    self._specs = groups.specs(input_spec)
    with tf.variable_creator_scope(record):
      model = process.make_model()
      finalizers = local_training.reusable(model)
      optimizer: Any = process.client_optimizer
      optimizer = (local_training.FunctionalOptimizer(optimizer) if hasattr(optimizer, 'next')
                   else keras_model.KerasOptimizer(optimizer, model.keras))
      model.forward_pass(tf.nest.map_structure(_example, input_spec))  # Makes what is made late.
      weights = server_lib.ModelWeights(model.trainable_variables, model.non_trainable_variables)
      mine = {id(v) for v in tf.nest.flatten(weights)}
      others = [(v, first) for v, first in made if id(v) not in mine]
      train = local_training.loop(
          model, input_spec, optimizer, process.server, finalizers, others)
      spec_of = lambda x: tf.TensorSpec(x.shape, x.dtype)
      self._template = weights, process.server.broadcast(process.server.init(weights))
      self._train = train.get_concrete_function(
          *tf.nest.map_structure(spec_of, self._template), self._specs)
    local_training.check_memory(self._train.graph, [v for v, _ in made])

  def __call__(self, weights: server_lib.ModelWeights, broadcast: private_rule.Broadcast,
               clients: Sequence[List[groups.Batch]]) -> server_lib.Sums:
    given = tf.nest.pack_sequence_as(  # TFF has a class of its own for weights.
        self._template, [*map(tf.constant, tf.nest.flatten((weights, broadcast)))])
    group = tf.nest.map_structure(tf.constant, groups.pack(clients, self._specs))
    return server_lib.Sums(self._train(*given, group))


def _example(spec: tf.TensorSpec) -> tf.Tensor:
  return tf.zeros([1, *spec.shape[1:]], spec.dtype)
