# SPDX-License-Identifier: Apache-2.0
"""The weights of records: `clipping='hard'`, 'auto_s' and others."""

from typing import Any

from tfdp_adaptive import checks
from tfdp_adaptive import contract

# Kind -> its constant by default; None where it has none.
KINDS = {'hard': None, 'auto_v': None, 'auto_s': 0.01, 'psac': 0.1, 'tanh': None, 'p_norm': 2.0}


def weight(clipping: Any) -> contract.Weight:
  """Returns the weight that `clipping` names: a kind, or a pair `(kind, constant)`.

  Args:
    clipping: 'hard', 'auto_v', 'auto_s' (gamma .01), 'psac' (r .1), 'tanh' or 'p_norm'
      (p 2); see `tfdp_adaptive.clipping.projection`. A pair such as `('auto_s', .05)`
      chooses the constant, in units of the scaled gradient.

  Raises:
    ValueError: If `clipping` is none of these.
  """
  kind, *constants = clipping if isinstance(clipping, (list, tuple)) and clipping else (clipping,)
  if not isinstance(kind, str) or kind not in KINDS or len(constants) > 1:
    raise ValueError(f'`clipping` must be one of {tuple(KINDS)}, or a pair such as '
                     f"('auto_s', 0.05). Received: clipping={clipping!r}.")
  default = KINDS[kind]
  if default is None:
    if constants and constants != [0.0]:
      raise ValueError(f'`clipping` of kind {kind!r} has no constant. '
                       f'Received: clipping={clipping!r}.')
    return contract.Weight(kind)
  constant, = constants or [default]
  checks.positive(clipping=constant)
  if kind == 'p_norm' and constant < 1:
    raise ValueError(f'p of `clipping` must be at least 1. Received: clipping={clipping!r}.')
  return contract.Weight(kind, float(constant))


def chosen(rule: contract.Rule, clipping: Any) -> contract.Rule:
  """Returns `with_clipping(rule, clipping)`; 'hard' leaves the rule unchanged."""
  return rule if weight(clipping).kind == 'hard' else with_clipping(rule, clipping)


def with_clipping(rule: contract.Rule, clipping: Any) -> contract.Rule:
  """Returns the same rule, with records weighted as `clipping` says.

  Sensitivity, noise and accounting do not change, since a weighted record has at most the clip
  norm. Retune a stability constant of the update (`epsilon`): with 'auto_v', 'auto_s' and 'psac'
  gradients have the size of the clip norm.

  Args:
    rule: Any rule whose records are rescaled.
    clipping: See `weight`.

  Examples:
    >>> with_clipping(contract.Rule((), (), ()), 'auto_s').asks[0].weight
    Weight(kind='auto_s', constant=0.01)
  """
  chosen = weight(clipping)
  if chosen.kind != 'hard' and any(ask.projection != 'rescale' for ask in rule.asks):
    raise ValueError(
        f"`clipping` must be 'hard' for {rule.name}, whose records are projected and not rescaled "
        f"(projection='euclidean'). Received: clipping={clipping!r}.")
  return rule._replace(asks=tuple(
      ask._replace(weight=chosen) if ask.projection == 'rescale' else ask for ask in rule.asks))
