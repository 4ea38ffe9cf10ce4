# SPDX-License-Identifier: Apache-2.0
"""A run of private training: its terms, rule, state, records and entry in the ledger.

An optimizer holds one `Run`; the model, `fit`, a training loop, checkpoints and files get
everything that is said of the run from it. Every run has an identifier, so that one run is
counted once, wherever its weights are.
"""

import dataclasses
import json
from typing import Any, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import private_rule
from tfdp_adaptive import runfolder
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib

_FINGERPRINT = 'fingerprint'  # Key beside the ledger entry of a run in a file.
_LONGEST = 100  # Characters of a value in a message.
_TEXTS = 'notes', 'engines', 'shared'  # Of an entry.


class Run(weight_ledger.State):
  """The steps of one optimizer.

  Attributes:
    id: Its identifier in ledgers.
    plan: The `PrivacyPlan`, with the clip norm that is used; or None.
    rule: The optimizer's rule.
    private: The `PrivateRule`; None until the optimizer is built.
    state: Its SECRET state, a nest of variables.
    moved: The variables that the optimizer moves.
    models: The models it was compiled into. All of their variables count.
    records: SECRET digest of some records, by which the next `fit` recognizes them.
    said: What the run's entry in the ledger says so far, besides its plan, rule and steps.
    read: Ledger entries of data, such as features, that were computed before and that steps read.
    held: Layers and variables that steps read besides.
    stopped: The number of steps that count, if a result decided when to stop.
    earlier: Steps that files tell of.
  """

  def __init__(self, plan: Any, rule: Any, own_sampler: str = '', l2_norm_clip: float = 0.0,
               seeded: bool = False, use_ema: bool = False) -> None:
    super().__init__()
    if plan is not None and l2_norm_clip:
      plan = dataclasses.replace(plan, l2_norm_clip=l2_norm_clip)
    self.plan, self.rule = plan, rule
    self.said: Dict[str, Any] = dict(
        notes=(), engines=(), shared=(), seeded=seeded, examples_per_user=0,
        own_sampler=own_sampler)
    self.private: Any = None
    self.state: Any = None
    self.moved: Sequence[Any] = ()
    self.models: List[Any] = []
    self.records: Optional[str] = None
    self.read: Dict[Any, ledger_lib.Entry] = {}
    self.held: List[Any] = []
    self.use_ema = use_ema
    self.stopped: Optional[int] = None
    self.id, self.earlier = ledger_lib.new_run(), Earlier(self)
    self.step_counts: Any = None

  def of(self, model: compat.Model) -> None:
    """Assigns the run to all variables of a model."""
    if all(model is not one for one in self.models):
      self.models.append(model)

  def reads(self, entries: Sequence[ledger_lib.Entry]) -> None:
    """Counts the cost of data, such as frozen features, with the weights."""
    self.read.update((entry.run or id(entry), entry) for entry in entries)

  def share(self, *others: str) -> None:
    """Notes that other runs, or undone branches of this one, used the same batch for a step."""
    self.say(shared=others)

  def note(self, *sentences: str) -> None:
    """Adds sentences to the statement, each once."""
    self.say(notes=sentences)

  def say(self, **more: Any) -> None:
    """Adds texts, each once, to those of the run's entry; of numbers, the largest is kept."""
    for name, new in more.items():
      old = self.said[name]
      self.said[name] = tuple(dict.fromkeys((*old, *new))) if name in _TEXTS else max(old, new)

  @property
  def steps(self) -> int:
    """Returns the number of noised steps taken so far."""
    return 0 if self.state is None else int(compat.read(self.state.privatizer.noise.row))

  def begin(self, private: private_rule.PrivateRule, state: private_rule.State,
            variables: Sequence[Any]) -> None:
    """Takes the state of a built optimizer, and leaves this run on the variables it moves."""
    self.private, self.state, self.moved = private, state, tuple(variables)
    self.step_counts = StepCounts()
    own = {id(v) for v in variables}
    weight_ledger.Ledger([
        *variables, *(layer for model in self.models for layer in compat.all_layers(model)
                      if any(id(v) in own for v in layer.variables))]).attach([self])

  @property
  def variables(self) -> List[Any]:
    """Returns all weights of the run, frozen or not, and what else has a history."""
    for model in self.models:
      weight_ledger.track(model)
    return [*self.moved, *self.held,
            *(v for model in self.models for v in weight_ledger.places(model))]

  def entries(self, steps: Optional[int] = None) -> List[ledger_lib.Entry]:
    """Returns the entries of the run: branches replaced by older weights, then the current one."""
    earlier = self.earlier.settled()
    now, last, most, times = self.steps, 0, 0, 0
    if self.step_counts is not None:
      last, most, times, _ = self.step_counts.read()
      times += now < last
    run = lambda branch: f'{self.id}.{branch}'
    unknown = [ledger_lib.Entry(None, max(1, now), run=run('other'))] if earlier.foreign else []
    undone = [self._entry(most, run(branch), ()) for branch in range(times)]
    steps = max(now if steps is None else steps, self.stopped or 0)
    beside = [*earlier.beside, *(entry for entry, _ in earlier.waiting)]
    mine = self._entry(steps, run(times), earlier.resumed)
    return [*self.read.values(), *beside, *unknown, *undone, mine]

  def _entry(self, steps: int, run: str, resumed: Tuple[Tuple[str, int], ...]) -> ledger_lib.Entry:
    begun, = ledger_lib.Ledger().begin(self.plan, self.rule).entries
    parts: Dict[str, Any] = {}
    if self.plan is not None:
      steps = min(steps, self.plan.steps)  # Later steps release nothing of the data.
      taken = self.steps if self.steps < steps == self.stopped else None
      done = steps if taken is None else taken
      norms = _parts(self.earlier.clip_norms, done, self.plan.l2_norm_clip)
      parts = dict(taken=taken, clip_norms=norms if len(norms) > 1 else ())
      if norms[-1][1] != self.plan.l2_norm_clip:
        parts['plan'] = dataclasses.replace(self.plan, l2_norm_clip=norms[-1][1])
    return dataclasses.replace(begun, steps=steps, run=run, resumed=resumed, **self.said, **parts)

  # In files, the run is beside the optimizer's state.

  def __deepcopy__(self, memo: object) -> 'Run':
    return self  # A copied layer has the same history.

  def __reduce__(self) -> Any:
    return _unpickled, (self.to_bytes(),)

  def to_bytes(self) -> bytes:
    """Returns the run for files that resume training."""
    ledger = json.loads(ledger_lib.Ledger((self.entries()[-1],)).to_json())
    return json.dumps({**ledger, _FINGERPRINT: fingerprint(self)}).encode()

  def serialize(self) -> bytes:
    """Returns the same for a checkpoint of TensorFlow, which says what it holds."""
    if not tf.executing_eagerly():
      return b''  # A SavedModel.
    runfolder.in_checkpoint()
    runfolder.tell('A checkpoint of TensorFlow', 'Only its owner can read it (mode 600)')
    return self.to_bytes()

  def deserialize(self, string_value: bytes) -> None:
    """Continues the run of a file whose state was or will be restored."""
    own = [entry for entry in _taken(string_value) if entry.run.split('.')[0] != self.id]
    self.earlier.waiting += [(entry, saved_fingerprint(string_value)) for entry in own]
    if own and self.step_counts is not None:
      self.step_counts.begin_anew()


class StepCounts:
  """Counts the steps that are taken here.

  The variable is `[last, most, times, first]`: the last step, the highest, how many rewinds,
  and the number of steps before the first one that was taken here; -1 before that.
  """

  def __init__(self) -> None:
    self.variable = compat.replicated_variable(
        tf.constant([0, 0, 0, -1], tf.int64), 'step_counts')

  def read(self) -> List[int]:
    return compat.read(self.variable).tolist()

  def record(self, row: tf.Tensor) -> None:
    """Counts a step."""
    last, most, times, first = tf.unstack(tf.convert_to_tensor(self.variable))
    self.variable.assign(tf.stack([
        row, tf.maximum(most, row), times + tf.cast(row <= last, row.dtype),
        tf.where(first < 0, row - 1, first)]))

  def begin_anew(self) -> None:
    """Takes the next step for the first that is taken here."""
    self.variable.assign([*self.read()[:3], -1])


@dataclasses.dataclass
class Earlier:
  """What files tell of steps before those that a run has taken here.

  Attributes:
    run: The run.
    waiting: `(entry, fingerprint)` of files whose state may still be restored.
    beside: Entries whose state was not restored. They count as runs of their own.
    resumed: `(run, steps)` of the runs whose steps are among those of the run.
    clip_norms: `(steps, clip norm)` of these steps.
    foreign: Another run whose steps these are; '' if there is none.
  """

  run: Run
  waiting: List[Tuple[ledger_lib.Entry, Dict[str, Any]]] = dataclasses.field(default_factory=list)
  beside: List[ledger_lib.Entry] = dataclasses.field(default_factory=list)
  resumed: Tuple[Tuple[str, int], ...] = ()
  clip_norms: Tuple[Tuple[int, float], ...] = ()
  foreign: str = ''

  def put_beside(self, content: bytes) -> bool:
    """Counts the run of a file, whose state was not restored, as another, if it took steps."""
    taken = _taken(content)
    self.beside += taken
    return bool(taken)

  def settled(self) -> 'Earlier':
    """Continues each waiting entry once its state is here, and puts the others beside.

    The state of an optimizer may be restored after its entry in the ledger, or not at all: Keras
    and TensorFlow leave out what does not fit. Then a new run begins.
    """
    run = self.run
    while self.waiting and run.state is not None:
      entry, needed = self.waiting.pop(0)
      first = run.step_counts.read()[-1]  # -1 before the first that is taken here.
      if (run.steps if first < 0 else first) < entry.done:
        self.beside.append(entry)
        continue
      norm = entry.plan and entry.plan.l2_norm_clip  # It may differ.
      plan = run.plan and dataclasses.replace(run.plan, l2_norm_clip=norm)
      self.foreign = ('' if entry.plan == plan else
                      'a checkpoint of another plan') or differences(needed, fingerprint(run))
      self.resumed = entry.resumed + ((entry.run, entry.steps),)
      self.clip_norms = entry.clip_norms or ((entry.done, norm),)
      run.say(**{name: getattr(entry, name) for name in (
          'examples_per_user', 'notes', 'engines', 'seeded', 'shared')})
      run.said['own_sampler'] = '; '.join(dict.fromkeys(filter(
          None, (entry.own_sampler, run.said['own_sampler']))))
      run.stopped = max(run.stopped or 0, entry.steps)  # All that the file counts.
    return self

  def refuse_foreign(self) -> None:
    """Refuses to go on with steps that were restored from a checkpoint of another run."""
    if self.settled().foreign:
      raise errors.PrivacyError(
          'A run must resume with the plan, optimizer and trained variables it started with. '
          f'Received: {self.run.steps} steps restored from {self.foreign}. Give the plan and '
          'optimizer of the checkpoint, and freeze the same layers. For others, start in another '
          'folder, or load the weights with their ledger (`.keras` or `.weights.h5`).')


def _taken(content: bytes) -> List[ledger_lib.Entry]:
  """Returns the entries with steps in the bytes of a run."""
  entries = weight_ledger.parsed(content).entries if content else ()
  return [entry for entry in entries if entry.steps]


def fingerprint(run: Run) -> Dict[str, Any]:
  """Returns what a restored state must have in common with a run, by name, for JSON."""
  place = {id(compat.raw_variable(v)): number for model in run.models[-1:]
           for number, v in enumerate(model.weights)}
  return {
      'optimizer rule': run.rule.name,
      'shape of its state': [list(v.shape) for v in tf.nest.flatten(run.state)
                             if hasattr(v, 'shape')],
      'use of ema': str(run.use_ema),
      'set of trained variables': [
          place.get(id(compat.raw_variable(v)), -1) for v in run.moved] if place else []}


def saved_fingerprint(content: bytes) -> Dict[str, Any]:
  """Returns the fingerprint in the bytes of a run; {} for files of earlier versions."""
  return json.loads(content).get(_FINGERPRINT, {}) if content else {}


def differences(saved: Dict[str, Any], mine: Dict[str, Any]) -> str:
  """Says what differs in two fingerprints; '' if nothing does, or nothing is known of one."""
  return '; '.join(
      f'another {name}, {str(value)[:_LONGEST]} instead of {str(mine[name])[:_LONGEST]}'
      for name, value in saved.items() if mine.get(name) and value and value != mine[name])


def _unpickled(content: bytes) -> ledger_lib.Entry:
  return weight_ledger.parsed(content).entries[0]


def _parts(before: Tuple[Tuple[int, float], ...], steps: int, clip_norm: float
           ) -> Tuple[Tuple[int, float], ...]:
  """Returns `(steps, clip norm)` of the parts of a run, at least one."""
  parts: List[Tuple[int, float]] = []
  for n, norm in [*before, (steps, clip_norm)]:
    n, steps = min(n, steps), max(0, steps - n)
    if parts and parts[-1][1] == norm:
      parts[-1] = parts[-1][0] + n, norm
    elif n > 0:
      parts.append((n, norm))
  return tuple(parts) or ((0, clip_norm),)
