"""Differentially private adaptive optimizers for TensorFlow, Keras and TFF.

Public names are imported when they are first used: the NumPy parts (mechanisms,
accounting) do not wait for Keras, and `federated` needs TensorFlow Federated
only when it is touched.
"""

import importlib
import importlib.util

from tfdp_adaptive.version import __version__

# Where each public name lives; a subpackage is its own name.
_EXPORTS = {
    'Ledger': 'privacy.ledger',
    'PrivacyPlan': 'privacy.plan',
    'advise': 'privacy.advice',
    'sampling': 'privacy.sampling',
    'DPOptimizer': 'keras_adapter.optimizer',
    'PrivacyError': 'errors',
    **dict.fromkeys((
        'DPModel', 'DPSequential', 'DPFunctional', 'DPWrapper', 'make_private',
    ), 'keras_adapter.model'),
    'explain_clipping': 'clipping.explain',
    'validate_model': 'keras_adapter.validation',
    'diagnostics': 'keras_adapter.diagnostics',
    **dict.fromkeys((
        'DPSGD', 'DPAdam', 'DPAdaGrad', 'DPRMSprop', 'DPYogi',
        'DPAdamBC', 'DPAdaGradBC', 'DPRMSpropBC', 'DPAdamIME', 'DPAdaGradIME',
        'DPAdamSTP', 'DPAdaGradSTP', 'DPRMSpropSTP',
        'DPAdamJME', 'SideInformationAdam', 'AdaDPS', 'PDADPMD', 'PDPSGD', 'PASAN', 'PAGAN',
        'NoisyAdaGrad', 'NonPrivateNoiselessAdam', 'DP2RMSprop', 'DP2AdaGrad', 'DP2Yogi',
    ), 'keras_adapter.named_optimizers'),
}
_SUBPACKAGES = ('audit', 'clipping', 'estimates', 'federated', 'mechanisms', 'privacy', 'queries', 'rules')

# Without what needs a library that not every environment can have.
__all__ = sorted({'__version__', *_EXPORTS, *_SUBPACKAGES} - {'federated', 'queries'})


def __getattr__(name):
  if name == 'federated' and importlib.util.find_spec('tensorflow_federated') is None:
    raise ImportError(
        '`tfdp_adaptive.federated` needs tensorflow_federated, which runs on Python 3.9 to 3.11 '
        'with TensorFlow 2.14. Install requirements/federated.lock, see README.md.')
  if name in _SUBPACKAGES:
    return importlib.import_module(f'{__name__}.{name}')
  if name not in _EXPORTS:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_EXPORTS[name]}')
  value = module if _EXPORTS[name].rsplit('.', 1)[-1] == name else getattr(module, name)
  globals()[name] = value
  return value


def __dir__():
  return sorted((*globals(), *__all__))
