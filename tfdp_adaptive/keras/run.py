# SPDX-License-Identifier: Apache-2.0
"""A run of private training: its terms, rule, state, records and line in the ledger.

An optimizer holds one `Run`; the model, `fit`, a training loop, checkpoints and files get
everything that is said of the run from it. Every run has an identifier, so that one run is
counted once, wherever its weights are.
"""

import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple
import warnings

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import runfolder
from tfdp_adaptive.independence import disclosures
from tfdp_adaptive.keras import attached
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import ledger as ledger_lib
from tfdp_adaptive.privacy import statement as statement_lib
from tfdp_adaptive.privacy import weight_digests

_NO_PLAN = ('Without a plan there is no epsilon: sampling and number of steps are unknown. Make a '
            '`tfdp.PrivacyPlan` and pass `plan=`.')
_SEED = ('A FIXED SEED was used for the noise: whoever knows it can take the noise away, so this '
         'run is a test and the guarantee above does not hold against them.')
_BEFORE = 'THE WEIGHTS WERE TRAINED BEFORE, and what they lost then is counted above.'
_COUNTED = (
    'The ledger counts every run that left its record on these weights, wherever Keras copied, '
    'loaded or wrapped them, and in checkpoints of variables. It cannot follow values that were '
    'copied by hand (get_weights, set_weights, set_state_tree, assign), a model trained on '
    'predictions of these weights, a SavedModel used as a layer, or training without this library, '
    'as of files that were read or written before it was imported.')


class Run(attached.State):
  """The steps of one optimizer.

  Attributes:
    plan: The `PrivacyPlan`, or None.
    rule: The optimizer's rule.
    own_sampler: A description of the sampling, if the plan does not draw the batches.
    private: The `PrivateRule`; None until the optimizer is built.
    state: Its SECRET state, a nest of variables.
    moved: The variables that the optimizer moves.
    models: The models it was compiled into, whose every variable counts.
    records: SECRET digest of some records, by which the next `fit` knows them.
    examples_per_user: The most that a step took of one user, where users are records.
    notes: Sentences for the statement.
    read: Entries of what was computed from the data beforehand and is read in its steps.
    bases: Digests of the bases whose features were trained on.
    stopped: The number of steps that count, if a result decided when to stop.
    l2_norm_clip: The clip norm that is used, where that is not the plan's.
  """

  def __init__(self, plan: Any, rule: Any, own_sampler: str = '', l2_norm_clip: float = 0.0,
               seeded: bool = False) -> None:
    super().__init__()
    self.plan, self.rule, self.own_sampler = plan, rule, own_sampler
    self.l2_norm_clip = l2_norm_clip
    self.private: Any = None
    self.state: Any = None
    self.moved: Sequence[Any] = ()
    self.models: List[Any] = []
    self.records: Optional[str] = None
    self.examples_per_user = 0
    self.notes: Dict[str, None] = dict.fromkeys([_SEED] * seeded)
    self.read: Dict[Any, ledger_lib.Entry] = {}
    self.bases: Set[str] = set()
    self.stopped: Optional[int] = None
    self._id, self._foreign = ledger_lib.new_run(), False
    self._resumed: Tuple[Tuple[str, int], ...] = ()
    self._watched: Any = None

  def of(self, model: Any) -> None:
    """Assigns the run to all variables of a model."""
    if all(model is not one for one in self.models):
      self.models.append(model)

  def reads(self, data: Any) -> None:
    """Counts the cost of data that have `entries`, such as frozen features, with the weights."""
    self.read.update((entry.run or id(entry), entry) for entry in getattr(data, 'entries', ()))
    if getattr(data, 'base', None):
      self.bases.add(data.base)

  def note(self, sentence: str) -> None:
    """Adds a sentence to the statement, once."""
    self.notes[sentence] = None

  def disclose(self, model: Any, numbers: Sequence[float] = ()) -> None:
    """Notes what a model, and numbers of its loss and schedule, may hold of private data."""
    disclosures.check(model, getattr(self.plan, 'population_size', None))
    covered = lambda layer: disclosures.label(layer) in [
        one.rule for one in attached.Ledger([layer]).entries()]
    for sentence in disclosures.sentences(model, numbers, covered):
      self.note(sentence)

  @property
  def steps(self) -> int:
    """Noised steps taken so far."""
    return 0 if self.state is None else int(compat.read(self.state.privatizer.noise.row))

  def begin(self, private: Any, state: Any, variables: Sequence[Any]) -> None:
    """Takes the state of a built optimizer, and leaves this run on the variables it moves."""
    self.private, self.state, self.moved = private, state, tuple(variables)
    self._watched = compat.replicated_variable(tf.zeros([3], tf.int64), 'watched')
    own = {id(v) for v in variables}
    attached.Ledger([
        *variables, *(layer for model in self.models for layer in compat.all_layers(model)
                      if any(id(v) in own for v in layer.variables))]).attach([self])

  def watch(self, row: tf.Tensor) -> None:
    """Notes a step: `[last, most, times]` are the last step, the highest, and how many rewinds."""
    last, most, times = tf.unstack(tf.convert_to_tensor(self._watched))
    self._watched.assign(tf.stack(
        [row, tf.maximum(most, row), times + tf.cast(row <= last, row.dtype)]))

  @property
  def watched(self) -> tf.Variable:
    return self._watched

  @property
  def variables(self) -> List[Any]:
    """Returns all weights of the run, frozen or not."""
    for model in self.models:
      attached.track(model)
    return [*self.moved, *(v for model in self.models for v in attached.places(model))]

  def entries(self, steps: Optional[int] = None) -> List[ledger_lib.Entry]:
    """Returns the lines of the run: branches replaced by older weights, then the current one."""
    now, last, most, times = self.steps, 0, 0, 0
    if self._watched is not None:
      last, most, times = compat.read(self._watched).tolist()
      times += now < last
    run = lambda branch: f'{self._id}.{branch}'
    unknown = [ledger_lib.Entry(None, max(1, now), run=run('other'))] if self._foreign else []
    undone = [self._entry(most, run(branch), ()) for branch in range(times)]
    steps = max(now if steps is None else steps, self.stopped or 0)
    mine = self._entry(steps, run(times), self._resumed)
    return [*self.read.values(), *unknown, *undone, mine]

  def _entry(self, steps: int, run: str, resumed: Any) -> ledger_lib.Entry:
    begun = ledger_lib.Ledger().begin(self.plan, self.rule, self.own_sampler)
    if self.plan is not None:
      steps = min(steps, self.plan.steps)  # Later steps release nothing of the data.
    return dataclasses.replace(
        begun.done(steps).entries[0], examples_per_user=self.examples_per_user, run=run,
        resumed=resumed, notes=tuple(self.notes))

  # What may be said: all of it comes from `ledger`.

  def ledger(self, steps: Optional[int] = None) -> ledger_lib.Ledger:
    """Everything that the weights have cost when this run has done `steps` steps (default: now).

    Raises:
      ValueError: For `steps` without a plan.
    """
    if steps is not None and self.plan is None:
      raise ValueError(_NO_PLAN)
    return ledger_lib.Ledger(tuple(entry for entry in self._all(steps) if entry.steps))

  def _all(self, steps: Optional[int]) -> List[ledger_lib.Entry]:
    """Returns the other runs of the weights, then this run."""
    lines = attached.Ledger(self.variables).lines()
    mine = self.entries(steps)
    others = attached.entries([line for line in lines if line is not self])
    counted = attached.spent([*others, *mine]).entries
    return [*(entry for entry in counted if entry.run != mine[-1].run), mine[-1]]

  def epsilon(self, steps: Optional[int] = None) -> float:
    """Epsilon at the plan's delta after `steps` steps (default: all that are planned)."""
    if self.plan is None:
      raise ValueError(_NO_PLAN)
    return self.ledger(self.plan.steps if steps is None else steps).epsilon(self.plan.target_delta)

  def card(self, steps: Optional[int] = None, **more: Any) -> card_lib.Card:
    """The privacy card of the weights.

    Args:
      steps: After so many of this run; default: now.
      **more: For `card.of`.
    """
    *before, mine = self._all(steps)
    if steps is None and before and not mine.steps:  # Compiled anew, and not trained.
      return card_lib.of(ledger_lib.Ledger(tuple(before)), facts=[_COUNTED], **more)
    if self.plan is not None:
      plan = dataclasses.replace(self.plan, l2_norm_clip=self.l2_norm_clip)
      mine = dataclasses.replace(mine, plan=plan)
    facts = [_BEFORE] * bool(before) + [_COUNTED]
    return card_lib.of(ledger_lib.Ledger((*before, mine)), facts=facts,
                       details=statement_lib.details(self.rule), **more)

  # In files: beside the optimizer's state.

  def __deepcopy__(self, memo: Any) -> 'Run':
    return self  # Of a layer that is copied: its copy has the same history.

  def __reduce__(self) -> Any:
    return _unpickled, (self.line(),)

  def line(self) -> bytes:
    """Returns the run as files hold it that resume."""
    return ledger_lib.Ledger((self.entries()[-1],)).to_json().encode()

  def serialize(self) -> bytes:
    """Returns the same for a checkpoint of TensorFlow, which says what it holds."""
    if not tf.executing_eagerly():
      return b''  # A SavedModel.
    runfolder.in_checkpoint()
    runfolder.tell('A checkpoint of TensorFlow', 'Only its owner can read it (mode 600)')
    return self.line()

  def deserialize(self, string_value: bytes) -> None:
    """Continues the run of a file whose state was or will be restored."""
    for entry in attached.parsed(string_value).entries if string_value else ():
      if entry.steps and entry.run.split('.')[0] != self._id:
        self._resumed = entry.resumed + ((entry.run, entry.steps),)
        self._foreign = self._foreign or not _same_plan(entry.plan, self.plan)
        self.examples_per_user = max(self.examples_per_user, entry.examples_per_user)
        self.notes.update(dict.fromkeys(entry.notes))
        self.own_sampler = '; '.join(dict.fromkeys(filter(None, (
            entry.own_sampler, self.own_sampler))))
        self.stopped = max(self.stopped or 0, entry.steps)  # All that the file counts.

  def refuse_foreign(self) -> None:
    """Refuses to go on with steps that were restored from a checkpoint of another plan."""
    if self._foreign:
      raise errors.PrivacyError(
          'A run must resume with the plan it started with. '
          f'Received: {self.steps} steps restored from a checkpoint of another plan. '
          'Give the optimizer the plan of the checkpoint. For another plan, start in another '
          'folder, or load the weights with their ledger (`.keras` or `.weights.h5`).')

  def same_records(self, digest: Callable[[], str], in_file: bool = False) -> None:
    """Refuses records that differ from those of earlier steps. Stores new ones.

    Where random numbers are not drawn at every step, the place of a record decides when it takes
    part: moved, it would take part sooner than is accounted for.

    Args:
      digest: Returns a digest of the records; called where their places decide something.
      in_file: Whether a file of `coins` knows the records, too.
    """
    if self.plan.sampling.coins:
      return
    found = digest()
    if self.steps and self.records is not None and self.records != found:
      raise errors.PrivacyError(
          f'A run by {self.plan.sampling} goes on with the records that it began with, in the '
          'same order: by their places they would take part sooner than they are accounted for. '
          f'Received: after {self.steps} steps, other records, or in another order. Give '
          'those of the first `fit`; for others make a new plan, optimizer and run.')
    if self.steps and self.records is None and not in_file:
      warnings.warn(
          f'The {self.steps} steps so far were taken elsewhere, and nothing tells whether '
          'the records are the same, in the same order: in other places they would take part '
          'sooner than is accounted for. Name a SECRET file that knows, when a run begins and when '
          'it goes on: `plan.batches(data, coins=PATH)`; or use '
          '`tfdp.callbacks.BackupAndRestore`.', errors.Caution, stacklevel=4)
    self.records = found


def _unpickled(content: bytes) -> ledger_lib.Entry:
  return attached.parsed(content).entries[0]


def _same_plan(one: Any, other: Any) -> bool:
  """Whether two plans account for the same run, whatever its clip norm."""
  if one is None or other is None:
    return one is other
  return all(getattr(one, field.name) == getattr(other, field.name)
             for field in dataclasses.fields(one) if field.name != 'l2_norm_clip')


def card(
    model: Any, audits: Sequence[Any] = (), words: Optional[Mapping[str, str]] = None,
    **more: Any) -> card_lib.Card:
  """The card of everything that a model's weights went through; see `DPModel.privacy_card`."""
  more.update(
      audits=audits, weights=weight_digests.of(model.weights),
      words=[card_lib.Words(about, text) for about, text in (words or {}).items()])
  run = getattr(getattr(model, 'optimizer', None), 'run', None)
  if run is not None:
    return run.card(**more)
  return card_lib.of(attached.Ledger.of(model).ledger(), facts=[_COUNTED], **more)
