# SPDX-License-Identifier: Apache-2.0
"""The secret seed of the batches of a whole run, and the file that holds it (argument `coins`).

If the steps of a record depend on each other, a run that resumes in another process needs the seed
that it started with. A seed belongs to ONE run, because two runs with the same batches do not
compose. A new run therefore draws its own seed and never reads a file.

A run with a file also commits to its seed: its digest is in the ledger before the first step. An
auditor who is shown the file later can draw all batches again (`report.replay`). Batches that are
drawn at every step then come from the file, too, with another key for every pass.
"""

import hashlib
import os
import pathlib
import secrets
from typing import Any, Callable, Dict, Iterator, List, Optional, Union

import numpy as np

from tfdp_adaptive import checks
from tfdp_adaptive import runfolder
from tfdp_adaptive import terms as terms_lib
from tfdp_adaptive.batches import tags

_FORMAT = 'tfdp_adaptive.coins 2'
_BITS = 256
Coins = Union[str, 'os.PathLike[str]', 'SamplingSeed', None]  # A run's seed, or its file.
COMMITTED = 'The sampling seed was fixed before the first step. Its digest is {}.'


class SamplingSeed:
  """The seed from which one run of a plan draws its batches.

  Args:
    plan: The `PrivacyPlan`.
    path: Path of the SECRET file with the key. With None the key is only in this object.
    replace: Whether a new run may replace a file. Allow this only if nothing of the run that wrote
      it was or will be released.

  Attributes:
    in_file: Whether another process can resume with this seed.
  """

  draw = 0

  def __init__(self, plan: terms_lib.Terms, path: Union[str, 'os.PathLike[str]', None] = None,
               replace: bool = False):
    checks.instance((str, os.PathLike, type(None)), 'the path of a file, or None', coins=path)
    self._path = None if path is None else pathlib.Path(path)
    self.in_file = path is not None
    self._plan, self._replace = plan, replace
    self._key: Optional[int] = None
    self._of_users: Optional[int] = None
    self._records: Optional[str] = None
    self._starts: List[int] = []

  def key(self, start_step: int) -> int:
    """Returns the key of a run that starts at `start_step`; a run that starts at 0 draws one."""
    if self._plan.seed is not None:
      return self._plan.seed
    if self._key is None:
      self._key = self._read(start_step) if start_step else self._begin()
      tags.found_seed(self._plan, '' if self._path is None else COMMITTED.format(
          digest(self._key)))
    return self._key

  @property
  def passes(self) -> int:
    """Returns the number of passes that have taken keys from the file."""
    return len(self._starts)

  def commitment(self, start_step: int, records: Any = None) -> Optional[str]:
    """Returns the public digest of the key in the file, or None without a file.

    Args:
      start_step: The step at which the run starts or resumes.
      records: See `in_order`; None if the order of records does not matter.
    """
    if self._path is None or self._plan.seed is not None:
      return None
    if self._key is None and self._path.exists():  # A run may resume, which is not known yet.
      return digest(opened(self._path)['key'])
    if self._key is None and records is not None:
      self._records = records.fingerprint()
    return digest(self.key(start_step))

  def of_pass(self, start_step: int = 0) -> int:
    """Returns the key of one pass over the batches, for batches that are drawn at every step."""
    if self._plan.seed is not None:
      return self._plan.seed
    if self._path is None:
      tags.found_seed(self._plan, '')
      return secrets.randbits(_BITS)
    key = self.key(start_step)
    self._starts.append(start_step)
    self._save(new=False)
    return key_of_pass(key, self.passes)

  def of_users(self) -> int:
    """Returns the key that chooses the examples of users."""
    if self._of_users is None:
      self._of_users = secrets.randbits(_BITS) if self._plan.seed is None else self._plan.seed
    return self._of_users

  def in_order(self, records: Any, start_step: int, drawn: Iterator[Any]) -> Iterator[Any]:
    """Checks that a run resumes with the same records in the same order.

    The places of records determine their steps. Without a file this cannot be checked.

    Args:
      records: An object with a `fingerprint`.
      start_step: The step at which the run resumes, or 0.
      drawn: The value to return if the check passes.
    """
    if self._path is not None and self._records is None:
      self._records = records.fingerprint()
      self._key = None
      self.key(start_step)
    yield from drawn

  def _begin(self) -> int:
    self._key = key = secrets.randbits(_BITS)
    if self._path is not None:
      try:
        self._save(new=not self._replace)
      except FileExistsError:
        raise ValueError(
            'The file of `coins` exists, so another run has started with it, and the coins of two '
            'runs must differ. Resume that run (`start_step=optimizer.steps_done`), give a new '
            'file, or remove this file if nothing of its run was or will be released. Received: '
            f'coins={str(self._path)!r}, start_step=0.') from None
    return key

  def _save(self, new: bool) -> None:
    assert self._path is not None
    runfolder.save(self._path, (), {
        'format': _FORMAT, 'key': self._key, 'plan': tags.coefficients(self._plan),
        'records': self._records, 'starts': self._starts}, new=new)

  def _read(self, start_step: int) -> int:
    if self._path is None:
      raise ValueError(
          f'{type(self._plan.sampling).__name__} draws secret coins for a whole run and cannot '
          'resume without them. Give the same file when the run starts and when it resumes: '
          '`plan.batches(data, coins=PATH)`; or use adjacency="zero_out" with groups that are '
          f'public and fixed. Received: start_step={start_step}, coins=None.')
    wanted = f'The coins of a resumed run must be the file it began with: {self._path}. '
    saved = opened(self._path, wanted)
    plan, records = tuple(saved['plan']), saved['records']
    if plan != tags.coefficients(self._plan):
      raise ValueError(f'{wanted}Received: the coins of another plan.')
    if None not in (records, self._records) and records != self._records:
      raise ValueError(
          'A run must resume with the same records in the same order. Otherwise records would take '
          f'part sooner than is accounted for. {wanted}Received: the file of a run on other '
          'records, or in another order.')
    self._starts = list(saved.get('starts', ()))
    return saved['key']


class ReceivedSeed(SamplingSeed):
  """Seed that the chief drew for all workers; see `workers`.

  Attributes:
    draw: Number by which a step recognizes batches of one draw; zero for a single process.
  """

  def __init__(self, plan: terms_lib.Terms) -> None:
    super().__init__(plan)
    self._pass = -1

  def receive(self, received: Dict[str, Any]) -> None:
    """Takes the numbers that `for_workers` returned."""
    self._key, self._pass, self._of_users = received['key'], received['pass'], received['of_users']
    self.draw = _draw_number(self._pass)

  def key(self, start_step: int) -> int:
    assert self._key is not None  # The chief has needed it, too.
    return self._key

  def of_users(self) -> int:
    assert self._of_users is not None  # A number of its own would choose other examples.
    return self._of_users

  def of_pass(self, start_step: int = 0) -> int:
    now, self.draw = self._pass, _draw_number(self._pass)
    if self._plan.seed is None:  # Later passes have others. A worker that makes more is found out.
      self._pass += 1
    return now


def for_workers(chiefs: SamplingSeed, draw: Callable[[], Iterator[Any]]) -> Dict[str, Any]:
  """Returns the SECRET numbers of one pass for `ReceivedSeed.receive`, as JSON values.

  Args:
    chiefs: The seed of the chief.
    draw: Draws the batches of the pass with the seed. It raises if the run cannot resume.
  """
  next(draw())
  seed = chiefs._plan.seed
  return {'key': chiefs._key if seed is None else seed,
          'pass': chiefs.of_pass(*chiefs._starts[-1:]), 'of_users': chiefs.of_users()}


def opened(path: pathlib.Path, wanted: str = '') -> Dict[str, Any]:
  """Returns the content of a SECRET file of a seed: `key`, `plan`, `records` and `starts`."""
  try:
    _, saved = runfolder.load(path)
  except (OSError, ValueError) as error:
    raise ValueError(f'{wanted}Received: {error!r}.') from error
  if saved.get('format') != _FORMAT:
    raise ValueError(f'{wanted}Received: {saved.get("format")!r}.')
  return saved


def digest(key: int) -> str:
  """Returns the public digest of a key. The key is too long to be guessed."""
  return hashlib.sha256(f'tfdp_adaptive.commitment {key}'.encode()).hexdigest()


def key_of_pass(key: int, number: int) -> int:
  """Returns the key of the pass with this number, from 1 on."""
  text = f'tfdp_adaptive.pass {key} {number}'
  return int.from_bytes(hashlib.sha256(text.encode()).digest(), 'big')


def _draw_number(key: int) -> int:
  hashed = hashlib.sha256(str(key).encode()).digest()
  return 1 + int.from_bytes(hashed, 'big') % (tags.DRAWS - 1)


def of(plan: terms_lib.Terms, coins: Coins) -> SamplingSeed:
  """Returns a `SamplingSeed` unchanged, and makes them of a path or of None."""
  return coins if isinstance(coins, SamplingSeed) else SamplingSeed(plan, coins)


def drawn(terms: terms_lib.Terms, size: Optional[int] = None, start_step: int = 0,
          coins: Coins = None) -> Iterator[np.ndarray]:
  """Returns the indices of the steps from `start_step` on; see `PrivacyPlan.index_batches`."""
  if start_step >= terms.steps:
    raise ValueError(f'All {terms.steps} steps of the plan are used up. '
                     f'Received: start_step={start_step}.')
  checks.whole(0, start_step=start_step)
  size = terms.population_size if size is None else size
  if size is None:
    raise ValueError('`size` must be given for a plan without a population size.')
  if terms.population_size not in (None, size):
    raise ValueError(
        f'The plan is for population_size={terms.population_size} records. Received: data with '
        'another number of records, which is not printed here (see `len(data)`). The sampling '
        'probability is a public constant of the plan: make the plan for this data, or pass the '
        'data it was made for (a tf.data set must be unbatched).')
  return terms.sampling.index_batches(terms, size, start_step, of(terms, coins))
