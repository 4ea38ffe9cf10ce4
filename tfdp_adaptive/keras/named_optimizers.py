# SPDX-License-Identifier: Apache-2.0
"""Makes the Keras classes of `optimizers.OPTIMIZERS`. A rule's factory documents its arguments.

Every class takes the arguments of its factory and those of `DPOptimizer`.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Dict, Mapping, Optional

from tfdp_adaptive import compat
from tfdp_adaptive import gate
from tfdp_adaptive import mechanisms
from tfdp_adaptive import optimizers
from tfdp_adaptive import rules
from tfdp_adaptive.keras import arguments
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.keras import signatures
from tfdp_adaptive.privacy import plan as plan_lib

saving: Any = compat.keras.saving


class NamedOptimizer(optimizer_lib.DPOptimizer):
  """Base of the named classes: arguments of `factory` and of `DPOptimizer` together."""

  factory: Any = None  # staticmethod, set by the subclass.
  defaults: Mapping[str, Any] = types.MappingProxyType({})  # Defaults of Keras' arguments.

  def __init_subclass__(cls, **kwargs: object) -> None:
    """Editors see the arguments of `factory`, or those of a subclass' own constructor."""
    super().__init_subclass__(**kwargs)
    ours = cls.__init__.__module__ == __name__ and cls.factory is not None
    cls.__signature__ = signatures.signature(
        cls.factory, optimizer_lib.DPOptimizer.__init__, cls.defaults) if ours else None

  def __init__(self, learning_rate: Any = 0.001, **kwargs: object) -> None:
    names = arguments.parameters(self.factory)
    rule_config = {k: v for k, v in kwargs.items() if k in names}
    signatures.check_given(type(self).__name__, self.factory, rule_config)
    others = {k: v for k, v in kwargs.items() if k not in names or k == 'allow_non_private'}
    super().__init__(self.factory(**rule_config), learning_rate, **{**self.defaults, **others})
    self._hidden.rule_config = rule_config

  def get_config(self) -> Dict[str, Any]:
    config = compat.base_config(self)
    config.update(saving.serialize_keras_object(dict(self._hidden.rule_config)))
    private = {k: v for k, v in self._hidden.private.items() if k != 'steps'}  # From the plan.
    config.update(private, clipping=self.clipping.get_config(),
                  performance=dataclasses.asdict(self.performance),
                  own_sampler=self.own_sampler,
                  diagnostics=self.diagnostics)
    if self.plan is not None:
      config['plan'] = self.plan.to_json()
      for key in ('noise_multiplier', 'batch_size', 'adjacency', 'mechanism'):
        del config[key]
    elif self.mechanism is not None:
      config['mechanism'] = self.mechanism.to_json()
    return config

  @classmethod
  def from_config(
      cls, config: Dict[str, Any],
      custom_objects: Optional[Dict[str, Any]] = None) -> NamedOptimizer:
    # Keras deserializes the arrays that it wrote; its errors do not say what it cannot read.
    config = {key: saving.deserialize_keras_object(value) if isinstance(value, (dict, list))
              else value for key, value in config.items()}
    if config.get('plan') is not None:
      config['plan'] = plan_lib.PrivacyPlan.from_json(config['plan'])
    if config.get('mechanism') is not None:
      config['mechanism'] = mechanisms.from_json(config['mechanism'])
    with gate.loading():
      return super().from_config(config, custom_objects=custom_objects)


def _class(name: str, row: optimizers.Optimizer) -> Any:
  """Returns the class of a row of the table."""
  return compat.serializable(type(name, (NamedOptimizer,), {
      'factory': staticmethod(getattr(rules, row.rule)), 'defaults': row.defaults,
      '__module__': __name__,
      '__doc__': signatures.docstring(name, row, optimizer_lib.DPOptimizer, vars(rules))}))


globals().update({name: _class(name, row) for name, row in optimizers.OPTIMIZERS.items()})
