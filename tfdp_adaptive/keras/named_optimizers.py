# SPDX-License-Identifier: Apache-2.0
"""Defines one Keras class per rule. The rule's factory documents its arguments and source.

Every class takes the arguments of its factory and those of `DPOptimizer`.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Callable, Dict, Mapping, Optional

from tfdp_adaptive import compat
from tfdp_adaptive import contract
from tfdp_adaptive import gate
from tfdp_adaptive import mechanisms
from tfdp_adaptive import rules
from tfdp_adaptive.keras import arguments
from tfdp_adaptive.keras import optimizer as optimizer_lib
from tfdp_adaptive.keras import signatures
from tfdp_adaptive.privacy import plan as plan_lib

saving: Any = compat.keras.saving


class NamedOptimizer(optimizer_lib.DPOptimizer):
  """Base of the named classes: arguments of `factory` and of `DPOptimizer` together."""

  factory: Any = None  # staticmethod, set by the subclass.
  defaults: Mapping[str, Any] = types.MappingProxyType({})  # Of Keras' arguments.

  def __init_subclass__(cls, **kwargs: Any) -> None:
    """Editors see the arguments of `factory`, or those of a subclass' own constructor."""
    super().__init_subclass__(**kwargs)
    constructor = cls.__init__
    if constructor.__module__ == __name__ and cls.factory is not None:
      cls.__signature__ = signatures.signature(
          cls.factory, optimizer_lib.DPOptimizer.__init__, cls.defaults)
    else:
      cls.__signature__ = signatures.without_self(constructor)

  def __init__(self, learning_rate: Any = 0.001, **kwargs: Any) -> None:
    names = arguments.parameters(self.factory)
    rule_config = {k: v for k, v in kwargs.items() if k in names}
    signatures.check_given(type(self).__name__, self.factory, rule_config)
    others = {k: v for k, v in kwargs.items() if k not in names or k == 'allow_non_private'}
    super().__init__(self.factory(**rule_config), learning_rate, **{**self.defaults, **others})
    self._hidden.rule_config = rule_config

  def get_config(self) -> Dict[str, Any]:
    config = compat.base_config(self)
    config.update(saving.serialize_keras_object(dict(self._hidden.rule_config)))
    private = {k: v for k, v in self._hidden.private.items() if k != 'steps'}  # Of the plan.
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
    # Keras reads what it wrote of arrays; it has no words for what it cannot read.
    config = {key: saving.deserialize_keras_object(value) if isinstance(value, (dict, list))
              else value for key, value in config.items()}
    if config.get('plan') is not None:
      config['plan'] = plan_lib.PrivacyPlan.from_json(config['plan'])
    if config.get('mechanism') is not None:
      config['mechanism'] = mechanisms.from_json(config['mechanism'])
    with gate.loading():
      return super().from_config(config, custom_objects=custom_objects)


def _class(name: str, factory: Callable[..., contract.Rule], **defaults: Any) -> Any:
  """Returns the class of a rule.

  Args:
    name: The name of the class.
    factory: Makes the rule.
    **defaults: Of the class, for arguments of Keras' optimizers.
  """
  return compat.serializable(type(name, (NamedOptimizer,), {
      'factory': staticmethod(factory), 'defaults': defaults, '__module__': __name__,
      '__doc__': signatures.docstring(
          factory, optimizer_lib.DPOptimizer, defaults, factories=vars(rules))}))


DPSGD = _class('DPSGD', rules.dp_sgd)
DPAdam = _class('DPAdam', rules.dp_adam)
DPAdamW = _class('DPAdamW', rules.dp_adam, weight_decay=0.004)
DPAdaGrad = _class('DPAdaGrad', rules.dp_adagrad)
DPRMSprop = _class('DPRMSprop', rules.dp_rmsprop)
DPYogi = _class('DPYogi', rules.dp_yogi)
DPMuon = _class('DPMuon', rules.dp_muon)
DPAdamBC = _class('DPAdamBC', rules.dp_adam_bc)
DPAdaGradBC = _class('DPAdaGradBC', rules.dp_adagrad_bc)
DPRMSpropBC = _class('DPRMSpropBC', rules.dp_rmsprop_bc)
DPAdamIME = _class('DPAdamIME', rules.dp_adam_ime)
DPAdaGradIME = _class('DPAdaGradIME', rules.dp_adagrad_ime)
DPAdamSTP = _class('DPAdamSTP', rules.scale_then_privatize)
DPAdaGradSTP = _class('DPAdaGradSTP', rules.dp_adagrad_stp)
DPRMSpropSTP = _class('DPRMSpropSTP', rules.dp_rmsprop_stp)
DPShampoo = _class('DPShampoo', rules.dp_shampoo)
DPSOAP = _class('DPSOAP', rules.dp_soap)
DPKFC = _class('DPKFC', rules.dp_kfc)
DPAdamJME = _class('DPAdamJME', rules.dp_adam_jme)
SideInformationAdam = _class('SideInformationAdam', rules.side_information_adam)
AdaDPS = _class('AdaDPS', rules.adadps)
PDADPMD = _class('PDADPMD', rules.pda_dpmd)
PDPSGD = _class('PDPSGD', rules.pdp_sgd)
PASAN = _class('PASAN', rules.pasan)
PAGAN = _class('PAGAN', rules.pagan)
NoisyAdaGrad = _class('NoisyAdaGrad', rules.noisy_adagrad)
NonPrivateNoiselessAdam = _class('NonPrivateNoiselessAdam', rules.non_private_noiseless_adam)
DP2RMSprop = _class('DP2RMSprop', rules.dp2_rmsprop)
DP2AdaGrad = _class('DP2AdaGrad', rules.dp2_adagrad)
DP2Yogi = _class('DP2Yogi', rules.dp2_yogi)
