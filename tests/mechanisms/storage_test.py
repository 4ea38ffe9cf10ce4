# SPDX-License-Identifier: Apache-2.0
"""Files and the cache on disk: never trusted blindly, never needed."""

import json
import os
import pathlib
import subprocess
import sys
import warnings

import numpy as np
import pytest

from tfdp_adaptive import errors
from tfdp_adaptive import mechanisms
from tfdp_adaptive.mechanisms import registry


class Counting(mechanisms.Dense):
  """Counts its designs; the cache knows it as Dense."""

  designs = 0

  def design(self):
    type(self).designs += 1
    return super().design()


Counting.__name__ = 'Dense'


@pytest.fixture
def cache(monkeypatch, tmp_path):
  monkeypatch.delenv('TFDP_MECHANISM_CACHE', raising=False)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(Counting, 'designs', 0)
  monkeypatch.setitem(mechanisms.KINDS, 'Dense', Counting)
  return tmp_path / 'tfdp_adaptive' / 'mechanisms'


def test_a_design_is_made_once(cache):
  first = Counting(6).inverse_rows
  assert Counting.designs == 1 and len(list(cache.iterdir())) == 1
  np.testing.assert_array_equal(Counting(6).inverse_rows, first)
  assert Counting(6).rounded('float32').sensitivity() == pytest.approx(1, abs=1e-6)
  assert Counting.designs == 1
  for other in (Counting(7), Counting(6, tolerance=1e-6), Counting(6, objective='max'),
                Counting(6, workload=mechanisms.Workload(.5))):
    assert other.inverse_rows is not None
  assert Counting.designs == 5 and len(list(cache.iterdir())) == 5


def damaged(text, path):
  content = json.loads(text)
  rows = np.array(content['arrays']['inverse_rows'])
  if path == 'empty':
    return ''
  if path == 'cut':
    return text[:len(text) // 2]
  if path == 'number':
    rows[3] *= 1.001  # The other columns of C still have norm one.
  elif path == 'norm, with the right checksum':
    rows *= .5
  elif path == 'not finite, with the right checksum':
    rows[2, 1] = np.nan
  elif path == 'shape, with the right checksum':
    rows = rows[:4, :4]
  elif path == 'another mechanism':
    content['config']['tolerance'] = .5
  elif path == 'another version':
    content['version'] = 99
  content['arrays']['inverse_rows'] = rows.tolist()
  if 'checksum' in path:
    content['checksum'] = registry.checksum({'inverse_rows': rows})
  return json.dumps(content)


@pytest.mark.parametrize('damage', [
    'empty', 'cut', 'number', 'norm, with the right checksum',
    'not finite, with the right checksum', 'shape, with the right checksum', 'another mechanism',
    'another version'])
def test_a_bad_cache_file_is_designed_again(cache, damage):
  good = Counting(6).inverse_rows
  (path,) = cache.iterdir()
  path.write_text(damaged(path.read_text(), damage))
  with pytest.warns(errors.Caution, match='Designing Dense.* again'):
    np.testing.assert_array_equal(Counting(6).inverse_rows, good)
  assert Counting.designs == 2
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert Counting(6).inverse_rows is not None  # The file was replaced.
  assert Counting.designs == 2


@pytest.mark.parametrize('damage', [
    'number', 'norm, with the right checksum', 'not finite, with the right checksum',
    'shape, with the right checksum', 'another version', 'cut'])
def test_a_bad_saved_file_is_refused(tmp_path, damage):
  path = tmp_path / 'mechanism.json'
  mechanisms.Dense(6).save(path)
  assert mechanisms.load(path) == mechanisms.Dense(6)
  path.write_text(damaged(path.read_text(), damage))
  with pytest.raises(ValueError):
    mechanisms.load(path)


def test_a_file_cannot_claim_fewer_bands_than_it_has(tmp_path):
  """Fewer bands would be amplified by more groups."""
  path = tmp_path / 'mechanism.json'
  mechanisms.BandedToeplitz(5, 9).save(path)
  content = json.loads(path.read_text())
  content['config']['bands'] = 3
  path.write_text(json.dumps(content))
  with pytest.raises(ValueError, match='shapes'):
    mechanisms.load(path)


def test_the_cache_can_be_turned_off_or_moved(cache, monkeypatch, tmp_path):
  monkeypatch.setenv('TFDP_MECHANISM_CACHE', 'off')
  assert Counting(6).inverse_rows is not None and not cache.exists()
  monkeypatch.setenv('TFDP_MECHANISM_CACHE', str(tmp_path / 'elsewhere'))
  assert Counting(6).inverse_rows is not None and not cache.exists()
  assert len(list((tmp_path / 'elsewhere').iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_no_failure(cache, monkeypatch, tmp_path):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  with pytest.warns(errors.Caution, match='cannot be kept'):
    assert Counting(6).inverse_rows is not None
  assert not cache.exists()


def test_fast_designs_are_not_cached(cache):
  assert mechanisms.BandedToeplitz(4, 10).coefficients is not None
  assert mechanisms.Tree(10).node_scale is not None
  assert not cache.exists()


def test_numbers_are_legible():
  content = json.loads(mechanisms.BLT(2, 20).to_json())
  assert len(content['arrays']['decays']) == 2
  assert content['kind'] == 'BLT' and content['version'] == 1


def test_numpy_scalars_are_accepted_in_a_config():
  mechanism = mechanisms.BLT(np.int64(2), np.int32(50), min_sep=np.int64(10),
                             max_participations=np.int64(5),
                             workload=mechanisms.Workload(np.float32(.5)))
  assert mechanisms.from_json(mechanism.to_json()) == mechanism
  assert mechanism == mechanisms.BLT(2, 50, min_sep=10, max_participations=5,
                                     workload={'momentum': .5})
  assert mechanisms.BandedToeplitz(2, 5, coefficients=np.array([1, .5])) == (
      mechanisms.BandedToeplitz(2, 5, coefficients=(1., .5)))


def test_no_tensorflow_is_imported():
  code = ('import sys; from tfdp_adaptive import mechanisms; mechanisms.BLT(2, 10).rmse(); '
          'sys.exit(any(name.split(".")[0] in ("tensorflow", "keras") for name in sys.modules))')
  root = str(pathlib.Path(__file__).resolve().parents[2])
  environment = dict(os.environ, PYTHONPATH=root)
  assert subprocess.run([sys.executable, '-c', code], env=environment, check=False).returncode == 0
