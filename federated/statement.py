# SPDX-License-Identifier: Apache-2.0
"""The card of a federated run, whose statement says what is particular to users and servers."""

from __future__ import annotations

import dataclasses
from typing import Sequence

from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import ledger as ledger_lib

from . import engines


def ledger(process: engines.PrivateFedAvg, rounds: int,
           notes: Sequence[str] = ()) -> ledger_lib.Ledger:
  """Returns the ledger of the weights after `rounds`, including earlier runs if known."""
  before = ledger_lib.Ledger(tuple(process.history()))
  *others, mine = before.begin(process.plan, process.rule).done(rounds).entries
  clip = process.settings['quantile_clip']
  following = [] if clip is None else [
      f'Adaptive clip norm: {clip}, inside the same budget; the clip norm above is the first one.']
  return ledger_lib.Ledger((*others, dataclasses.replace(
      mine, run=ledger_lib.new_run(), seeded=process.seed is not None,
      notes=(*mine.notes, *notes),
      clipping=(*mine.clipping, *following))))


def card(
    process: engines.PrivateFedAvg, rounds: int, facts: Sequence[str] = (),
    weights: Sequence[str] = (), plots: bool = True, notes: Sequence[str] = ()) -> card_lib.Card:
  """Returns the privacy card after `rounds` of the plan's steps.

  Args:
    process: A `PrivateFedAvg`.
    rounds: The number of rounds.
    facts: The caller's own words.
    weights: Digests, see `privacy.weight_digests`.
    plots: See `Ledger.card`.
    notes: Sentences for the entry of the run.
  """
  settings = process.settings
  lines = [
      'Federated: a record above is the update that a user\'s device sends in a round; its clip '
      'norm holds whatever number of examples it was trained on.',
      'What the server sees: all updates of the users, as they are. The guarantee is for whoever '
      'sees what the server releases: the weights of every round'
      + (', and the noised numbers beside them' if settings['private_metrics'] is not None
         or settings['quantile_clip'] is not None else '')
      + '. Secure aggregation is not simulated; the state of the server and the workers\' memory '
      'are not released and must stay secret.']
  if settings['private_metrics'] is not None:
    lines.append(f'Private metrics: {settings["private_metrics"]}, inside the same budget.')
  return ledger(process, rounds, notes).card(
      trust='federated', facts=lines, words=[card_lib.Words('the data', fact) for fact in facts],
      weights=weights, plots=plots)
