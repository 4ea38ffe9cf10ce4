# SPDX-License-Identifier: Apache-2.0
"""Rules whose records are weighted by their norm."""

from tfdp_adaptive import contract
from tfdp_adaptive import weights


def with_clipping(rule: contract.Rule, clipping: weights.Weight) -> contract.Rule:
  """Returns the same rule, with records weighted as `clipping` says.

  Sensitivity, noise and accounting do not change, since a weighted record has at most the clip
  norm. Retune a stability constant of the update (`epsilon`): with `AutoV`, `AutoS` and `PSAC`
  gradients have the size of the clip norm.

  Args:
    rule: Any rule whose records are rescaled.
    clipping: `tfdp.clipping.Hard()`, `AutoV()`, `AutoS()`, `PSAC()`, `Tanh()` or `PNorm()`.

  Examples:
    >>> with_clipping(contract.Rule((), (), ()), weights.AutoS(0.3)).asks[0].weight
    tfdp.clipping.AutoS(gamma=0.3)
  """
  if not isinstance(clipping, weights.Weight):
    raise ValueError('`clipping` must weight records by their norm, such as tfdp.clipping.AutoS(). '
                     f'Received: clipping={clipping!r}.')
  return clipping.rule(rule)
