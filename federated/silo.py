# SPDX-License-Identifier: Apache-2.0
"""A silo: a client whose single records are protected, with one ledger for all rounds.

A client of a federated run often starts in a new process, or makes a new model, in every round. The
steps of all rounds are steps of one plan on the same records, so they are counted in one folder.
"""

import json
from typing import Any, Dict, List, NamedTuple, Optional, Sequence
import warnings

import numpy as np

import tfdp_adaptive as tfdp
from tfdp_adaptive import checks
from tfdp_adaptive import runfolder
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import ledger as ledger_lib
from tfdp_adaptive.privacy import statement as statement_lib
from tfdp_adaptive.privacy import weight_digests

from . import storage

Data = Any  # An argument of `plan.batches`.
_STATE, _RECORDS, _COINS = 'silo.npz', 'records', 'coins'
_TEXT = (
    'One of several silos: the records above are those of this silo alone. It drew its own batches '
    'and added its own noise, so the guarantee holds against the server, the other silos and '
    'everybody who sees the weights that it sent.',
    'The weights that arrived from the server were not trained here. What they say about the '
    'records of other silos is in the ledgers of those silos.')


class _Saved(NamedTuple):
  """The contents of the folder.

  Attributes:
    plan: The plan, for JSON.
    records: SECRET digest of the records.
    steps: The number of steps taken in all rounds.
    ledger: The ledger of all rounds, as JSON.
    server_round: The last round that was given by number.
    weights: Digests of the last answer.
    names: Names of the optimizer's arrays.
    arrays: SECRET arrays of the optimizer, then those of the answer to `server_round`.
  """

  plan: Any
  records: str
  steps: int = 0
  ledger: str = ''
  server_round: Optional[int] = None
  weights: Sequence[str] = ()
  names: Sequence[str] = ()
  arrays: Sequence[np.ndarray] = ()


class Silo:
  """Trains one client in all rounds by one plan, which protects the client's records.

  The plan covers the steps of ALL rounds. The folder has the ledger, the number of steps, the seed
  of the sampling and the state of the optimizer, which is SECRET, and a digest of the records.
  It is saved before an answer is returned. Every round may run in a new process, with a new model.

  Args:
    folder: A folder of this silo alone, which must outlive its processes.
    plan: The `tfdp.PrivacyPlan` of all rounds.
    new: Whether a folder without a state may start in a later round than the first. Set it only for
      a silo that has never trained on these records.

  Raises:
    PrivacyError: If the folder holds the state of another plan, or has lost its state.

  Examples:
    A round of a client, with a model compiled with an optimizer of the plan:

        silo = tfdp.federated.Silo('/var/lib/ward', plan=plan)
        weights = silo.train(model, weights_of_the_server, (x, y), steps=20)
        print(silo.statement())
  """

  def __init__(self, folder: storage.Path, *, plan: tfdp.PrivacyPlan,
               new: bool = False) -> None:
    checks.require(isinstance(plan, tfdp.PrivacyPlan), 'be the `tfdp.PrivacyPlan` of all rounds',
                   plan=plan)
    self._files = storage.RunFolder(folder, _STATE)
    self._folder, self._plan, self._new = self._files.path, plan, new
    self._most = 0  # The most steps that this object has seen in the folder.
    self._load()

  def train(self, model: tfdp.DPModel, weights: Sequence[np.ndarray], data: Data, *, steps: int,
            server_round: Optional[int] = None, **batches: Any) -> List[np.ndarray]:
    """Takes the next steps of the plan from the weights of the server.

    Args:
      model: A built private model, compiled with an optimizer of the plan. It may be new in every
        round.
      weights: Arrays like `model.get_weights()`.
      data: The records, as `plan.batches` takes them; the same in every round.
      steps: The number of steps to take.
      server_round: The number of the round, if known. If the process ended after a round was saved
        and before it was answered, the answer then comes from the folder, without another step. A
        round after the first is refused if the folder has no state.
      **batches: More arguments of `plan.batches`, such as `users`.

    Returns:
      The trained weights, in the order of `model.get_weights()`.

    Raises:
      PrivacyError: If the plan does not cover the steps, if the records are not those of the
        earlier rounds, if another process trains in the folder, or if a folder beside this one
        has a ledger of the same records.
    """
    checks.whole(steps=steps)
    if server_round is not None:
      checks.whole(0, server_round=server_round)
      server_round = int(server_round)  # NumPy's whole numbers are none of JSON's.
    optimizer = self._optimizer(model)
    with self._files:
      saved = self._load()
      if not saved.records and not self._new and (server_round or 0) > 1:
        raise tfdp.PrivacyError(
            f'Round {server_round} needs the ledger of the rounds before it. Received: a folder '
            f'without a state, {self._folder}. Put the folder back. If this silo has never trained '
            'on its records, use `Silo(folder, plan=plan, new=True)`.')
      done = saved.steps
      if server_round is not None and saved.server_round == server_round:
        # Not the answer of another silo.
        self._begun(saved, self._plan.batches(data, **{**batches, 'digests_to': None}).digest())
        return list(saved.arrays[len(saved.names):])
      if done + steps > self._plan.steps:
        raise tfdp.PrivacyError(
            f'The plan covers {self._plan.steps} steps of all rounds, of which {done} are done. '
            f'Received: steps={steps}. Take at most {self._plan.steps - done}, or end here.')
      if not done:  # Nothing of an earlier attempt was sent.
        (self._folder / _COINS).unlink(missing_ok=True)
      drawn = self._plan.batches(
          data, start_step=done, coins=self._folder / _COINS, **batches)
      saved = self._begun(saved, drawn.digest())
      self._restore(model, optimizer, saved)
      super(tfdp.DPModel, model).set_weights(weights)  # Without its Caution.
      saved = saved._replace(server_round=None)
      try:
        model.fit(drawn, steps_per_epoch=steps, epochs=1, verbose=0)
        saved = saved._replace(server_round=server_round)
      finally:  # Steps that were taken before an error are taken.
        answer = model.get_weights()
        if optimizer.steps_done > done:
          self._save(saved, model, answer)
      return answer

  @property
  def ledger(self) -> tfdp.Ledger:
    """Returns the `tfdp.Ledger` of all rounds so far."""
    saved = self._load()
    return tfdp.Ledger.from_json(saved.ledger) if saved.ledger else tfdp.Ledger().begin(self._plan)

  def card(self, plots: bool = True) -> card_lib.Card:
    """Returns the privacy card of all rounds so far, with the digests of the last answer.

    Args:
      plots: As for `Ledger.card`.
    """
    return self.ledger.card(trust='silo', facts=_TEXT, weights=self._load().weights, plots=plots)

  def statement(self) -> str:
    """Returns the privacy statement of all rounds so far, in plain text."""
    return statement_lib.of(self.card(plots=False))

  def _optimizer(self, model: tfdp.DPModel) -> tfdp.DPOptimizer:
    """Returns the optimizer of a private model, after checking that it has the silo's plan."""
    optimizer = getattr(model, 'optimizer', None)
    if not isinstance(model, tfdp.DPModel) or optimizer is None or not model.built:
      raise ValueError('`model` must be a private model that is built and compiled, such as of '
                       f'`tfdp.make_private`. Received: {model!r}.')
    if optimizer.plan != self._plan:
      raise tfdp.PrivacyError(
          'The optimizer must have the plan of the silo, which covers the steps of all rounds. '
          f'Received: an optimizer with plan={optimizer.plan!r:.60}. Compile the model with '
          '`plan=plan`.')
    return optimizer

  def _load(self) -> _Saved:
    """Returns what the folder holds, or a state without steps and records for a new folder."""
    plan, loaded = json.loads(self._plan.to_json()), self._files.load()
    if loaded is None and (self._folder / _RECORDS).exists():
      raise storage.SavedRunError(
          f'{self._files.state} is gone, and with it the ledger of these records. A new one '
          'would begin at zero. Put the file back; nothing may be trained on these records '
          'without it.')
    arrays, record = loaded or ((), dict(plan=plan, records=''))
    try:
      saved = _Saved(arrays=arrays, **record)
    except TypeError as error:
      raise storage.SavedRunError(
          f'{self._files.state} must be what a silo saved. Received: {error}. Put another copy of '
          'the last state back.') from error
    if saved.steps and saved.plan != plan:
      raise tfdp.PrivacyError(
          f'{self._folder} has the ledger of another plan. Received: {self._plan!r:.60}. Give the '
          'plan that the silo began with. A new plan needs a folder in another place, and its cost '
          'adds up.')
    if saved.steps < self._most:
      raise storage.SavedRunError(
          f'The ledger of {self._folder} had {self._most} steps. Received: a folder with '
          f'{saved.steps}. Put the last state back.')
    self._most = saved.steps
    return saved

  def _begun(self, saved: _Saved, records: str) -> _Saved:
    """Returns the saved state of these records. Begins a folder in which no step was taken."""
    if saved.steps and saved.records != records:
      raise tfdp.PrivacyError(
          'A silo goes on with the records that it began with: the ledger is about them. '
          f'Received: other records than those of {self._folder}, or in another order. Give '
          'those; other records need a folder of their own.')
    for path in self._folder.parent.glob(f'*/{_RECORDS}'):
      if path.parent.resolve() != self._folder.resolve() and path.read_text() == records:
        raise tfdp.PrivacyError(
            f'{path.parent} has a ledger of the same records (or ids of users), so that one in '
            f'{self._folder} would leave out their cost. Go on in {path.parent}.')
    if not saved.steps:
      saved = _Saved(json.loads(self._plan.to_json()), records)
      self._write(saved)
    runfolder.replace(self._folder / _RECORDS, records.encode())
    return saved

  def _restore(self, model: tfdp.DPModel, optimizer: tfdp.DPOptimizer, saved: _Saved) -> None:
    """Puts the saved state into a new optimizer. Refuses one that took steps elsewhere."""
    runs = lambda ledger: {(entry.run, entry.steps) for entry in ledger.entries}
    taken = optimizer.steps_done
    if taken and (taken != saved.steps or not runs(optimizer.ledger) <= runs(self.ledger)):
      raise tfdp.PrivacyError(
          f'The optimizer has taken {taken} steps that are not in the ledger of {self._folder}. '
          'Compile the model again with a new optimizer of the plan; every silo needs its own.')
    if not taken and saved.steps:
      optimizer.build(model.trainable_variables)
      rate = getattr(optimizer, '_learning_rate', None)
      before = np.array(rate) if hasattr(rate, 'assign') else None
      with warnings.catch_warnings():  # A state that does not fit is refused below.
        warnings.simplefilter('ignore', tfdp.Caution)
        optimizer.load_own_variables(dict(zip(saved.names, saved.arrays)))
      if optimizer.steps_done != saved.steps or optimizer.rule.name != self.ledger.entries[-1].rule:
        raise tfdp.PrivacyError(
            f'{self._folder} has the state of another optimizer, after {saved.steps} steps. '
            f'Received: {optimizer.name}. Compile the model as in the rounds before.')
      if before is not None:  # The rate of this round, which the server may have sent.
        optimizer.learning_rate = before

  def _save(self, saved: _Saved, model: tfdp.DPModel, answer: Sequence[np.ndarray]) -> None:
    state: Dict[str, Any] = {}
    model.optimizer.save_own_variables(state)
    ledger = ledger_lib.distinct([
        *(entry for entry in self.ledger.entries if entry.steps), *model.ledger.entries])
    self._write(saved._replace(
        steps=model.optimizer.steps_done, ledger=ledger.to_json(),
        weights=weight_digests.of(answer),
        names=list(state), arrays=[
            *state.values(), *(answer if saved.server_round is not None else ())]))

  def _write(self, saved: _Saved) -> None:
    record = saved._asdict()
    self._files.save(record.pop('arrays'), record)
    self._most = saved.steps
