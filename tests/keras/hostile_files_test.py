# SPDX-License-Identifier: Apache-2.0
"""Files that others made or changed: nothing in them runs, and nothing in them is believed."""

import ast
import json
import os
import random
import zipfile

import build_deps_test
import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import weight_ledger

keras = compat.keras
TRIES = int(os.environ.get('TFDP_FUZZ', 6))  # Tries per file; `TFDP_FUZZ=200` runs more.
RUNS_CODE = {'eval', 'exec', 'execfile', '__import__'}
PICKLES = {'pickle', 'cPickle', 'marshal', 'shelve', 'dill', 'cloudpickle', 'joblib'}


def test_no_reader_can_run_what_it_reads():
  paths = sorted(set(build_deps_test.modules().values()))
  assert len(paths) > 150
  for path in paths:
    tree = ast.parse((build_deps_test.ROOT / path).read_text(encoding='utf-8'))
    for node in ast.walk(tree):
      if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = {alias.name.split('.')[0] for alias in node.names} | {
            (getattr(node, 'module', None) or '').split('.')[0]}
        assert not names & PICKLES, path
      if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        assert called not in RUNS_CODE, path
        if called == 'np.load':
          assert any(word.arg == 'allow_pickle' and word.value.value is False
                     for word in node.keywords), path
        assert not any(word.arg == 'safe_mode' for word in node.keywords), path


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """The bytes of a model with a plan."""
  plan = tfdp.PrivacyPlan(population_size=8, batch_size=4, steps=4, l2_norm_clip=1.0,
                          noise_multiplier=1.0, target_delta=1e-3)
  model = tfdp.DPSequential([keras.layers.Input([2]), keras.layers.Dense(1)])
  model.compile(tfdp.DPAdam(plan=plan), 'mse')
  path = tmp_path_factory.mktemp('saved') / 'model.keras'
  model.save(path)
  return path.read_bytes()


def with_config(content, path, change):
  """The `.keras` file with another configuration."""
  path.write_bytes(content)
  with zipfile.ZipFile(path) as file:
    parts = {name: file.read(name) for name in file.namelist()}
  config = json.loads(parts['config.json'])
  change(config)
  parts['config.json'] = json.dumps(config).encode()
  with zipfile.ZipFile(path, 'w') as file:
    for name, part in parts.items():
      file.writestr(name, part)


def load(path):
  """The model, or None if it is refused."""
  try:
    return keras.models.load_model(path)
  except Exception:  # pylint: disable=broad-except
    return None  # Keras' own words, mostly.


def test_changed_bytes_are_refused_or_change_nothing(saved, tmp_path):
  rng, path = random.Random(0), tmp_path / 'model.keras'
  path.write_bytes(saved)
  assert load(path).optimizer.noise_multiplier == 1.0
  for _ in range(TRIES):
    place = rng.randrange(len(saved))
    changed = bytearray(saved)
    changed[place] ^= 1 << rng.randrange(8)
    for content in (bytes(changed), saved[:place]):
      path.write_bytes(content)
      model = load(path)
      assert model is None or model.optimizer.noise_multiplier == 1.0


def test_a_state_with_any_other_bit_is_refused():
  model = tfdp.DPSequential([keras.layers.Input([2]), keras.layers.Dense(1)])
  model.compile(tfdp.DPAdam(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4,
                            mechanism=tfdp.mechanisms.BandedToeplitz(3, 8)), 'mse')
  model.fit(np.ones([4, 2]), np.ones([4, 1]), batch_size=4, verbose=0)
  store, rng = {}, random.Random(0)
  model.optimizer.save_own_variables(store)
  model.optimizer.load_own_variables(store)
  changed = 0
  for name, value in store.items():
    content = bytearray(value.tobytes())
    for place in rng.sample(range(len(content)), min(len(content), 8)):
      content[place] ^= (bit := 1 << rng.randrange(8))
      other = np.frombuffer(bytes(content), value.dtype).reshape(value.shape)
      with pytest.raises(tfdp.PrivacyError, match='must be what was saved'):
        model.optimizer.load_own_variables({**store, name: other})
      content[place] ^= bit
      changed += 1
  assert changed > 50
  model.optimizer.load_own_variables(store)


@pytest.mark.parametrize('where', ['learning_rate', 'plan', 'name', 'mechanism', 'clipping'])
def test_code_in_a_configuration_does_not_run(saved, tmp_path, where, monkeypatch):
  ran = []
  monkeypatch.setattr(os, 'system', ran.append)
  path = tmp_path / 'model.keras'

  def attack(config):
    optimizer = config['compile_config']['optimizer']['config']
    optimizer[where] = {'module': 'os', 'class_name': 'system', 'registered_name': 'system',
                        'config': {'command': 'anything'}}
    config['compile_config']['loss'] = {
        'module': 'os', 'class_name': 'function', 'registered_name': 'function',
        'config': 'system'}

  with_config(saved, path, attack)
  load(path)
  assert not ran


@pytest.mark.parametrize('values', [
    [], [255, 254], np.frombuffer(b'{}', np.uint8), [0.5], ['a'], None,
    np.frombuffer(b'{"format": "tfdp_adaptive.ledger", "version": 1, "entries": [3]}', np.uint8)],
                         ids=range(7))
def test_a_ledger_that_was_changed_is_refused(values):
  with pytest.raises(ValueError, match='Received'):
    weight_ledger.parsed(values)
