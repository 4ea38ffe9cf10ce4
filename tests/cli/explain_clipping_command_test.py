# SPDX-License-Identifier: Apache-2.0
"""`tfdp explain-clipping`: models from files and from functions."""

import json
import subprocess
import sys
import zipfile

import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.cli import main

keras = compat.keras
layers = keras.layers

MODULE = '''
from tfdp_adaptive import compat
keras = compat.keras

class Twice(keras.layers.Layer):
  def build(self, shape):
    self.gain = self.add_weight(name='gain', shape=(shape[-1],), initializer='ones')
  def call(self, x):
    return 2 * x * self.gain

def build():
  return keras.Sequential([keras.Input((4,)), Twice(name='twice'), keras.layers.Dense(3)])

def nothing():
  return None

def fails():
  raise RuntimeError('out of luck\\nas ever')

def needs(x):
  return x

number = 3
'''


def test_a_saved_model(tmp_path, capsys):
  path = tmp_path / 'mine.keras'
  keras.Sequential([keras.Input((5,), dtype='int32'), layers.Embedding(9, 4, name='table'),
                    layers.Dense(3, name='head')]).save(path)
  assert main.main(['explain-clipping', str(path), '--scaled', '--batch-size', '16']) == 0
  printed = capsys.readouterr().out
  assert 'in a geometry' in printed and 'Batch of 16' in printed
  assert [line.split()[0] for line in printed.splitlines()[4:6]] == ['table', 'head']
  assert main.main(['explain-clipping', str(path), '--json']) == 0
  assert json.loads(capsys.readouterr().out)['engine'] == 'bookkeeping'


@pytest.mark.thorough
def test_a_saved_private_model_in_a_process_that_made_none(tmp_path):
  path = str(tmp_path / 'private.keras')
  tfdp.DPSequential([layers.Input([4]), layers.Dense(3, name='head')]).save(path)
  found = subprocess.run([sys.executable, '-m', 'tfdp_adaptive.cli.main', 'explain-clipping', path],
                         capture_output=True, text=True, check=False)
  assert found.returncode == 0, found.stderr
  assert 'rank one' in found.stdout


def test_a_function(tmp_path, capsys, monkeypatch):
  (tmp_path / 'my_models.py').write_text(MODULE, encoding='utf-8')
  (tmp_path / 'broken_models.py').write_text('def (:', encoding='utf-8')
  monkeypatch.chdir(tmp_path)
  assert main.main(['explain-clipping', 'my_models:build']) == 0
  assert 'Twice is not registered, see tfdp.clipping.register' in capsys.readouterr().out
  for name, message in (('my_models:other', 'no attribute'), ('no_such:build', 'No module'),
                        ('my_models:nothing', 'must be a Keras model'),
                        ('my_models:fails', 'RuntimeError: out of luck ('),
                        ('my_models:fails', 'my_models.py, line 18)'),
                        ('my_models:needs', "required positional argument: 'x'"),
                        ('my_models:number', 'not callable'), ('broken_models:x', 'SyntaxError'),
                        (':x', 'Empty module name'), ('..:x', 'must be a module')):
    assert main.main(['explain-clipping', name]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1


def test_what_is_no_model(tmp_path, capsys):
  broken = tmp_path / 'broken.keras'
  broken.write_text('no model')
  empty = tmp_path / 'empty.keras'
  with zipfile.ZipFile(empty, 'w') as archive:
    archive.writestr('nothing', '')
  for name, message in ((str(broken), 'cannot be loaded'), (str(empty), 'cannot be loaded'),
                        ('missing.keras', 'does not exist')):
    assert main.main(['explain-clipping', name]) == 2
    assert message in capsys.readouterr().err
  with pytest.raises(SystemExit):
    main.main(['explain-clipping', 'a:b', '--batch-size', '0'])
  assert '--batch-size' in capsys.readouterr().err
