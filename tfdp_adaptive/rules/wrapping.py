# SPDX-License-Identifier: Apache-2.0
"""Parts of rules that wrap another: what they require of it, and what they pass on."""

import operator
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from tfdp_adaptive import checks
from tfdp_adaptive import contract
from tfdp_adaptive import trees
from tfdp_adaptive import weights

# Conditions that a wrapper may require of a rule, and their texts in errors.
_NEEDS: Dict[str, Tuple[Callable[[contract.Rule], bool], str]] = {
    'query': (lambda rule: len(rule.asks) == 1, 'make one query per step'),
    'clip norm': (lambda rule: not rule.own_clip,
                  'make one query per step, in one unit, with the clip norm of the optimizer'),
    'fixed': (lambda rule: rule.asks[0].side_query is None,
              'have a fixed clip norm: the room on its noise is taken'),
    'norm': (lambda rule: rule.asks[0].projection == 'rescale' and not rule.asks[0].groups,
             'rescale its records by one norm'),
    'noise': (lambda rule: not rule.independent_noise, 'have one noise for all coordinates'),
    'step': (lambda rule: rule.asks[0].second is None or rule.asks[0].second.amplifiable,
             'release statistics of one step only'),
}


def require(rule: contract.Rule, *needs: str) -> None:
  """Raises unless a rule has what its wrapper needs, in this order."""
  for need in needs:
    holds, text = _NEEDS[need]
    checks.require(holds(rule), text, rule=rule.name)


def cut(tree: trees.Tree, numbers: Sequence[int], count: int) -> Tuple[Tuple[Any, ...], ...]:
  """Returns the leaves of each of `count` parts; `numbers[i]` is the part of leaf i."""
  leaves = tf.nest.flatten(tree)
  return tuple(tuple(leaf for leaf, number in zip(leaves, numbers) if number == k)
               for k in range(count))


def joined(parts: Sequence[Sequence[tf.Tensor]], numbers: Sequence[int]) -> List[tf.Tensor]:
  """Returns the leaves that `cut` has distributed."""
  left = [iter(part) for part in parts]
  return [next(left[number]) for number in numbers]


def followed(
    rule: contract.Rule, change: Callable[..., trees.Tree], **fields: Any) -> contract.Rule:
  """Returns the rule with `change(direction, state before, public)` as its direction."""

  def update(
      state: Any, releases: contract.Releases, public: trees.Tree = ()) -> Tuple[trees.Tree, Any]:
    direction, after = rule.update(state, releases, public)
    return change(direction, state, public), after

  return rule._replace(update=update, **fields)


def of_inner(
    rule: contract.Rule, own: Callable[[Any], Any] = operator.attrgetter('rule')
    ) -> Optional[Callable[..., trees.Tree]]:
  """Returns the `project` of a wrapper that has the state of `rule` at `own` of its own state."""
  project = rule.project
  return project and (lambda state, params: project(own(state), params))


def with_clipping(rule: contract.Rule, clipping: weights.Weight) -> contract.Rule:
  """Returns the same rule with another clipping method.

  Sensitivity, noise and accounting do not change, because the norm of a weighted record is at most
  the clip norm. Retune a stability constant of the update (`epsilon`): with `AutoV`, `AutoS` and
  `PSAC` gradients have the size of the clip norm.

  Args:
    rule: Any rule whose records are rescaled.
    clipping: `tfdp.clipping.Hard()`, `AutoV()`, `AutoS()`, `PSAC()`, `Tanh()` or `PNorm()`.

  Examples:
    >>> with_clipping(contract.Rule((), (), ()), weights.AutoS(0.3)).asks[0].weight
    tfdp.clipping.AutoS(gamma=0.3)
  """
  checks.require(isinstance(clipping, weights.Weight),
                 'weight records by their norm, such as tfdp.clipping.AutoS()', clipping=clipping)
  return clipping.rule(rule)
