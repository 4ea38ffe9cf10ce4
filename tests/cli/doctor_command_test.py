# SPDX-License-Identifier: Apache-2.0
"""`tfdp doctor` prints what a report needs, and nothing of the data or of the machine's owner."""

import getpass
import json
import pathlib
import platform

import pytest

from tfdp_adaptive import compat
from tfdp_adaptive import version
from tfdp_adaptive.cli import main


def test_versions_stack_and_settings(capsys, monkeypatch):
  monkeypatch.setenv('TF_DETERMINISTIC_OPS', '1')
  monkeypatch.setenv('SECRET_TOKEN', 'hidden')
  assert main.main(['doctor']) == 0
  said = capsys.readouterr().out
  for wanted in (f'tfdp-adaptive {version.__version__}', f'Python {platform.python_version()}',
                 f'Keras {3 if compat.KERAS_3 else 2}', 'CPU', '"TF_DETERMINISTIC_OPS": "1"'):
    assert wanted in said
  for private in ('hidden', platform.node(), str(pathlib.Path.home()) + '/',
                  f'/{getpass.getuser()}/'):
    assert private not in said


def test_a_model_and_json(capsys, tmp_path):
  compat.keras.Sequential([
      compat.keras.layers.Input([2]), compat.keras.layers.Dense(1, name='mine')]).save(
          str(tmp_path / 'model.h5'))
  assert main.main(['doctor', str(tmp_path / 'model.h5'), '--json']) == 0
  found = json.loads(capsys.readouterr().out)
  assert found['model'] == 'Sequential' and 'mine' in json.dumps(found['clipping'])
  assert str(tmp_path) not in json.dumps(found)


@pytest.mark.parametrize('model', ['nothing.keras', __file__, 'no_module:no_function'])
def test_what_is_no_model_is_an_error(capsys, model):
  assert main.main(['doctor', model]) == 2
  said = capsys.readouterr().err
  assert said.startswith('tfdp doctor: error: ') and said.count('\n') == 1
