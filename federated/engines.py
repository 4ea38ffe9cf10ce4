# SPDX-License-Identifier: Apache-2.0
"""The interface between rounds and the ways to reach clients."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from typing import Any, Callable, List, NamedTuple, Optional, Protocol, Sequence, Tuple, Type, Union

import tensorflow as tf

from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib

from . import server as server_lib

Client = Union[str, int]  # The id of a client.


class ClientData(Protocol):
  """The users of a simulation, such as `Users` or a `tff.simulation.datasets.ClientData`."""

  @property
  def client_ids(self) -> Sequence[Client]:
    """Returns the id of each client, once."""

  def create_tf_dataset_for_client(self, client_id: Any) -> tf.data.Dataset:
    """Returns the batches of a client in a round."""


Worker = Callable[[server_lib.ModelWeights, Any, List[Any]], server_lib.Sums]


class Engine(NamedTuple):
  """The engine that trains the clients of a round.

  Attributes:
    workers: `(weights, broadcast, [data of a client]) -> server.Sums`, one for each group of
      clients that are trained side by side.
    read: `client id -> data of that client`, as a worker takes it.
    calls: `iterable of (client id, data) -> iterable of lists of them`, one for each call.
    failures: Exceptions by which a call says that one of its clients could not be trained.
    ready: `() -> whether a round can begin`. It may wait. False ends the run before the round.
  """

  workers: Sequence[Worker]
  read: Callable[[Any], Any]
  calls: Callable[[Any], Any]
  failures: Tuple[Type[Exception], ...]
  ready: Callable[[], bool] = lambda: True


class Remote(NamedTuple):
  """Actors of Ray that train clients.

  Attributes:
    actors: The number of actors; None for one per CPU of the cluster.
    address: Address of a running cluster; None for the one that Ray finds or starts.
  """

  actors: Optional[int] = None
  address: Optional[str] = None


Workers = Union[int, str, Remote]


class TrainedWeights(server_lib.ModelWeights):
  """Weights that tell the Keras model that they are assigned to what they cost.

  Attributes:
    ledger: The `tfdp.Ledger` of all rounds.
  """

  ledger: ledger_lib.Ledger = ledger_lib.Ledger()

  def assign_weights_to(self, model: tf.keras.Model) -> None:
    """Puts them into a Keras model, whose ledger is theirs from then on."""
    super().assign_weights_to(model)
    weight_ledger.Ledger.of(model).attach(self.ledger.entries, replace=True)


def trained(weights: Sequence[Any], ledger: ledger_lib.Ledger) -> TrainedWeights:
  """Returns `(trainable, non_trainable)` with the ledger of what they cost."""
  result = TrainedWeights(*weights)
  result.ledger = ledger
  return result


class PrivateFedAvg(abc.ABC):
  """Rounds of federated averaging, with the plan that they follow.

  Its state is SECRET: it holds the noise still to come. Only `get_model_weights(state)` and
  `metrics['released']` may be published.

  If you call `next` yourself, draw the cohort as the plan says, with every client in it at most
  once. `next` does not know which user a data set belongs to. If you pass one client five times,
  that user can move the sum by five clip norms. `simulate` draws and checks the cohorts.

  Attributes:
    plan: The `tfdp.PrivacyPlan` of the run.
    rule: The server's rule.
    server: The `Server`.
    settings: The settings of the server, and `{argument: value}` of everything else that decides a
      run.
    seed: The seed of a test, or None.
    recipe: () -> the same process, which can be sent to other machines; None if that is impossible.
  """

  def __init__(self, *, server: server_lib.Server,
               recipe: Optional[Callable[[], PrivateFedAvg]] = None, **settings: object) -> None:
    self.recipe = recipe
    self.server, self.settings = server, {**server.settings, **settings}
    self.plan, self.rule, self.seed = server.plan, server.rule, server.seed

  def history(self) -> Sequence[ledger_lib.Entry]:
    """Returns the ledger of the initial weights, if they have one."""
    return ()

  def entry(self, rounds: int, **more: Any) -> ledger_lib.Entry:
    """Returns the ledger entry of this many rounds; `more` sets other fields of the entry."""
    begun, = ledger_lib.Ledger().begin(self.plan, self.rule).done(rounds).entries
    clip = self.settings['quantile_clip']
    following = () if clip is None else (
        f'Adaptive clip norm: {clip}, inside the same budget; the clip norm above is the first '
        'one.',)
    return dataclasses.replace(begun, **{
        'seeded': self.seed is not None, 'clipping': (*begun.clipping, *following), **more})

  @abc.abstractmethod
  def initialize(self) -> server_lib.State:
    """Returns the state before the first round, with keys of its own."""

  @abc.abstractmethod
  def next(self, state: server_lib.State, client_data: Sequence[tf.data.Dataset]) -> Any:
    """Returns `state` and `metrics` after a round of these clients' data sets."""

  @abc.abstractmethod
  def reach(self, workers: Workers, users: ClientData
            ) -> contextlib.AbstractContextManager[Engine]:
    """Returns the `Engine`, for as long as the context lasts.

    Args:
      workers: As `simulate` takes them.
      users: The clients' data.
    """

  def broadcast(self, state: server_lib.State) -> Any:
    """Returns the values that a round's workers need in addition to the weights."""
    return self.server.broadcast(state)

  def get_model_weights(self, state: server_lib.State) -> server_lib.ModelWeights:
    return state.global_model_weights
