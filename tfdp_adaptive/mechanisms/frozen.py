# SPDX-License-Identifier: Apache-2.0
"""Objects that cannot be changed once they are made."""

import copy
import functools
import inspect
from typing import Any, Dict


class Frozen:
  """Attributes may be set in the constructor of an object's own class, and never again.

  `_arguments` is a copy of what that constructor was given, by name, with its defaults.
  """

  _arguments: Dict[str, Any]

  def __init_subclass__(cls, **kwargs: Any) -> None:
    super().__init_subclass__(**kwargs)
    initialize, signature = cls.__init__, inspect.signature(cls.__init__)

    @functools.wraps(initialize)
    def initialize_and_freeze(self: Any, *args: Any, **kwargs: Any) -> None:
      initialize(self, *args, **kwargs)
      if type(self) is cls:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = dict(list(bound.arguments.items())[1:])  # All but `self`.
        self.__dict__.update(_frozen=True, _arguments=copy.deepcopy(given))

    cls.__init__ = initialize_and_freeze  # type: ignore[method-assign]

  def __setattr__(self, name: str, value: Any) -> None:
    if self.__dict__.get('_frozen'):
      raise AttributeError(f'A {type(self).__name__} cannot be changed: make another one. '
                           f'Received: {name}={value!r} for {self!r}.')
    super().__setattr__(name, value)

  def __delattr__(self, name: str) -> None:
    raise AttributeError(f'A {type(self).__name__} cannot be changed: make another one. '
                         f'Received: del {name} of {self!r}.')
