# SPDX-License-Identifier: Apache-2.0
"""Sets the checkout's import path for all tests, and selects TFF's tests and its worker."""

import gc
import importlib.util
import pathlib
import signal
import sys

import hypothesis
from hypothesis import configuration
import pytest

import tfdp_adaptive
from tfdp_adaptive import gate

pytest_plugins = ['costs', 'entropy', 'guards', 'selection']
ROOT = pathlib.Path(__file__).parent.parent
# Libraries which not every environment can have; a module of tests that imports one is skipped.
MISSING = [library for library in ('tensorflow_federated', 'tensorflow_privacy')
           if importlib.util.find_spec(library) is None]

tfdp_adaptive.experimental(*gate.PARTS)  # Whoever tests it knows what it is.
configuration.set_hypothesis_home_dir(ROOT / 'build' / 'hypothesis')
hypothesis.settings.register_profile('tfdp', derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile('tfdp')


class _Skipped(pytest.Module):
  """A test module that cannot even be imported here."""

  def collect(self):
    pytest.skip(f'needs one of {MISSING}, which this environment does not have',
                allow_module_level=True)


def pytest_configure(config):
  config.addinivalue_line('markers', 'federated: needs tensorflow_federated')
  config.addinivalue_line('markers', 'pitfall(what, severity, stops): a line of docs/pitfalls.md')
  # Shells start background jobs that way; TFF, which ends its worker by it, would hang.
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_pycollect_makemodule(module_path, parent):
  text = module_path.read_text(encoding='utf-8')
  if any(f'\nimport {library}' in text for library in MISSING) or (
      MISSING and module_path.parent.name == 'queries'):
    return _Skipped.from_parent(parent, path=module_path)
  return None


def pytest_collection_modifyitems(items):
  for item in items:
    if ' at 0x' in item.nodeid:
      raise pytest.UsageError('The names of tests must be the same in every process. Received one '
                              f'with an address, {item.nodeid}: give `parametrize` its `ids`.')
    if item.get_closest_marker('federated') and 'tensorflow_federated' in MISSING:
      item.add_marker(pytest.mark.skip(reason='needs tensorflow_federated'))


def pytest_sessionfinish():
  """Ends TFF's worker process, which would otherwise outlive Python."""
  tff = sys.modules.get('tensorflow_federated')
  if tff is not None:
    tff.test.set_no_default_context()
    gc.collect()


@pytest.fixture
def own_layers():
  """Forgets the layers that an example registers: other tests count them."""
  from tfdp_adaptive.clipping.layers import registry  # pylint: disable=g-import-not-at-top
  yield
  for layer in [layer for layer in registry._KINDS if layer.__module__ not in sys.modules]:
    del registry._KINDS[layer]
