# SPDX-License-Identifier: Apache-2.0
"""The table of the library's optimizers, one row each.

A row makes the Keras class, its public name, its page of the reference, its state and its audit.
To add an optimizer, write its rule, export it in `rules/__init__.py`, and add a row here.
"""

import types
from typing import Any, Dict, Mapping, NamedTuple

_NONE: Mapping[str, Any] = types.MappingProxyType({})
_DELAYED = dict(sgd_steps=2, adaptive_steps=1, relative_adaptive_clip=2.0)


class Optimizer(NamedTuple):
  """Registered properties of an optimizer, apart from its rule.

  Attributes:
    rule: Name of the rule's factory in `tfdp.rules`.
    family: Page of the reference, a key of `FAMILIES`.
    audit: Arguments of the factory that `tfdp audit --white-box` uses.
    public: Whether the rule needs public examples.
    defaults: Defaults of arguments of Keras' optimizers.
    missing: For an experimental optimizer, the evidence that is missing. Its factory is decorated
      with `gate.part`.
  """

  rule: str
  family: str
  audit: Mapping[str, Any] = _NONE
  public: bool = False
  defaults: Mapping[str, Any] = _NONE
  missing: str = ''


FAMILIES = {
    'plain': 'SGD, Adam, AdaGrad, RMSProp, Yogi', 'bias_corrected': 'Bias correction',
    'scale_then_privatize': 'Scale, then privatize',
    'moments': 'Second moments with noise of their own', 'delayed': 'Delayed preconditioners',
    'public': 'With public data or public bounds', 'matrices': 'For weight matrices',
    'noiseless': 'Without a guarantee'}
OPTIMIZERS: Dict[str, Optimizer] = {
    'DPSGD': Optimizer('dp_sgd', 'plain'),
    'DPAdam': Optimizer('dp_adam', 'plain'),
    'DPAdamW': Optimizer('dp_adam', 'plain', defaults=dict(weight_decay=0.004)),
    'DPAdaGrad': Optimizer('dp_adagrad', 'plain'),
    'DPRMSprop': Optimizer('dp_rmsprop', 'plain'),
    'DPYogi': Optimizer('dp_yogi', 'plain'),
    'DPMuon': Optimizer(
        'dp_muon', 'matrices',
        missing='it was as good as dp_adam where measured, and takes four times as long'),
    'DPAdamBC': Optimizer('dp_adam_bc', 'bias_corrected'),
    'DPAdaGradBC': Optimizer('dp_adagrad_bc', 'bias_corrected'),
    'DPRMSpropBC': Optimizer('dp_rmsprop_bc', 'bias_corrected'),
    'DPAdamIME': Optimizer(
        'dp_adam_ime', 'moments',
        missing='it was worse than dp_adam on every task that was measured'),
    'DPAdaGradIME': Optimizer(
        'dp_adagrad_ime', 'moments',
        missing='post-processing with the same floor was as good on a logistic regression'),
    'DPAdamSTP': Optimizer(
        'scale_then_privatize', 'scale_then_privatize', dict(scale_epsilon=0.1)),
    'DPAdaGradSTP': Optimizer('dp_adagrad_stp', 'scale_then_privatize', dict(scale_epsilon=0.1)),
    'DPRMSpropSTP': Optimizer('dp_rmsprop_stp', 'scale_then_privatize', dict(scale_epsilon=0.1)),
    'DPShampoo': Optimizer(
        'dp_shampoo', 'matrices', dict(refresh_every=2),
        missing='it helped on synthetic inputs only'),
    'DPSOAP': Optimizer('dp_soap', 'matrices', dict(refresh_every=2)),
    'DPKFC': Optimizer('dp_kfc', 'matrices', public=True),
    'DPAdamJME': Optimizer(
        'dp_adam_jme', 'moments',
        missing='it was as good as dp_adam on one task and worse on two'),
    'SideInformationAdam': Optimizer('side_information_adam', 'public', public=True),
    'AdaDPS': Optimizer('adadps', 'public', public=True),
    'PDADPMD': Optimizer('pda_dpmd', 'public', dict(steps=24), public=True),
    'PDPSGD': Optimizer(
        'pdp_sgd', 'public', dict(dimension=8), True,
        missing='it was worse than DP-Adam on every task that was measured'),
    'PASAN': Optimizer(
        'pasan', 'public', missing='it was worse than DP-SGD on the one task that was measured'),
    'PAGAN': Optimizer('pagan', 'public', dict(ellipsoid=4.0)),
    'NoisyAdaGrad': Optimizer(
        'noisy_adagrad', 'moments', dict(diagonal=True),
        missing='it was not compared with other rules on any task'),
    'NonPrivateNoiselessAdam': Optimizer(
        'non_private_noiseless_adam', 'noiseless', dict(allow_non_private=True)),
    'DP2RMSprop': Optimizer('dp2_rmsprop', 'delayed', _DELAYED),
    'DP2AdaGrad': Optimizer('dp2_adagrad', 'delayed', _DELAYED),
    'DP2Yogi': Optimizer('dp2_yogi', 'delayed', _DELAYED),
}
