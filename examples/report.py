# SPDX-License-Identifier: Apache-2.0
"""One table of results, as text, JSON and curves, and the privacy statement beside it."""

from __future__ import annotations

import contextlib
from importlib import metadata
import io
import itertools
import json
import math
import pathlib
import platform
import shutil
import sys
import time
from typing import (
  Any,
  Callable,
  Dict,
  List,
  NamedTuple,
  Optional,
  Sequence,
  Tuple,
  TYPE_CHECKING,
  Union,
)

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import errors
from tfdp_adaptive import runfolder
from tfdp_adaptive import version

if TYPE_CHECKING:

  from . import settings as settings_lib
  from . import tasks

STATE = '.state'  # Suffix of folders that unfinished runs keep.
_COLUMNS = ('method', 'loss', 'accuracy', 'epsilon', 'delta', 'unit', 'seconds per step')


class Run(NamedTuple):
  """Measurements of one training run."""

  curve: Tuple[Tuple[int, float, float], ...]  # (step, loss, accuracy) on held-out words.
  seconds_per_step: Optional[float]  # Median over steps; None where it would tell of them.

  @property
  def loss(self) -> float:
    return self.curve[-1][1]

  @property
  def accuracy(self) -> float:
    return self.curve[-1][2]


class Row(NamedTuple):
  """Results of one method on the held-out words."""

  method: str
  part: str  # 'centralized' or 'federated'
  loss: float
  accuracy: float
  epsilon: Optional[float] = None  # None: no privacy.
  delta: Optional[float] = None
  unit: str = '-'
  seconds_per_step: Optional[float] = None
  steps: int = 0
  settings: Dict[str, Any] = {}
  curve: Tuple[Tuple[int, float, float], ...] = ()  # (step, loss, accuracy)


def unreadable(saved: Any, error: Any) -> errors.UsageError:
  """The error that what an unfinished run saved is broken."""
  return errors.UsageError(
      f'{saved} cannot be read: {error}. Start again in another --out DIR; what was spent in this '
      'one then counts as well if any of it was published.')


def unused() -> pathlib.Path:
  """A folder named after the time, which no other command has."""
  stem = pathlib.Path('runs', time.strftime('%Y-%m-%d_%H-%M-%S'))
  names = (stem.with_name(f'{stem.name}_{i}') for i in itertools.count(2))
  return next(path for path in itertools.chain([stem], names) if not path.exists())


class Report:
  """Collects rows and keeps the files up to date after each of them; a context manager.

  From the first file it writes on, no other command can use the folder.

  Args:
    out: Folder, or None for `runs/<time>`. It is created with the first row.
    options: What the run was asked for, for JSON.
    as_json: Whether the results are printed as JSON.
    state: Name of the folder in it from which an unfinished run of this kind goes on;
      what is in there is SECRET. `finish` removes it.

  Raises:
    errors.UsageError: The folder holds results or another unfinished run, or is a file.
  """

  def __init__(self, out: Optional[pathlib.Path], options: Dict[str, Any], as_json: bool,
               state: str = '') -> None:
    self._options, self._as_json = options, as_json
    self._folder = unused() if out is None else out
    if self._folder.exists() and not self._folder.is_dir():
      raise errors.UsageError(f'--out must be a folder. Received: {self._folder}')
    self.unfinished: Any = self.path(state + STATE) if state else None
    self._lock: Optional[runfolder.Lock] = None
    self._about: Dict[str, Any] = {}
    self._rows: List[Row] = []
    self._statement: List[str] = []
    self._files: List[pathlib.Path] = []
    self._refuse_others()

  def __enter__(self) -> 'Report':
    return self

  def __exit__(self, *error: Any) -> None:
    if self._lock is not None:
      self._lock.close()

  def describe(self, task: tasks.Task, tuned: Union[bool, str]) -> None:
    """Says what the run is about: the text, and what no epsilon covers.

    Args:
      task: What is trained on.
      tuned: Whether settings were chosen by this run, or how.
    """
    self._about = {
        'data': task.name, 'training_sentences': len(task.train[0]),
        'clients': len(task.clients), 'vocabulary_and_special_words': task.num_ids,
        'options': self._options, 'versions': versions()}
    if not isinstance(tuned, str):
      tuned = (
          'Settings were chosen by this run on validation sentences; the models trained for that '
          'are counted below.' if tuned else
          'Settings are the recorded ones, chosen on the public default text. Choosing others on '
          'private text costs privacy, and every model trained for it counts.')
    self.state(
        'PRIVACY STATEMENT', *task.notes, tuned,
        'An example is one sentence, of which the first words are used. Guarantees for an example '
        'say nothing of an author of several; those for a user cover all sentences of a client.',
        'Losses, accuracies and curves are exact numbers on held-out text, and times depend on '
        'the training text. They are covered by no epsilon: publish them only if the text is '
        'public.')

  def _refuse_others(self) -> None:
    for other in set(self._folder.glob('*' + STATE)) - {self.unfinished}:
      raise errors.UsageError(
          f'{other} belongs to an unfinished run of another command; give another --out DIR.')
    if self.path('results.json').exists() and not (self.unfinished and self.unfinished.exists()):
      raise errors.UsageError(
          f'{self.path("results.json")} exists and would be overwritten; give another --out DIR.')

  def _claim(self) -> None:
    """Makes the folder and locks it, once."""
    if self._lock is None:
      self._folder.mkdir(parents=True, exist_ok=True)
      self._lock = lock(self._folder)
      self._refuse_others()  # Another command may have ended in the meantime.

  def begin(self, description: Dict[str, Any]) -> None:
    """Makes the folder of the unfinished run, or sees that it is this run's.

    Args:
      description: What must be the same when a run goes on, for JSON.

    Raises:
      errors.UsageError: The folder cannot be used, or holds another run.
    """
    self._claim()
    self.unfinished.mkdir(exist_ok=True)
    self.unfinished.chmod(0o700)  # Whatever the umask: what will be in there is secret.
    text, path = json.dumps(description), self.unfinished / 'run.json'
    if set(self.unfinished.iterdir()) - {path}:
      try:
        same = path.read_text(encoding='utf-8') == text
      except (OSError, ValueError) as error:
        raise unreadable(self.unfinished, error) from error
      if not same:
        raise errors.UsageError(
            f'{self.unfinished} holds an unfinished run with other data or arguments. Give those, '
            'or another --out DIR.')
    else:
      runfolder.replace(path, text.encode())

  def path(self, name: str) -> pathlib.Path:
    return self._folder / name

  def file(self, name: str) -> pathlib.Path:
    """The path of one more file of results, named at the end with the others."""
    self._files.append(self.path(name))
    return self._files[-1]

  def add(self, row: Row) -> None:
    """Adds a result and saves what there is, so that an interrupted run keeps it."""
    self._rows.append(row)
    self._write('results.json', self.json())

  def add_run(
      self, method: settings_lib.Method, part: str, measured: Run,
      settings: Dict[str, Any], **guarantee: Any) -> None:
    """Adds what a method reached; `guarantee` is epsilon, delta and unit, if there is one."""
    self.add(Row(
        method.label, part, measured.loss, measured.accuracy, steps=measured.curve[-1][0],
        seconds_per_step=measured.seconds_per_step, settings=settings, curve=measured.curve,
        **guarantee))

  def state(self, *paragraphs: str) -> None:
    """Adds paragraphs to the privacy statement and saves it."""
    self._statement += paragraphs
    self._write('privacy.txt', '\n\n'.join(self._statement))

  def _write(self, name: str, text: str) -> None:
    self._claim()
    runfolder.replace(self.path(name), (text + '\n').encode(), 0o666)

  def card(self, card: Any, name: str = 'card') -> None:
    """Writes the privacy card of the model beside the statement, for people and for programs."""
    from tfdp_adaptive.report import card_page  # pylint: disable=import-outside-toplevel
    self._claim()
    self._files += card_page.write(card_page.files(card, name), self._folder)

  def state_together(
      self, part: str, entries: Sequence[Any], trust: str = 'central',
      facts: Sequence[str] = ()) -> None:
    """States what the models of one part cost when all of them are released.

    Args:
      part: Name of the part.
      entries: The entries of the ledgers of all models.
      trust: As for `Ledger.card`.
      facts: As for `Ledger.card`.
    """
    if entries:
      from tfdp_adaptive.privacy import ledger  # pylint: disable=import-outside-toplevel
      together = ledger.Ledger(tuple(entries)).card(trust=trust, facts=[
          *facts, 'These are the runs of several models, each trained once on the same records.'])
      self.card(together, f'card_{part}')
      self.state(
          f'All {len(entries)} private models of the {part} part together, trained on the same '
          f'records: ({_rounded_up(together.epsilon or 0.0)}, {together.delta:g})-differential '
          'privacy.')

  def json(self) -> str:
    return json.dumps(checks.for_json(
        dict(self._about, rows=[row._asdict() for row in self._rows])), indent=1)

  def table(self) -> str:
    """The rows as aligned text, part by part, the best first by what its panel shows."""
    parts = list(dict.fromkeys(row.part for row in self._rows))
    rows = sorted(self._rows, key=lambda row: (parts.index(row.part), _rank(row)))
    lines = aligned([_COLUMNS] + [_cells(row) for row in rows])
    result = lines[:1]
    for part in parts:
      result.append(f'-- {part} '.ljust(len(lines[0]), '-'))
      result += [line for row, line in zip(rows, lines[1:]) if row.part == part]
    return '\n'.join(result)

  def finish(self) -> None:
    """Draws the curves, prints the results and the paths of all files."""
    paths = [self.path('results.json'), self.path('privacy.txt'), *self._files]
    if _draw(self._rows, self.path('curves.png')):
      paths.append(self.path('curves.png'))
    print(self.json() if self._as_json else '\n' + self.table())
    notes = ['', 'Loss and accuracy are exact numbers on held-out data: they are not private.',
             'Every epsilon is for its model alone; privacy.txt says what several cost together.',
             ''] + [str(path) for path in paths]
    print('\n'.join(notes), file=sys.stderr if self._as_json else sys.stdout)
    if self.unfinished:
      shutil.rmtree(self.unfinished, ignore_errors=True)


def aligned(cells: Sequence[Sequence[str]]) -> List[str]:
  """Lines of a table: the first column to the left, the others to the right."""
  widths = [max(map(len, column)) for column in zip(*cells)]
  return ['  '.join(cell.rjust(width) if i else cell.ljust(width)
                    for i, (cell, width) in enumerate(zip(line, widths))) for line in cells]


def canvas(name: str, **size: Any) -> Any:
  """An empty figure of matplotlib; None, and a word about the file, where that is missing."""
  try:
    from matplotlib import figure  # pylint: disable=import-outside-toplevel
  except ImportError:
    print(f'No {name}: matplotlib is not installed (pip install tfdp-adaptive[plots]).',
          file=sys.stderr)
    return None
  return figure.Figure(layout='constrained', **size)


def lock(path: pathlib.Path) -> runfolder.Lock:
  """Keeps other commands out of a folder.

  Raises:
    errors.UsageError: Another command has the folder, or nothing can be locked there.
  """
  try:
    return runfolder.Lock(path)
  except runfolder.Held as error:
    raise errors.UsageError(
        f'Another tfdp is at work in {path}. Wait for it, or give another --out DIR.') from error
  except OSError as error:
    raise errors.UsageError(
        f'{path} cannot be locked ({error.strerror}), so two commands could spoil one run '
        'there. Give an --out on another file system.') from error


def _cells(row: Row) -> Tuple[str, ...]:
  return (
      row.method, f'{row.loss:.3f}', f'{row.accuracy:.3f}',
      'none' if row.epsilon is None else _rounded_up(row.epsilon),
      '-' if row.delta is None else f'{row.delta:.0e}', row.unit,
      '-' if row.seconds_per_step is None else f'{row.seconds_per_step:.3f}')


def _rank(row: Row) -> float:
  return 1 - row.accuracy if row.part == 'scales' else row.loss


def _rounded_up(epsilon: float) -> str:
  from tfdp_adaptive.privacy import statement  # It is slow. pylint: disable=import-outside-toplevel
  return statement.rounded_up(epsilon)


def versions() -> Dict[str, str]:
  """Versions of this library and of what it runs on, without importing it."""
  found = {'tfdp-adaptive': version.__version__, 'Python': platform.python_version()}
  for name in ('tensorflow', 'keras', 'tensorflow-federated', 'dp-accounting', 'numpy'):
    with contextlib.suppress(metadata.PackageNotFoundError):
      found[name] = metadata.version(name)
  return found


class _Panel(NamedTuple):
  """How one part is drawn.

  Attributes:
    title: What decides here.
    quantity: Of the vertical axis.
    value: Of loss, accuracy and the loss of word frequencies alone.
    steps: Of the horizontal axis.
    fewer: What the best private method has, against the first; '' where more is better.
  """

  title: str
  quantity: str
  value: Callable[[float, float, float], float]
  steps: str = 'step'
  fewer: str = ''


_GAIN = 'gain over word frequencies, nats per word'
_PANELS = {
    'scales': _Panel('Inputs in very different units: noise in the geometry of the optimizer',
                     'wrong answers on new examples', lambda l, a, b: 1 - a, fewer='fewer errors'),
    'noise': _Panel('Many classes, most of them rare: noise that cancels over the steps',
                    'loss on new examples, nats', lambda l, a, b: l, fewer='less loss'),
    'centralized': _Panel('Next words: every sentence protected', _GAIN, lambda l, a, b: b - l),
    'federated': _Panel('Next words, federated: every client protected as a whole', _GAIN,
                        lambda l, a, b: b - l, 'round'),
}
_COLORS = {  # A method has the same one in all panels.
    'DP-SGD': 'C0', 'DP-Adam': 'C1', 'DP-AdamBC': 'C2', 'DP-AdamSTP': 'C3', 'DP-AdamIME': 'C4',
    'DP-SGD, independent noise': 'C0', 'DP-SGD, banded noise': 'C6'}


def _draw(rows: Sequence[Row], path: pathlib.Path) -> bool:
  """Saves learning curves, one panel per part; False where there are none."""
  parts = [part for part in _PANELS if any(row.part == part and len(row.curve) > 1 for row in rows)]
  if not parts:
    return False
  columns = min(2, len(parts))
  picture = canvas(path.name, figsize=(6.5 * columns, 5 * -(-len(parts) // columns)))
  if picture is None:
    return False
  if columns > 1:
    picture.suptitle('At equal privacy, optimizer and noise decide how much is learned')
  panels = np.ravel(picture.subplots(-(-len(parts) // columns), columns))
  for part, panel in zip(parts, panels):
    _draw_part(panel, _PANELS[part], [row for row in rows if row.part == part])
  for panel in panels[len(parts):]:
    panel.set_axis_off()
  content = io.BytesIO()
  picture.savefig(content, dpi=90)
  runfolder.replace(path, content.getvalue(), 0o666)
  return True


def _draw_part(panel: Any, how: _Panel, rows: Sequence[Row]) -> None:
  """One line per method, named in the order they end in; gray and dotted without privacy."""
  baseline = next((row.loss for row in rows if not row.curve), 0.0)
  lines, ends, other = [], {}, 0.0
  for row in rows:
    if len(row.curve) > 1:
      values = [how.value(loss, accuracy, baseline) for _, loss, accuracy in row.curve]
      style = (dict(color='0.4', linestyle=':') if row.epsilon is None else
               dict(color=_COLORS[row.method]) if row.method in _COLORS else {})
      lines += panel.plot([step for step, *_ in row.curve], values, linewidth=2,
                          label=f'{row.method}: {values[-1]:.3g}', **style)
      if row.epsilon is None:
        other = values[-1]
      else:
        ends[row.method] = values[-1]
  # The common start would flatten the rest.
  late = np.concatenate([line.get_xydata()[len(line.get_xydata()) // 5:] for line in lines])
  (begin, low), (_, high) = late.min(axis=0), late.max(axis=0)
  panel.set_xlim(left=begin)
  panel.set_ylim(low - .1 * (high - low) - 1e-9, high + .45 * (high - low) + 1e-9)  # Legends fit.
  panel.set_title(f'{how.title}\n{_found(how, rows, ends, other)}', fontsize='medium')
  panel.set(xlabel=f'{how.steps} (from {begin:g} on)', ylabel=how.quantity)
  panel.grid(alpha=.3)
  lines.sort(key=lambda line: -line.get_ydata()[-1])
  panel.legend(handles=lines, fontsize='small', loc='upper right' if how.fewer else 'upper left')


def _found(how: _Panel, rows: Sequence[Row], ends: Dict[str, float], other: float) -> str:
  """Returns the result in one line: the best private method, and its epsilon."""
  private = next(((row.epsilon, row.unit) for row in rows if row.epsilon is not None), None)
  if private is None or not ends:
    return ''
  limit = f'epsilon {math.ceil(100 * private[0]) / 100:g} per {private[1]}'
  if not how.fewer:
    best = max(ends, key=lambda name: ends[name])
    of = f' of {other:.2g} without privacy' if other else ''
    return f'{best} gains {ends[best]:.2g}{of}, {limit}'
  best, plain = min(ends, key=lambda name: ends[name]), next(iter(ends))
  if best == plain:
    return limit
  one, than = (name.split(', ')[-1] for name in (best, plain))
  return f'{one}: {1 - ends[best] / ends[plain]:.0%} {how.fewer} than {than}, {limit}'
