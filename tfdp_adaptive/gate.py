# SPDX-License-Identifier: Apache-2.0
"""Refuses experimental parts until `tfdp.experimental(name)` enables them.

`docs/state.md` lists the state of every public class, with its oracle and its evidence.
"""

import functools
import re
from typing import Any, Callable, Dict, Set, TypeVar

from tfdp_adaptive import checks
from tfdp_adaptive import optimizers

_Factory = TypeVar('_Factory', bound=Callable[..., Any])
# Name -> what is missing. A rule and its Keras class have the name of the rule's factory.
PARTS: Dict[str, str] = {
    **{row.rule: row.missing for row in optimizers.OPTIMIZERS.values() if row.missing},
    'PoissonExamples': 'no model was trained with it, except in tests',
}
_OPEN: Set[str] = set()


class experimental:  # pylint: disable=invalid-name
  """Enables experimental parts, permanently or in a `with` block.

  Experimental parts are accounted for like all others, but lack evidence that they help. Their
  results and their interface may change.

      tfdp.experimental('dp_muon')
      optimizer = tfdp.DPMuon(0.01, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=256)

  Args:
    *names: The parts to enable. `docs/state.md` lists them.
  """

  def __init__(self, *names: str) -> None:
    for name in names:
      checks.one_of(PARTS, name=name)
    self._opened = set(names) - _OPEN
    _OPEN.update(names)

  def __enter__(self) -> 'experimental':
    return self

  def __exit__(self, *error: object) -> None:
    _OPEN.difference_update(self._opened)


def check(name: str) -> None:
  """Raises an error if an experimental part was not enabled."""
  if name not in _OPEN:
    raise ValueError(f'{name} is experimental: {PARTS[name]}.\n'
                     f'Call `tfdp.experimental({name!r})` first to enable it.')


def loading() -> experimental:
  """Enables all parts while a saved run is loaded."""
  return experimental(*PARTS)


def part(factory: _Factory) -> _Factory:
  """Decorates the factory of an experimental rule."""

  @functools.wraps(factory)
  def gated(*args: object, **kwargs: object) -> Any:
    check(factory.__name__)
    return factory(*args, **kwargs)

  return gated  # type: ignore[return-value]


def state_of(name: str) -> str:
  """Returns 'experimental' or 'stable' for a part or a rule made of parts."""
  words = re.findall(r'\w+', name)
  parts = {name, *words, *(f'dp_{word}' for word in words)}  # `muon` is that of `dp_muon`.
  return 'experimental' if parts & set(PARTS) else 'stable'
