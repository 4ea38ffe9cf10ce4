# SPDX-License-Identifier: Apache-2.0
"""Describes what the saved state of an optimizer depends on, so that only its like is restored."""

import json
from typing import Any, Dict

import tensorflow as tf

from tfdp_adaptive import compat

NAME = 'fingerprint'  # Beside the ledger entry of a run, in files.
_LONGEST = 100  # Characters of a value in a message.


def of(optimizer: Any) -> Dict[str, Any]:
  """Returns the fingerprint of a `DPOptimizer`, as values of JSON; empty where not known."""
  place = {id(compat.raw_variable(v)): number for model in optimizer.run.models[-1:]
           for number, v in enumerate(model.weights)}
  return {
      'optimizer rule': optimizer.rule.name,
      'shape of its state': [list(v.shape) for v in tf.nest.flatten(optimizer.run.state)
                             if hasattr(v, 'shape')],
      'use of ema': str(optimizer.use_ema),
      'set of trained variables': [
          place.get(id(compat.raw_variable(v)), -1) for v in optimizer.run.moved] if place else []}


def saved(content: bytes) -> Dict[str, Any]:
  """Returns the fingerprint in the bytes of a run; {} for files of earlier versions."""
  return json.loads(content).get(NAME, {}) if content else {}


def differences(kept: Dict[str, Any], mine: Dict[str, Any]) -> str:
  """Says what differs in two fingerprints; '' if nothing does, or nothing is known of one."""
  return '; '.join(
      f'another {name}, {str(value)[:_LONGEST]} instead of {str(mine[name])[:_LONGEST]}'
      for name, value in kept.items() if mine.get(name) and value and value != mine[name])
