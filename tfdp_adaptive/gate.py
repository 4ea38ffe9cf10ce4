# SPDX-License-Identifier: Apache-2.0
"""The gate before parts that nothing speaks for yet: `tfdp.experimental(...)`.

`docs/state.md` has the state of every public class, with its oracle and its evidence.
"""

import functools
import re
from typing import Any, Callable, Dict, Set, TypeVar

from tfdp_adaptive import checks

_Factory = TypeVar('_Factory', bound=Callable[..., Any])
# Name -> what is missing. Of a rule it is the name of its factory, also for its Keras class.
PARTS: Dict[str, str] = {
    'adadps': 'it was not compared with other rules on any task',
    'denoised': 'it was level with DP-SGD and worse with DP-Adam where it was measured',
    'dp_adagrad_ime': 'on a logistic regression post-processing with its floor was as good',
    'dp_adam_ime': 'it was worse than dp_adam on every task that was measured',
    'dp_adam_jme': 'it was not compared with other rules on any task',
    'dp_kfc': 'it helped on made-up inputs alone, and was worse than DP-SGD on MNIST',
    'dp_muon': 'it was level with dp_adam where it was measured, and takes four times as long',
    'dp_shampoo': 'it helped on made-up inputs alone',
    'dp_soap': 'it helped on made-up inputs alone',
    'low_pass': 'tuned momentum did better where it was measured',
    'noisy_adagrad': 'it was not compared with other rules on any task',
    'pasan': 'it was worse than DP-SGD on the one task that was measured',
    'pda_dpmd': 'it was not compared with other rules on any task',
    'pdp_sgd': 'it was not compared with other rules on any task',
    'side_information_adam': 'it was not compared with other rules on any task',
    'discrete noise': 'no model was trained with it but in tests',
    'PoissonExamples': 'no model was trained with it but in tests',
}
_OPEN: Set[str] = set()


class experimental:  # pylint: disable=invalid-name
  """Opens the gate before experimental parts: for good, or in a `with` block.

  An experimental part is as private as its accounting says. What is missing is evidence that it
  helps, or somebody who used it; its results and its interface may change.

      tfdp.experimental('dp_muon')
      optimizer = tfdp.DPMuon(0.01, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=256)

  Args:
    *names: Which ones, as the error names them. `docs/state.md` lists all of them.
  """

  def __init__(self, *names: str) -> None:
    for name in names:
      checks.one_of(PARTS, name=name)
    self._opened = set(names) - _OPEN
    _OPEN.update(names)

  def __enter__(self) -> 'experimental':
    return self

  def __exit__(self, *error: Any) -> None:
    _OPEN.difference_update(self._opened)


def check(name: str) -> None:
  """Raises unless an experimental part was asked for."""
  if name not in _OPEN:
    raise ValueError(f'{name} is experimental: {PARTS[name]}.\n'
                     f'Call `tfdp.experimental({name!r})` before, or use it as a context.')


def loading() -> experimental:
  """Opens the gate while something is made again that somebody asked for before: a saved run."""
  return experimental(*PARTS)


def part(factory: _Factory) -> _Factory:
  """Decorates the factory of an experimental rule."""

  @functools.wraps(factory)
  def gated(*args: Any, **kwargs: Any) -> Any:
    check(factory.__name__)
    return factory(*args, **kwargs)

  return gated  # type: ignore[return-value]


def state_of(name: str) -> str:
  """'experimental' or 'stable', of a part or of a rule made of parts."""
  words = re.findall(r'\w+', name)
  parts = {name, *words, *(f'dp_{word}' for word in words)}  # `muon` is that of `dp_muon`.
  return 'experimental' if parts & set(PARTS) else 'stable'
