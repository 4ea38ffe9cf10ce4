# SPDX-License-Identifier: Apache-2.0
"""Draws the batches of a run again from its opened coins, and compares what was recorded of it.

The card of a run names the digest of its coins, which was in the ledger before the first step. An
auditor who is shown the coins, and the digests of the records of every batch, sees what ran: that
the batches are those that the plan draws, and that a number always stood for the same record. The
auditor trusts the trainer for one thing, that the steps were taken on these batches.
"""

import collections
import pathlib
import types
from typing import Any, Dict, Iterator, List

from tfdp_adaptive import terms
from tfdp_adaptive.batches import digests
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.batches import tags
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import entry as entry_lib
from tfdp_adaptive.report import card_checks

Finding = card_checks.Finding
_CHANGING = 'Records change from reading to reading.'


def check(card: card_lib.Card, seed: pathlib.Path, log: pathlib.Path) -> List[Finding]:
  """Returns what the opened coins and the digests say about the run that committed to them.

  Args:
    card: The card with the run.
    seed: The SECRET file that the run was given as `coins`.
    log: The file that the run was given as `digests_to`.

  Raises:
    ValueError: If one of the files is none, or no run of the card committed to these coins.
  """
  saved = sampling_seed.opened(seed, f'{seed} must be the file of coins of a run. ')
  size, lines = digests.read(log)
  sentence = sampling_seed.COMMITTED.format(sampling_seed.digest(saved['key']))
  found = [(number, run) for number, run in enumerate(card.runs, 1)
           if sentence in run.notes and run.plan is not None]
  if not found:
    raise ValueError(f'{seed} must be the coins that a run of the card committed to. Received: '
                     'coins of another run.')
  return [finding for number, entry in found
          for finding in _run(f'Run {number}', entry, saved, size, lines)]


def _run(name: str, entry: entry_lib.Entry, saved: Dict[str, Any], size: int,
         lines: List[Dict[str, Any]]) -> Iterator[Finding]:
  plan = entry.plan
  if tuple(saved['plan']) != tags.coefficients(plan):
    yield Finding(card_checks.WRONG, f'{name}: the coins are those of another plan.')
    return
  missing = set(range(entry.steps)) - {line['step'] for line in lines}
  if missing:
    yield Finding(card_checks.WRONG, f'{name} took {entry.steps} steps, and there are no digests '
                                     f'of step {min(missing)}.')
    return
  changed = [line['step'] for line in lines
             if line['seal'] != digests.seal(saved['key'], size, line)]
  if changed or plan.population_size not in (None, size):
    where = 'the number of records' if plan.population_size not in (None, size) else (
        f'those of step {changed[0]}')
    yield Finding(card_checks.WRONG, f'{name}: the digests are not the ones that the run wrote. '
                                     f'At least {where} differ.')
    return
  by_number: Dict[int, str] = {}
  fixed = not any(note.startswith(_CHANGING) for note in entry.notes)
  for number in sorted({line['pass'] for line in lines}):
    of_pass = [line for line in lines if line['pass'] == number]
    wrong = _pass(plan, saved, number, size, of_pass, by_number, fixed)
    if wrong:
      yield Finding(card_checks.WRONG, f'{name}: {wrong}')
      return
  yield Finding(card_checks.VERIFIED, (
      f'{name}: the coins are the ones that the ledger named before the first step, and all '
      f'{entry.steps} batches follow from them'
      + ('; a record is the same whenever it is drawn.' if fixed else '.')))
  further = len(lines) - entry.steps
  if further:
    yield Finding(card_checks.UNKNOWN, (
        f'{name}: whether steps were taken on {further} further batch(es), which were drawn. The '
        'card has no steps for them. Reading ahead draws such batches, and so does resuming.'))


def _pass(
    plan: terms.Terms, saved: Dict[str, Any], number: int, size: int,
    lines: List[Dict[str, Any]], by_number: Dict[int, str], fixed: bool) -> str:
  """Returns what is wrong with the batches of a pass, or an empty text."""
  starts = saved.get('starts', [])
  if plan.sampling.drawn_each_step:
    if not 1 <= number <= len(starts):
      return f'the coins know nothing of a pass {number}.'
    start = starts[number - 1]
  else:
    start = 0
  by_step = collections.defaultdict(list)
  for line in lines:
    by_step[line['step']].append(line['records'])
  seed = types.SimpleNamespace(  # The `scheme.Seed` of this pass.
      in_file=True, key=lambda _: saved['key'],
      of_pass=lambda _: sampling_seed.key_of_pass(saved['key'], number))
  drawn = plan.sampling.index_batches(plan, size, start, seed)
  for step, batch in enumerate(drawn, start):
    for recorded in by_step.pop(step, ()):  # A run that goes on may have drawn a batch before.
      if len(recorded) != len(batch):
        return f'at step {step} the coins draw another number of records than there are digests of.'
      for index, digest in zip(batch.tolist(), recorded if fixed else ()):
        if by_number.setdefault(index, digest) != digest:
          return (f'at step {step} the digests are not those of the records that the coins draw: '
                  'one of them had another digest before.')
    if not by_step:
      return ''
  return 'there are digests of steps that the pass does not have.' if by_step else ''
