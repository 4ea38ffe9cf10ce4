"""One Keras class per rule; the rule's factory documents its arguments and source.

Every class takes the arguments of its factory and those of `DPOptimizer`.
"""

from tfdp_adaptive import compat
from tfdp_adaptive import optimizers
from tfdp_adaptive import rules

_DOC = """{summary}

Keras optimizer of `tfdp.rules.{factory}`, which documents the rule's own arguments
({arguments}). All others, such as `learning_rate`, `l2_norm_clip`, `noise_multiplier`,
`batch_size` and `plan`, are those of `tfdp.DPOptimizer`.
"""


def _class(name, factory):
  cls = type(name, (optimizers.NamedOptimizer,), {
      'factory': staticmethod(factory), '__module__': __name__,
      '__doc__': _DOC.format(
          summary=factory.__doc__.strip().splitlines()[0], factory=factory.__name__,
          arguments=', '.join(f'`{p}`' for p in optimizers.parameters(factory)) or 'none')})
  return compat.serializable(cls)


DPSGD = _class('DPSGD', rules.dp_sgd)
DPAdam = _class('DPAdam', rules.dp_adam)
DPAdaGrad = _class('DPAdaGrad', rules.dp_adagrad)
DPRMSprop = _class('DPRMSprop', rules.dp_rmsprop)
DPYogi = _class('DPYogi', rules.dp_yogi)
DPAdamBC = _class('DPAdamBC', rules.dp_adam_bc)
DPAdaGradBC = _class('DPAdaGradBC', rules.dp_adagrad_bc)
DPRMSpropBC = _class('DPRMSpropBC', rules.dp_rmsprop_bc)
DPAdamIME = _class('DPAdamIME', rules.dp_adam_ime)
DPAdaGradIME = _class('DPAdaGradIME', rules.dp_adagrad_ime)
DPAdamSTP = _class('DPAdamSTP', rules.scale_then_privatize)
DPAdaGradSTP = _class('DPAdaGradSTP', rules.dp_adagrad_stp)
DPRMSpropSTP = _class('DPRMSpropSTP', rules.dp_rmsprop_stp)
