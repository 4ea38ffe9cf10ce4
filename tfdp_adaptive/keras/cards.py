# SPDX-License-Identifier: Apache-2.0
"""The privacy card of a model's weights, made from the entries of their ledger."""

from typing import Any, Mapping, Optional, Sequence

from tfdp_adaptive.keras import weight_ledger
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import ledger as ledger_lib
from tfdp_adaptive.privacy import weight_digests


def of_model(
    model: Any, audits: Sequence[Any] = (), words: Optional[Mapping[str, str]] = None,
    **more: Any) -> card_lib.Card:
  """Returns the card of all that a model's weights went through; see `DPModel.privacy_card`."""
  more.update(
      audits=audits, weights=weight_digests.of(model.weights),
      words=[card_lib.Words(about, text) for about, text in (words or {}).items()])
  run = getattr(getattr(model, 'optimizer', None), 'run', None)
  return _card(weight_ledger.Ledger.of(model).ledger().entries, more) if run is None else (
      of_run(run, **more))


def of_run(run: Any, steps: Optional[int] = None, **more: Any) -> card_lib.Card:
  """Returns the card of the weights of a `Run`.

  Args:
    run: The `Run` of an optimizer.
    steps: After so many of this run; default: now.
    **more: For `Ledger.card`.
  """
  entries = run.all_entries(steps)
  if steps is None and entries[1:] and not entries[-1].steps:  # Compiled anew, and not trained.
    entries = entries[:-1]
  return _card(entries, more)


def _card(entries: Sequence[ledger_lib.Entry], more: Any) -> card_lib.Card:
  return ledger_lib.Ledger(tuple(entries)).card(facts=card_lib.about_weights(entries), **more)
