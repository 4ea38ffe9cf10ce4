"""The public names: loaded when they are first used, and all of them there."""

import importlib.util
import subprocess
import sys

import pytest

import tfdp_adaptive as tfdp


def test_importing_the_library_waits_for_no_other():
  code = ('import sys, tfdp_adaptive; tfdp_adaptive.__version__; dir(tfdp_adaptive); '
          'print([name for name in ("tensorflow", "keras", "numpy", "scipy") '
          'if name in sys.modules])')
  done = subprocess.run([sys.executable, '-c', code], check=True, stdin=subprocess.DEVNULL,
                        capture_output=True, text=True)
  assert done.stdout == '[]\n'


def test_every_public_name_is_there_and_documented():
  assert len(tfdp.__all__) > 30
  for name in tfdp.__all__:
    value = getattr(tfdp, name)
    assert name in dir(tfdp)
    assert isinstance(value, str) or value.__doc__, f'tfdp.{name} has no docstring.'


def test_names_that_are_not_there():
  with pytest.raises(AttributeError, match='has no attribute .nothing.'):
    tfdp.nothing  # pylint: disable=pointless-statement  # noqa: B018


@pytest.mark.parametrize('name, needs', [
    ('federated', 'tensorflow_federated'), ('queries', 'tensorflow_privacy')])
def test_parts_that_need_more_say_what(name, needs):
  assert name not in tfdp.__all__  # `import *` works everywhere.
  if importlib.util.find_spec(needs) is not None:
    assert getattr(tfdp, name).__doc__
  else:
    with pytest.raises(ImportError, match=f'needs {needs}'):
      getattr(tfdp, name)
