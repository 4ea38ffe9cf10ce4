# SPDX-License-Identifier: Apache-2.0
"""The public names: loaded when they are first used, and all of them there."""

import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive import optimizers


def test_importing_the_library_waits_for_no_other():
  code = ('import sys, tfdp_adaptive; tfdp_adaptive.__version__; dir(tfdp_adaptive); '
          'print([name for name in ("tensorflow", "keras", "numpy", "scipy") '
          'if name in sys.modules])')
  done = subprocess.run([sys.executable, '-c', code], check=True, stdin=subprocess.DEVNULL,
                        capture_output=True, text=True)
  assert done.stdout == '[]\n'


@pytest.mark.thorough
@pytest.mark.both_stacks
def test_importing_starts_no_threads_of_tensorflow():
  """A process that imported the library may fork, as long as TensorFlow computed nothing."""
  code = ('import tfdp_adaptive as tfdp; [getattr(tfdp, name) for name in dir(tfdp)]\n'
          'from tensorflow.python.eager import context\n'
          'print(context.context()._context_handle)')
  done = subprocess.run([sys.executable, '-c', code], check=True, stdin=subprocess.DEVNULL,
                        capture_output=True, text=True)
  assert done.stdout == 'None\n'


@pytest.mark.thorough
def test_a_new_process_loads_models_without_naming_their_classes(tmp_path):
  keras = compat.keras
  model = tfdp.make_private(keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)]))
  model.compile(tfdp.DPAdamBC(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4), 'mse')
  model.save(tmp_path / 'model.keras')
  code = ('import sys, tensorflow as tf, tfdp_adaptive\n'
          'model = tf.keras.models.load_model(sys.argv[1])\n'
          'print(type(model).__name__, type(model.optimizer).__name__)')
  done = subprocess.run([sys.executable, '-c', code, str(tmp_path / 'model.keras')], check=True,
                        stdin=subprocess.DEVNULL, capture_output=True, text=True)
  assert done.stdout == 'DPSequential DPAdamBC\n'


def test_every_public_name_is_there_and_documented():
  assert len(tfdp.__all__) > 30 and dir(tfdp) == sorted(tfdp.__all__)
  for name in tfdp.__all__:
    value = getattr(tfdp, name)
    assert isinstance(value, str) or value.__doc__, f'tfdp.{name} has no docstring.'


def test_editors_know_the_public_names():
  stub = pathlib.Path(tfdp.__file__).with_suffix('.pyi').read_text(encoding='utf-8')
  told = re.findall(r' as (\w+)$', stub, re.M)
  assert len(told) == len(set(told))
  assert {*told, *optimizers.OPTIMIZERS} == {*dir(tfdp), 'queries'}


def test_editors_know_the_names_of_federated():
  stub = pathlib.Path(tfdp.federated.__file__).with_suffix('.pyi').read_text(encoding='utf-8')
  told = re.findall(r' as (\w+)$', stub, re.M)
  assert sorted(told) == dir(tfdp.federated)


def test_names_that_are_not_there():
  with pytest.raises(AttributeError, match='has no attribute .nothing.'):
    tfdp.nothing  # pylint: disable=pointless-statement  # noqa: B018


@pytest.mark.parametrize('name, needs', [('queries', 'tensorflow_privacy')])
def test_parts_that_need_more_say_what(name, needs):
  assert name not in tfdp.__all__  # `import *` works everywhere.
  if importlib.util.find_spec(needs) is not None:
    assert getattr(tfdp, name).__doc__
  else:
    with pytest.raises(ImportError, match=f'needs {needs}'):
      getattr(tfdp, name)


@pytest.mark.parametrize('name', sorted(optimizers.OPTIMIZERS))
def test_named_optimizers_show_every_argument(name):
  kind = getattr(tfdp, name)
  shown = inspect.signature(kind).parameters
  rule = inspect.signature(kind.factory).parameters
  optimizer = inspect.signature(tfdp.DPOptimizer).parameters
  assert set(shown) >= (set(rule) | set(optimizer)) - {'rule'}
  for parameter in rule.values():
    assert shown[parameter.name].default == parameter.default
  assert next(iter(shown)) == 'learning_rate'
  arguments = kind.__doc__.split('\nArgs:\n')[1].split('\nRaises:\n')[0]
  documented = re.findall(r'^  (?! )(?:\*\*)?([\w, *]+):', arguments, re.M)
  documented = [each.strip(' *') for line in documented for each in line.split(',')]
  assert len(documented) == len(set(documented))
  assert set(documented) == set(shown)


def test_subclasses_of_named_optimizers_show_their_own_arguments():

  class Warm(tfdp.DPAdam):

    def __init__(self, warm_up, learning_rate=0.1, **kwargs):
      super().__init__(learning_rate, **kwargs)
      self.warm_up = warm_up

  class Plain(tfdp.DPAdam):
    pass

  class Warmer(Warm):
    pass

  class Momentum(tfdp.DPAdam):
    factory = staticmethod(tfdp.rules.dp_sgd)

  for kind in (Warm, Warmer):
    assert list(inspect.signature(kind).parameters) == ['warm_up', 'learning_rate', 'kwargs']
  assert inspect.signature(Plain) == inspect.signature(tfdp.DPAdam)
  assert inspect.signature(Momentum) == inspect.signature(tfdp.DPSGD)
