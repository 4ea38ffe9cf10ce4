# SPDX-License-Identifier: Apache-2.0
"""A run of private training: its terms, rule, state, records and entry in the ledger.

An optimizer holds one `Run`; the model, `fit`, a training loop, checkpoints and files get
everything that is said of the run from it. Every run has an identifier, so that one run is
counted once, wherever its weights are.
"""

import dataclasses
import json
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import private_rule
from tfdp_adaptive import runfolder
from tfdp_adaptive.independence import disclosures
from tfdp_adaptive.independence import validation
from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import ledger as ledger_lib
from tfdp_adaptive.privacy import plan as plan_lib

_NO_PLAN = ('Without a plan there is no epsilon: sampling and number of steps are unknown. Make a '
            '`tfdp.PrivacyPlan` and pass `plan=`.')
_FINGERPRINT = 'fingerprint'  # Key beside the ledger entry of a run in a file.
_LONGEST = 100  # Characters of a value in a message.
_TEXTS = 'notes', 'engines', 'shared'  # Of an entry.


class Run(weight_ledger.State):
  """The steps of one optimizer.

  Attributes:
    plan: The `PrivacyPlan`, with the clip norm that is used; or None.
    rule: The optimizer's rule.
    private: The `PrivateRule`; None until the optimizer is built.
    state: Its SECRET state, a nest of variables.
    moved: The variables that the optimizer moves.
    models: The models it was compiled into. All of their variables count.
    records: SECRET digest of some records, by which the next `fit` recognizes them.
    said: What the run's entry in the ledger says so far, besides its plan, rule and steps.
    read: Ledger entries of data, such as features, that were computed before and that steps read.
    bases: Digests of the bases whose features were trained on.
    stopped: The number of steps that count, if a result decided when to stop.
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
    self.bases: Set[str] = set()
    self._use_ema = use_ema
    self.stopped: Optional[int] = None
    self._id, self._foreign = ledger_lib.new_run(), ''
    self._resumed: Tuple[Tuple[str, int], ...] = ()
    self._clip_norms: Tuple[Tuple[int, float], ...] = ()  # Clip norms of restored steps.
    self._restored: List[Tuple[ledger_lib.Entry, Dict[str, Any]]] = []  # Not compared yet.
    self._closed: List[ledger_lib.Entry] = []  # Restored without their state.
    self.step_counts: Any = None

  def of(self, model: compat.Model) -> None:
    """Assigns the run to all variables of a model."""
    if all(model is not one for one in self.models):
      self.models.append(model)

  def reads(self, data: Any) -> None:
    """Counts the cost of data that have `entries`, such as frozen features, with the weights."""
    self.read.update((entry.run or id(entry), entry) for entry in getattr(data, 'entries', ()))
    if getattr(data, 'base', None):
      self.bases.add(data.base)

  def share(self, other: 'Run') -> None:
    """Notes that another run, or an undone branch of this one, used the same batch for a step."""
    self.say(shared=(other._id,))

  def note(self, *sentences: str) -> None:
    """Adds sentences to the statement, each once."""
    self.say(notes=sentences)

  def say(self, **more: Any) -> None:
    """Adds texts, each once, to those of the run's entry; of numbers, the largest is kept."""
    for name, new in more.items():
      old = self.said[name]
      self.said[name] = tuple(dict.fromkeys((*old, *new))) if name in _TEXTS else max(old, new)

  def disclose(self, model: compat.Model, numbers: Sequence[float] = ()) -> None:
    """Notes what a model, and numbers of its loss and schedule, may hold of private data."""
    held = validation.seen(model)
    disclosures.check(model, held, getattr(self.plan, 'population_size', None))
    covered = lambda layer: disclosures.label(layer) in [
        one.rule for one in weight_ledger.Ledger([layer]).entries()]
    self.note(*disclosures.sentences(model, held, numbers, covered))

  @property
  def steps(self) -> int:
    """Returns the number of noised steps taken so far."""
    return 0 if self.state is None else int(compat.read(self.state.privatizer.noise.row))

  def begin(self, private: private_rule.PrivateRule, state: private_rule.State,
            variables: Sequence[Any]) -> None:
    """Takes the state of a built optimizer, and leaves this run on the variables it moves."""
    self.private, self.state, self.moved = private, state, tuple(variables)
    self.step_counts = compat.replicated_variable(
        tf.constant([0, 0, 0, -1], tf.int64), 'step_counts')
    own = {id(v) for v in variables}
    weight_ledger.Ledger([
        *variables, *(layer for model in self.models for layer in compat.all_layers(model)
                      if any(id(v) in own for v in layer.variables))]).attach([self])

  def record_step(self, row: tf.Tensor) -> None:
    """Records a step in `step_counts`.

    The variable is `[last, most, times, first]`: the last step, the highest, how many rewinds,
    and the number of steps before the first one that was taken here; -1 before that.
    """
    last, most, times, first = tf.unstack(tf.convert_to_tensor(self.step_counts))
    self.step_counts.assign(tf.stack([
        row, tf.maximum(most, row), times + tf.cast(row <= last, row.dtype),
        tf.where(first < 0, row - 1, first)]))

  @property
  def variables(self) -> List[Any]:
    """Returns all weights of the run, frozen or not."""
    for model in self.models:
      weight_ledger.track(model)
    return [*self.moved, *(v for model in self.models for v in weight_ledger.places(model))]

  def entries(self, steps: Optional[int] = None) -> List[ledger_lib.Entry]:
    """Returns the entries of the run: branches replaced by older weights, then the current one."""
    self._compare()
    now, last, most, times = self.steps, 0, 0, 0
    if self.step_counts is not None:
      last, most, times, _ = compat.read(self.step_counts).tolist()
      times += now < last
    run = lambda branch: f'{self._id}.{branch}'
    unknown = [ledger_lib.Entry(None, max(1, now), run=run('other'))] if self._foreign else []
    undone = [self._entry(most, run(branch), ()) for branch in range(times)]
    steps = max(now if steps is None else steps, self.stopped or 0)
    closed = [*self._closed, *(entry for entry, _ in self._restored)]
    mine = self._entry(steps, run(times), self._resumed)
    return [*self.read.values(), *closed, *unknown, *undone, mine]

  def _entry(self, steps: int, run: str, resumed: Tuple[Tuple[str, int], ...]) -> ledger_lib.Entry:
    begun, = ledger_lib.Ledger().begin(self.plan, self.rule).entries
    parts: Dict[str, Any] = {}
    if self.plan is not None:
      steps = min(steps, self.plan.steps)  # Later steps release nothing of the data.
      taken = self.steps if self.steps < steps == self.stopped else None
      norms = _parts(self._clip_norms, steps if taken is None else taken, self.plan.l2_norm_clip)
      parts = dict(plan=self._clipped_at(norms[-1][1]), taken=taken,
                   clip_norms=norms if len(norms) > 1 else ())
    said: Dict[str, Any] = {
        name: tuple(self.said[name]) if name in _TEXTS else self.said[name]
        for name in self.said}
    return dataclasses.replace(begun, steps=steps, run=run, resumed=resumed, **said, **parts)

  def _clipped_at(self, norm: float) -> Any:
    return self.plan if norm == self.plan.l2_norm_clip else dataclasses.replace(
        self.plan, l2_norm_clip=norm)

  # Privacy of the run, all of it from `ledger`.

  def ledger(self, steps: Optional[int] = None) -> ledger_lib.Ledger:
    """Returns all that the weights have cost after `steps` steps of this run (default: now).

    Raises:
      ValueError: For `steps` without a plan.
    """
    if steps is not None and self.plan is None:
      raise ValueError(_NO_PLAN)
    return ledger_lib.Ledger(tuple(entry for entry in self.all_entries(steps) if entry.steps))

  def all_entries(self, steps: Optional[int]) -> List[ledger_lib.Entry]:
    """Returns the other runs of the weights, then this run."""
    mine = self.entries(steps)
    others = weight_ledger.Ledger(self.variables).entries(besides=self)
    counted = weight_ledger.spent([*others, *mine]).entries
    return [*(entry for entry in counted if entry.run != mine[-1].run), mine[-1]]

  def epsilon(self, steps: Optional[int] = None) -> float:
    """Returns epsilon at the plan's delta after `steps` steps (default: all that are planned)."""
    if self.plan is None:
      raise ValueError(_NO_PLAN)
    return self.ledger(self.plan.steps if steps is None else steps).epsilon(self.plan.target_delta)

  def check_records(self, digest: Callable[[], str], in_file: bool = False) -> None:
    """Refuses records that differ from those of earlier steps, if the order of records matters.

    Where random numbers are not drawn at every step, the place of a record decides when it takes
    part: moved, it would take part sooner than is accounted for.

    Args:
      digest: Returns a digest of the records; called where their places decide something.
      in_file: Whether the file of a sampling seed knows the records, too.
    """
    if self.plan.sampling.drawn_each_step:
      return
    found = digest()
    if self.steps and self.records is not None and self.records != found:
      raise errors.PrivacyError(
          f'A run by {self.plan.sampling} goes on with the records that it began with, in the '
          'same order: by their places they would take part sooner than they are accounted for. '
          f'Received: after {self.steps} steps, other records, or in another order. Give '
          'those of the first `fit`; for others make a new plan, optimizer and run.')
    if self.steps and self.records is None and not in_file:
      errors.caution(
          f'The {self.steps} steps so far were taken elsewhere, and nothing tells whether the '
          'records are the same, in the same order: in other places they would take part sooner '
          'than is accounted for. Name a SECRET file that knows, when a run begins and when it '
          'goes on: `plan.batches(data, coins=PATH)`; or use `tfdp.callbacks.BackupAndRestore`.')
    self.records = found

  # In files, the run is beside the optimizer's state.

  def __deepcopy__(self, memo: object) -> 'Run':
    return self  # A copied layer has the same history.

  def __reduce__(self) -> Any:
    return _unpickled, (self.to_bytes(),)

  def fingerprint(self) -> Dict[str, Any]:
    """Returns what a restored state must have in common with this run, by name, for JSON."""
    place = {id(compat.raw_variable(v)): number for model in self.models[-1:]
             for number, v in enumerate(model.weights)}
    return {
        'optimizer rule': self.rule.name,
        'shape of its state': [list(v.shape) for v in tf.nest.flatten(self.state)
                               if hasattr(v, 'shape')],
        'use of ema': str(self._use_ema),
        'set of trained variables': [
            place.get(id(compat.raw_variable(v)), -1) for v in self.moved] if place else []}

  def to_bytes(self) -> bytes:
    """Returns the run for files that resume training."""
    ledger = json.loads(ledger_lib.Ledger((self.entries()[-1],)).to_json())
    return json.dumps({**ledger, _FINGERPRINT: self.fingerprint()}).encode()

  def serialize(self) -> bytes:
    """Returns the same for a checkpoint of TensorFlow, which says what it holds."""
    if not tf.executing_eagerly():
      return b''  # A SavedModel.
    runfolder.in_checkpoint()
    runfolder.tell('A checkpoint of TensorFlow', 'Only its owner can read it (mode 600)')
    return self.to_bytes()

  def deserialize(self, string_value: bytes) -> None:
    """Continues the run of a file whose state was or will be restored."""
    for entry in weight_ledger.parsed(string_value).entries if string_value else ():
      if entry.steps and entry.run.split('.')[0] != self._id:
        self._restored.append((entry, fingerprint(string_value)))
        if self.step_counts is not None:
          last, most, times, _ = compat.read(self.step_counts).tolist()
          self.step_counts.assign([last, most, times, -1])

  def close(self, content: bytes) -> bool:
    """Counts the run of a file, whose state was not restored, beside this one, if it took steps."""
    entries = weight_ledger.parsed(content).entries if content else ()
    taken = [entry for entry in entries if entry.steps]
    self._closed += taken
    return bool(taken)

  def _compare(self) -> None:
    """Continues each restored entry whose state is here, and closes the others.

    The state of an optimizer may be restored after its entry in the ledger, or not at all: Keras
    and TensorFlow leave out what does not fit. Then a new run begins.
    """
    if self.state is None:
      return
    while self._restored:
      entry, needed = self._restored.pop(0)
      first = compat.read(self.step_counts).tolist()[-1]
      if (self.steps if first < 0 else first) < entry.done:
        self._closed.append(entry)
        continue
      self._foreign = ('' if _same_plan(entry.plan, self.plan) else
                       'a checkpoint of another plan') or differences(
                           needed, self.fingerprint())
      self._resumed = entry.resumed + ((entry.run, entry.steps),)
      norm = entry.plan and entry.plan.l2_norm_clip
      self._clip_norms = entry.clip_norms or ((entry.done, norm),)
      self.say(**{name: getattr(entry, name) for name in (
          'examples_per_user', 'notes', 'engines', 'seeded', 'shared')})
      self.said['own_sampler'] = '; '.join(dict.fromkeys(filter(
          None, (entry.own_sampler, self.said['own_sampler']))))
      self.stopped = max(self.stopped or 0, entry.steps)  # All that the file counts.

  def refuse_foreign(self) -> None:
    """Refuses to go on with steps that were restored from a checkpoint of another run."""
    self._compare()
    if self._foreign:
      raise errors.PrivacyError(
          'A run must resume with the plan, optimizer and trained variables it started with. '
          f'Received: {self.steps} steps restored from {self._foreign}. Give the plan and '
          'optimizer of the checkpoint, and freeze the same layers. For others, start in another '
          'folder, or load the weights with their ledger (`.keras` or `.weights.h5`).')


def fingerprint(content: bytes) -> Dict[str, Any]:
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


def _same_plan(one: Optional[plan_lib.PrivacyPlan], other: Optional[plan_lib.PrivacyPlan]) -> bool:
  """Whether two plans account for the same run, whatever its clip norm."""
  if one is None or other is None:
    return one is other
  return all(getattr(one, field.name) == getattr(other, field.name)
             for field in dataclasses.fields(one) if field.name != 'l2_norm_clip')
