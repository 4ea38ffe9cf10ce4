# SPDX-License-Identifier: Apache-2.0
"""Every noise mechanism, registered once, above its class.

Files name a mechanism by its class, the command line by its designs; both are
looked up here, and `tfdp_adaptive.noise` refuses to be imported while a kind
has no noise stream.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, TypeVar

_Class = TypeVar('_Class', bound=type)
KINDS: Dict[str, Any] = {}  # Class name -> a class of `interface.Mechanism`.
DESIGNS: Dict[str, Tuple[Any, Design]] = {}  # Keys are names on the command line.


class Design(NamedTuple):
  """The name of a mechanism in `tfdp mechanism`: `NAME` or `NAME:SIZE`.

  Attributes:
    name: As typed on the command line.
    size: The constructor's argument that SIZE is; None for a mechanism without.
    arguments: Other arguments of the constructor, and their values.
  """

  name: str
  size: Optional[str] = None
  arguments: Tuple[Tuple[str, Any], ...] = ()


def register(*designs: Design) -> Callable[[_Class], _Class]:
  """Returns a decorator that makes a `Mechanism` known by its class name and by `designs`."""

  def decorate(kind: _Class) -> _Class:
    taken = [name for name in (design.name for design in designs) if name in DESIGNS]
    if not designs or taken or kind.__name__ in KINDS:
      raise ValueError('A mechanism must be registered once, with at least one design whose name '
                       f'is new. Received: {kind.__name__} with {designs}. Known: '
                       f'{tuple(KINDS)} with {tuple(DESIGNS)}.')
    KINDS[kind.__name__] = kind
    DESIGNS.update({design.name: (kind, design) for design in designs})
    return kind

  return decorate


def design(
    name: str, steps: int, size: Optional[int] = None, **options: Any) -> Any:
  """Returns the mechanism of a name in `DESIGNS`, with the options that its constructor takes."""
  kind, entry = DESIGNS[name]
  if entry.size is not None:
    options[entry.size] = size
  return kind.for_run(steps=steps, **dict(entry.arguments), **options)
