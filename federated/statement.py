# SPDX-License-Identifier: Apache-2.0
"""What the plan's statement says, and what is particular to federated users."""

from __future__ import annotations

from typing import Any, Sequence


def statement(process: Any, rounds: int, facts: Sequence[str] = ()) -> str:
  """Plain text; `rounds` of the plan's steps have been taken with `process`."""
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
  if settings['quantile_clip'] is not None:
    lines.append(f'Adaptive clip norm: {settings["quantile_clip"]}, inside the same budget; the '
                 'clip norm above is the first one.')
  if settings['private_metrics'] is not None:
    lines.append(f'Private metrics: {settings["private_metrics"]}, inside the same budget.')
  lines.extend(facts)
  return process.plan.statement(steps=rounds, rule=process.rule) + '\n' + '\n\n'.join(lines) + '\n'
