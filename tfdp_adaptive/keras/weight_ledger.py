# SPDX-License-Identifier: Apache-2.0
"""The ledger of weights, attached to the variables themselves, and in files.

Another optimizer, another model that shares a layer, and checkpoints find it there. Every file that
Keras writes or reads, of whatever model, keeps the ledger of its weights: a plain model must not
lose its history. A file of weights holds weights and the ledger. The state of an optimizer, which
is SECRET, goes only into files that resume training: `.keras` files and backups, for their owner
alone.
"""

import contextlib
import logging
import os
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import runfolder
from tfdp_adaptive import trees
from tfdp_adaptive.accounting import stopping
from tfdp_adaptive.independence import disclosures
from tfdp_adaptive.independence import validation
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import ledger as ledger_lib
from tfdp_adaptive.privacy import weight_digests

# A SavedModel would log, for every variable, that it does not read its ledger back.
logging.getLogger('tensorflow').addFilter(
    lambda record: f'{__name__}._Tracked object' not in record.getMessage())
State: Any = tf.train.experimental.PythonState
NAME = '_tfdp_ledger'  # Name in files and checkpoints.
_RUNS = '_tfdp_runs'  # On variables and layers.
_MOST = 10**6  # Objects of a function that are searched: vocabularies are large.
Run = Any  # The run of an optimizer that may still take steps; see `run`.
Place = Any  # A variable or layer.
Store = Any  # Target to which Keras writes the values of a layer or model.


class Ledger:
  """The runs attached to variables and layers.

  A run is a `Run`, whose optimizer may still take steps, or an `Entry` that was read from a file.

  Args:
    places: Variables and layers.

  Examples:
    >>> place = tf.Variable(0.0)
    >>> Ledger([place]).attach([ledger_lib.Entry(None, 3, run='a')])
    >>> [entry.steps for entry in Ledger([place]).ledger().entries]
    [3]
  """

  def __init__(self, places: Sequence[Any]) -> None:
    self._places = list(places)

  @classmethod
  def of(cls, model: compat.Model) -> 'Ledger':
    """Returns the ledger of a model's layers and variables, and of variables that layers read."""
    if not compat.is_model(model):
      return cls(model.variables)
    track(model)
    return cls(places(model))

  def attach(self, runs: Sequence[Any], replace: bool = False) -> None:
    """Attaches runs to all places.

    Args:
      runs: `Run`s and `Entry`s.
      replace: Whether other values took the place of the old: entries of files go, runs stay.
        A vocabulary is in no file of weights, so what it has cost stays, too.
    """
    for place in self._places:
      raw = compat.raw_variable(place)
      keep = not replace or hasattr(place, 'get_vocabulary')
      known = [one for one in getattr(raw, _RUNS, [])
               if keep or not isinstance(one, ledger_lib.Entry)]
      new = [one for one in runs if not any(one is old for old in known)]
      object.__setattr__(raw, _RUNS, new + known if replace else known + new)

  def runs(self) -> List[Any]:
    """Returns all runs of the places and of variables that these runs read, each once."""
    found: Dict[int, Any] = {}
    waiting = list(self._places)
    for place in waiting:
      new = [run for run in getattr(compat.raw_variable(place), _RUNS, [])
             if id(run) not in found]
      found.update((id(run), run) for run in new)
      waiting += [read for run in new if not isinstance(run, ledger_lib.Entry)
                  for read in run.variables]
    return list(found.values())

  def entries(self, besides: Run = None) -> List[ledger_lib.Entry]:
    """Returns the current entries of all runs, or of all but one."""
    return [entry for run in self.runs() if run is not besides
            for entry in ([run] if isinstance(run, ledger_lib.Entry) else run.entries())]

  def ledger(self) -> ledger_lib.Ledger:
    """Returns everything that the places have cost so far."""
    return spent(self.entries())


def places(model: compat.Model) -> List[Any]:
  """Returns everything that can have runs: layers, variables, and variables that layers read."""
  return [*compat.built_variables(model), *validation.seen(model).variables,
          *compat.all_layers(model)]


def held_by(function: Any) -> List[Place]:
  """Returns everything that can have runs to which a function refers."""
  found = disclosures.find(function, most=_MOST)
  return [*found.variables, *(place for layer in found.layers for place in places(layer))]


def spent(some: Sequence[ledger_lib.Entry]) -> ledger_lib.Ledger:
  """Returns the ledger that counts each run once, and only runs that took steps."""
  counted = ledger_lib.distinct(some).entries
  return ledger_lib.Ledger(tuple(entry for entry in counted if entry.steps))


def of_run(run: Run, steps: Optional[int] = None) -> ledger_lib.Ledger:
  """Returns all that the weights of a `Run` have cost after so many of its steps; default: now."""
  return ledger_lib.Ledger(tuple(entry for entry in entries_of_run(run, steps) if entry.steps))


def entries_of_run(run: Run, steps: Optional[int] = None) -> List[ledger_lib.Entry]:
  """Returns the entries of other runs of the weights, then that of the run."""
  mine = run.entries(steps)
  counted = spent([*Ledger(run.variables).entries(besides=run), *mine]).entries
  return [*(entry for entry in counted if entry.run != mine[-1].run), mine[-1]]


def parsed(content: Any) -> ledger_lib.Ledger:
  """Returns the ledger in the bytes of a file, which may be in an array."""
  return ledger_lib.Ledger.from_json(
      content if isinstance(content, bytes) else np.asarray(content).tobytes())


def track(model: compat.Model) -> None:
  """Has checkpoints of a model, its layers or variables, wherever they are, keep their ledger."""
  for one in (*compat.all_layers(model), *compat.built_variables(model)):
    one._maybe_initialize_trackable()
    if one._lookup_dependency(NAME) is None:
      one._track_trackable(_Tracked(one), NAME)  # Restores what was waiting for it, too.


class _Tracked(State):
  """The ledger of a variable or layer, in checkpoints of TensorFlow."""

  def __init__(self, place: Place) -> None:
    super().__init__()
    self._attached = Ledger([place])

  def serialize(self) -> bytes:
    if not tf.executing_eagerly():
      return b''  # A SavedModel.
    return self._attached.ledger().to_json().encode()

  def deserialize(self, string_value: bytes) -> None:
    self._attached.attach(parsed(string_value).entries if string_value else (), replace=True)


def card(entries: Sequence[ledger_lib.Entry], **more: Any) -> card_lib.Card:
  """Returns the privacy card of weights with these entries; for `more`, see `Ledger.card`."""
  return ledger_lib.Ledger(tuple(entries)).card(facts=card_lib.about_weights(entries), **more)


def card_of_model(
    model: compat.Model, audits: Sequence[Any] = (), words: Optional[Mapping[str, str]] = None,
    looks: Optional[stopping.Looks] = None) -> card_lib.Card:
  """Returns the card of all that a model's weights went through; see `DPModel.privacy_card`."""
  run = getattr(getattr(model, 'optimizer', None), 'run', None)
  entries = list(Ledger.of(model).ledger().entries) if run is None else entries_of_run(run)
  if entries[1:] and not entries[-1].steps:  # Compiled anew, and not trained.
    entries = entries[:-1]
  return card(entries, audits=audits, weights=weight_digests.of(compat.saved_arrays(model)),
              words=[card_lib.Words(about, text) for about, text in (words or {}).items()],
              looks=looks)


# Files of Keras.


@contextlib.contextmanager
def _writing(saved: compat.Model, store: Store) -> Iterator[None]:
  # Before anything is written.
  found = Ledger.of(saved).ledger() if hasattr(saved, 'variables') else None
  with runfolder.writing(runfolder.WEIGHTS):
    exact = [v for metric in saved.metrics for v in metric.variables] if hasattr(
        type(saved), 'ledger') and not runfolder.may_be_secret() else []  # Sums of private numbers.
    values = [compat.read(v) for v in exact]
    try:
      trees.assign((v, np.zeros(v.shape)) for v in exact)
      yield
    finally:
      trees.assign(zip(exact, values))
  if found is not None and found.entries:
    store.make(NAME)['0'] = np.frombuffer(found.to_json().encode(), np.uint8)


def _read(saved: compat.Model, store: Store, partly: bool) -> None:
  content = store.get(NAME)
  if '0' in content and hasattr(saved, 'variables'):
    found = parsed(content['0']).entries
    Ledger.of(saved).attach(found, replace=not partly)


@contextlib.contextmanager
def _whole(saved: compat.Model, path: Any) -> Iterator[None]:
  """Marks the file as SECRET while a `.keras` file, which resumes training, is written."""
  if getattr(getattr(saved, 'optimizer', None), 'run', None) is None:
    yield
    return
  on_disk = isinstance(path, (str, os.PathLike))
  with runfolder.writing(runfolder.STATE), (
      compat.owner_only(os.fspath(path)) if on_disk else contextlib.nullcontext()):
    yield
  if on_disk:
    runfolder.tell(path, 'Only its owner can read it (mode 600)')
  else:
    runfolder.tell('A file object', 'Whoever gets its content can read it')


def _legacy(saved: compat.Model, wanted: str, *_: object) -> None:
  if hasattr(type(saved), 'ledger') or (
      compat.is_model(saved) and Ledger(saved.variables).runs()):
    raise ValueError(
        'Legacy formats lose the ledger, which says what the weights have cost in privacy. '
        f'Received: {type(saved).__name__} {getattr(saved, "name", "")!r}. Save to a path that '
        f'ends in {wanted!r}; `model.export(folder)` makes a SavedModel for serving.')


compat.on_files(_writing, _read, _whole, _legacy)
compat.on_checkpoints(runfolder.was_in_checkpoint)
