# SPDX-License-Identifier: Apache-2.0
"""Compares an example's outputs and gradients in batches whose other examples differ.

What an example contributes must not depend on what else is in the batch. Some examples of
a batch are changed (permuted, zeroed, scaled, padded, copied; fewer or more of them), and
all that the gradients of the others are formed from is compared, value by value. Values
tell what gradients do not: integers, ranks, thresholds, lengths, what is behind
`stop_gradient`, what a backward pass of a layer's own does. What happens for some values,
sizes, counts or draws only is looked for at the constants that the graph compares with.

What remains unseen: mixing below 1e-5 of what it changes; conditions that no constant of
the graph tells and none of these batches meets (a hash of all words, a threshold that is a
weight or lies behind layers that no input gets beyond); conditions inside Python code that
the graph calls (`tf.numpy_function`).
"""

import contextlib
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive import errors
from tfdp_adaptive import trees
from tfdp_adaptive.clipping import bookkeeping
from tfdp_adaptive.independence import constants as constants_lib
from tfdp_adaptive.independence import probes

SIZE = 7  # Examples in a batch; unlike the lengths of axes that models leave open.
_MORE = 6  # Times as many.
_OTHER_DRAWS = (0.37, 0.71, probes.LEAST, probes.MOST)
_LATE = 10**6  # Steps.
# With more numbers to compare or to compute in a run, there are fewer runs.
_HEAVY, _HEAVY_TO_COMPUTE = 2e6, 2e7
_LARGEST = 2e7  # Numbers of a run of the sizes that the graph asks for.
# Tolerance of rounding: on most machines batches of one size differ by nothing.
_ROUNDING = 1e-5
_ROUNDING_OF_SIZES = 1e-2


_SETTING = threading.RLock()
Change = Callable[..., np.ndarray]  # `(rows, all rows, unchanged ones) -> rows`.
Case = Tuple[str, Change, Sequence[int]]  # `(words, change, unchanged ones)`.


@contextlib.contextmanager
def _as_traced() -> Iterator[None]:
  """Leaves graphs as they are: to optimize one costs more than it saves in the runs of a check.

  The setting is one for all threads: if two checks overlapped, one could leave it changed.
  """
  name, optimizer = 'disable_meta_optimizer', tf.config.optimizer
  with _SETTING:
    before = optimizer.get_experimental_options().get(name, False)
    optimizer.set_experimental_options({name: True})
    try:
      yield
    finally:
      optimizer.set_experimental_options({name: before})


@_as_traced()
def check(
    model: compat.Model, leaves: List[np.ndarray], structure: trees.Tree, static: Optional[int],
    after_call: Callable[..., Any]) -> constants_lib.Held:
  """Raises `PrivacyError` where an example depends on others, or a step keeps data.

  Args:
    model: A built Keras model.
    leaves: Arrays [n, ...] of examples, the leaves of the model's inputs.
    structure: The nest of these inputs.
    static: The size of a batch, where training knows it when it is traced.
    after_call: Called after the model, while it is traced.

  Returns:
    What the model holds besides its inputs.
  """
  n = len(leaves[0])
  traces = _Traces(model, leaves, structure, static is not None, after_call)
  _check_code(model, traces, n)
  first = traces.of(n)
  written = constants_lib.written(first.concrete, first.inputs)
  if written:
    raise errors.PrivacyError(
        'Layers write statistics of the data into what outlives the step, around clipping and '
        f'noise. Received: {"; ".join(written)}. Freeze these layers, or leave them out.')
  _check_repeats(traces, leaves)
  held = constants_lib.held(first.concrete)
  if not bookkeeping.supports(model, traces.nest(leaves))[0]:
    return held  # Another engine runs every example by itself.
  random = probes.has_draws(first.concrete)
  constants = constants_lib.compared(first.concrete)
  _check_contents(traces, leaves)
  for salt in _OTHER_DRAWS if random else ():
    _check_contents(traces, leaves, salt=salt)
  settings = traces.runner(n).settings
  if any(t.is_integer for t in settings):
    for count in dict.fromkeys([_LATE] + [c + i for c in constants.integers for i in (-1, 0, 1)]):
      _check_contents(traces, leaves, count=count)
  if any(t.is_floating for t in settings):
    for c in constants.reals:
      _check_contents(traces, leaves, rate=1.1 * c)
  _check_constants(traces, leaves, constants)
  _check_sizes(traces, leaves, random, static, constants.integers)
  return held


class _Traces:
  """The traces of one model, by the size of the batch where that is static."""

  def __init__(
      self, model: compat.Model, leaves: List[np.ndarray], structure: trees.Tree, static: bool,
      after_call: Callable[..., Any]) -> None:
    self._model, self._structure, self._after_call = model, structure, after_call
    self._leaves, self._static = leaves, static
    self._traces: Dict[Optional[int], probes.Trace] = {}
    self._runners: Dict[Any, probes.Runner] = {}

  def of(self, size: int) -> probes.Trace:
    if not self._static and None not in self._traces:
      try:
        self._traces[None] = self._trace(None)
      except (TypeError, ValueError, tf.errors.InvalidArgumentError):
        self._static = True  # Its code wants to know the size.
    key = size if self._static else None
    if key not in self._traces:
      self._traces[key] = self._trace(size)
    return self._traces[key]

  def forget(self) -> None:
    self._traces.clear()

  def runner(self, size: int) -> probes.Runner:
    key = size if self._static else None
    if key not in self._runners:
      self._runners[key] = probes.Runner(self._model, self.of(size))
    return self._runners[key]

  def differ(self, size: int, other: int) -> bool:
    """Returns whether a batch of another size runs other operations."""
    one, two = (sorted(op.type for op in self.of(n).concrete.graph.get_operations())
                for n in (size, other))
    return one != two

  def nest(self, leaves: Sequence[Any]) -> Any:
    return tf.nest.pack_sequence_as(self._structure, leaves)

  def _trace(self, size: Optional[int]) -> probes.Trace:
    return probes.trace(self._model, self.nest(
        [tf.TensorSpec([size] + list(t.shape[1:]), _dtype(t)) for t in self._leaves]),
                        self._after_call)


def _check_code(model: compat.Model, traces: _Traces, n: int) -> None:
  """Checks that a second trace gives the same graph, because training traces the model again."""
  for _ in range(2):  # The first time, layers may still be made.
    before = probes.python_state(model)
    traces.forget()
    traces.of(n)
    changed = probes.python_state(model).items() - before.items()
    if not changed:
      return
  raise errors.PrivacyError(
      'The Python code of a model must do the same in every call. TensorFlow traces it once, so '
      'the model that trains could differ from the one that was checked. Received: attributes that '
      f'change with every call, {sorted({name for (_, name), _ in changed})}. Count in a '
      '`tf.Variable`.')


def _check_repeats(traces: _Traces, leaves: List[np.ndarray]) -> None:
  """Checks that a batch gives the same result again after a batch of zeros."""
  run = traces.runner(len(leaves[0]))
  batch = leaves + [_errors(len(leaves[0]))]
  before = run(batch)
  _accepted(run, [np.zeros_like(t) for t in batch])
  after = run(batch)
  if not all(near(old, new, _ROUNDING) for old, new in zip(
      before.outputs + before.factors, after.outputs + after.factors)):
    raise errors.PrivacyError(
        'A step must be a function of its batch, its variables and draws of TensorFlow. Received: '
        'a model that gives something else for the same batch. Python functions that the graph '
        'calls (`tf.numpy_function`) must not draw numbers or keep state.')


def _check_contents(
    traces: _Traces, leaves: List[np.ndarray], salt: float = 0.0, count: Optional[int] = None,
    rate: Optional[float] = None) -> None:
  """Changes some examples in many ways, and checks that the others do not change."""
  n = len(leaves[0])
  run = traces.runner(n)
  run.salt, run.count, run.rate = salt, count, rate
  two, last, all_but_one = [0, n // 2], [n - 1], [i for i in range(n) if i != n // 3]
  cases = [(kind, unchanged) for kind in CHANGES for unchanged in (two, last)]
  cases += [(kind, all_but_one) for kind in ('zeroed', 'scaled', 'shortened')]
  bases = [leaves] + [ragged(leaves, slice(None, None, step)) for step in (1, -1)]
  heavy = _is_heavy(run, run(leaves + [_errors(n)]))
  if salt or count is not None or rate is not None:
    cases = [(kind, two) for kind in ('permuted', 'scaled')]
    bases = bases[:1] if heavy or count is not None else bases
  elif heavy:
    cases = [('permuted', two), ('scaled', two), ('not finite', two), ('copies', last),
             ('shortened', two)]
    bases = bases[:2]
  for base in bases:
    _compare(run, base, [(kind, CHANGES[kind], unchanged) for kind, unchanged in cases])
  run.salt, run.count, run.rate = 0.0, None, None


def _compare(run: probes.Runner, base: List[np.ndarray], cases: Sequence[Case]) -> None:
  """Raises where unchanged examples notice `cases` of the others."""
  batch = base + [_errors(len(base[0]))]
  before = _accepted(run, batch)
  for words, change, unchanged in cases if before is not None else ():
    after = _run_changed(run, batch, change, unchanged)
    if after is not None:
      how = difference(run, before, after, unchanged, unchanged, _ROUNDING)
      if how:
        raise mixes(f'{how} when the other examples are {words}', max(
            moved(run, before, after, unchanged, unchanged), _influence(run, batch, before)))


def _check_constants(traces: _Traces, leaves: List[np.ndarray],
                     found: constants_lib.Constants) -> None:
  """Batches that hold what the graph compares with, or are as large: here and there, or all."""
  n = len(leaves[0])
  if not _is_heavy(traces.runner(n), traces.runner(n)(leaves + [_errors(n)])):
    leaves = [t[np.arange(_MORE * n) % n] for t in leaves]
    n *= _MORE
  run, unchanged = traces.runner(n), [0, n // 2]
  for base, c in constants_lib.batches(leaves, found):
    filled = lambda rows, _, __, c=c: constants_lib.filled(rows, c)
    words = f'set to {c:g}' if isinstance(c, float) else f'set to {c}'
    _compare(run, base, [(words, filled, unchanged)] + [
        (kind, CHANGES[kind], unchanged) for kind in ('permuted', 'scaled', 'negated')])


def _check_sizes(
    traces: _Traces, leaves: List[np.ndarray], random: bool, static: Optional[int],
    constants: List[int]) -> None:
  """Removes or adds examples, at the end if random draws depend on the position.

  Args:
    traces: The model's.
    leaves: Arrays of examples.
    random: Whether anything is drawn.
    static: The size of a batch in training, where it is known when that is traced.
    constants: Constants that the graph compares with. Some may be sizes.
  """
  n = len(leaves[0])
  batch = leaves + [_errors(n)]
  before = traces.runner(n)(batch)
  whole = list(range(n))
  cases = [([0], [0], 'all other examples are left out'),
           (whole[:-2], whole[:-2], 'other examples are left out')]
  if not _is_heavy(traces.runner(n), before):
    cases.append((whole * _MORE, whole, 'other examples are added'))
  if not random:
    cases.append((whole[1:], whole[1:], 'the first example is left out'))
  sizes = dict.fromkeys(c + i for c in constants for i in (0, 1))
  tried = [size for size in sizes if size > 1 and size * _size(before) <= _LARGEST * n]
  if static is not None and static != n and traces.differ(n, static):
    tried.append(static)  # Python code asks for the size.
  for size in tried:
    cases.append(([i % n for i in range(size)], whole[:size], f'the batch has {size} examples'))
  for taken, rows, words in cases:
    run = traces.runner(len(taken))
    after = _accepted(run, [t[taken] for t in batch])
    if after is not None:
      places = list(range(len(rows)))
      how = difference(run, before, after, rows, places, _ROUNDING_OF_SIZES)
      if how:
        raise mixes(f'{how} when {words}', moved(run, before, after, rows, places))


def _accepted(run: probes.Runner, batch: List[np.ndarray]) -> Any:
  """Returns a run on the batch, or None if the model does not accept the batch."""
  try:
    return run(batch)
  except tf.errors.InvalidArgumentError:
    return None


def _is_heavy(run: probes.Runner, seen: probes.Seen) -> bool:
  return _size(seen) > _HEAVY or run.computed(SIZE) > _HEAVY_TO_COMPUTE


def _size(seen: probes.Seen) -> int:
  return sum(t.size for t in seen.outputs + seen.factors)


def _errors(n: int) -> np.ndarray:
  """Returns random numbers in place of each example's loss; see `probes`."""
  return np.random.default_rng(1).uniform(0.5, 1.5, size=(n, 2)).astype(np.float32)


def _run_changed(run: probes.Runner, batch: List[np.ndarray], change: Change,
                 unchanged: Sequence[int]) -> Any:
  """Returns a run on the batch with all other examples changed; None if not accepted."""
  others = [i for i in range(len(batch[0])) if i not in unchanged]
  changed = [np.copy(t) for t in batch]
  for t in changed:
    t[others] = change(t[others], t, unchanged)
  return _accepted(run, changed)


def _influence(run: probes.Runner, batch: List[np.ndarray], before: probes.Seen) -> float:
  """Returns the largest change of the others' clipped sum when one example changes."""
  n, worst = len(batch[0]), 0.0
  for row in {0, n // 2, n - 1}:
    unchanged = [i for i in range(n) if i != row][:SIZE]
    for kind in ('zeroed', 'negated', 'copies'):
      after = _run_changed(run, batch, CHANGES[kind], unchanged)
      if after is not None:
        worst = max(worst, moved(run, before, after, unchanged, unchanged))
  return worst


def mixes(how: str, moved: float = 0.0) -> errors.PrivacyError:
  """Returns the error for a model whose examples depend on each other."""
  far = (f' The clipped sum of examples that did not change moves by {moved:.2f} clip norms.'
         if moved else '')
  return errors.PrivacyError(
      f'The model mixes examples: {how}.{far} Per-example clipping then bounds nothing. '
      'Remove the layer that looks across axis 0.')


def _dtype(array: np.ndarray) -> tf.DType:
  return tf.string if array.dtype.kind in 'OSU' else tf.as_dtype(array.dtype)


def ragged(leaves: List[np.ndarray], order: slice) -> List[np.ndarray]:
  """Returns examples of several lengths: zeros after the first part of an axis, or before."""
  leaves = [np.copy(t) for t in leaves]
  n = len(leaves[0])
  for t in leaves:
    for row, parts in ((0, 2), (n // 2, 2), (n - 1, 3)):
      if t.ndim > 1:
        t[row][order][max(1, t.shape[1] // parts):] = np.zeros((), t.dtype)
  return leaves


def _shortened(rows: np.ndarray, order: slice = slice(None)) -> Any:
  rows = np.copy(rows)
  if rows.ndim > 1:
    rows[:, order][:, 1:] = np.zeros((), rows.dtype)
  return rows


_real = constants_lib.real
# Changes of the other rows of an array: `(rows, all rows, unchanged ones) -> rows`.
CHANGES = {
    'permuted': lambda rows, _, __: np.roll(rows, 1, 0),
    'zeroed': lambda rows, _, __: np.zeros_like(rows),
    'scaled': lambda rows, all_rows, _: (
        30 * rows if _real(rows) else np.repeat(np.sort(all_rows, 0)[-1:], len(rows), 0)),
    'negated': lambda rows, _, __: -1000 * rows if _real(rows) else np.flip(rows, -1),
    'not finite': lambda rows, _, __: np.full_like(rows, np.nan) if _real(rows) else rows,
    'copies': lambda rows, all_rows, unchanged: np.repeat(all_rows[unchanged[:1]], len(rows), 0),
    'shortened': lambda rows, _, __: _shortened(rows),
    'shortened from the start': lambda rows, _, __: _shortened(rows, slice(None, None, -1)),
}


def difference(run: probes.Runner, before: probes.Seen, after: probes.Seen, rows: Sequence[int],
               places: Sequence[int], tolerance: float) -> str:
  """Returns in words how the examples `rows` differ from before; '' if they do not."""
  # Sums over batches of two sizes have another order, and keep some of what cancels in them.
  cancelled = lambda old: 1e-3 * typical(old) if tolerance == _ROUNDING_OF_SIZES else 0.0
  for old, new in zip(before.outputs, after.outputs):
    if old.shape[1:] != new.shape[1:]:
      return f'outputs have shape {new.shape[1:]} in place of {old.shape[1:]}'
    if not near(old[rows], new[places], tolerance, cancelled(old)):
      change = np.max(np.abs(old[rows].astype(np.float64) - new[places].astype(np.float64)))
      return f"an example's output in training changes by {change:.3g}"
  if all(old.shape[1:] == new.shape[1:] and near(old[rows], new[places], tolerance)
         for old, new in zip(before.factors, after.factors)):
    return ''
  least = np.finfo(np.float32).tiny
  if tolerance == _ROUNDING_OF_SIZES:  # A saturated output leaves rounding alone for a gradient.
    norms = [np.linalg.norm(run.gradient(before, row)) for row in range(len(before.outputs[0]))]
    least = max(least, 1e-3 * max(filter(np.isfinite, norms), default=0))
  for row, place in zip(rows, places):  # Different factors may be equal gradients.
    old, new = run.gradient(before, row), run.gradient(after, place)
    size = np.linalg.norm(old - new) / max(np.linalg.norm(old), least)
    if not size <= tolerance:
      return f"an example's gradient changes by {size:.3g} times its norm"
  return ''


def near(old: np.ndarray, new: np.ndarray, tolerance: float, cancelled: float = 0) -> bool:
  """Returns whether arrays of examples are equal up to rounding, also after cancellation."""
  if np.array_equal(old, new):
    return True
  if old.dtype.kind not in 'fV':
    return False
  old, new = old.astype(np.float64), new.astype(np.float64)
  peak = np.max(np.abs(old), tuple(range(1, old.ndim)), keepdims=True, initial=0)
  return np.allclose(old, new, rtol=tolerance, atol=0, equal_nan=True) or bool(
      np.all(np.abs(old - new) <= tolerance * (np.abs(old) + 0.01 * peak + cancelled)))


def typical(values: np.ndarray) -> float:
  """Returns the median of the examples' largest finite magnitudes; 0 for what is no number."""
  if values.dtype.kind not in 'fV':
    return 0.0
  sizes = np.abs(values.astype(np.float64))
  return float(np.median(np.max(
      sizes, tuple(range(1, sizes.ndim)), where=np.isfinite(sizes), initial=0)))


def moved(run: probes.Runner, before: probes.Seen, after: probes.Seen, rows: Sequence[int],
          places: Sequence[int]) -> float:
  """Returns the change of the clipped sum, in clip norms, for a clip norm below all norms."""
  return float(np.linalg.norm(sum(
      _unit(run.gradient(before, row)) - _unit(run.gradient(after, place))
      for row, place in zip(rows, places))))


def _unit(gradient: np.ndarray) -> np.ndarray:
  norm = np.linalg.norm(gradient)
  return gradient / norm if 0 < norm < np.inf else np.zeros_like(gradient)
