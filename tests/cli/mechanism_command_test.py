# SPDX-License-Identifier: Apache-2.0
"""`tfdp mechanism` prints what the mechanisms answer, and saves the one it designed."""

import json
import math

import numpy as np
import pytest

from tfdp_adaptive import mechanisms
from tfdp_adaptive.cli import main
from tfdp_adaptive.examples import designs


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
  monkeypatch.setenv('TFDP_MECHANISM_CACHE', 'off')


def results(capsys, folder, *arguments):
  assert main.main(['mechanism', *arguments, '--out', str(folder), '--json']) == 0
  return json.loads(capsys.readouterr().out)


@pytest.mark.thorough
def test_numbers_are_the_mechanisms_own(capsys, tmp_path):
  pattern = dict(min_sep=20, max_participations=5)
  content = results(
      capsys, tmp_path, '--steps', '100', '--design', 'blt:2', '--beside',
      'banded-toeplitz:20,tree,independent,dense,tree-full,square-root,banded:3,banded-optimal:3,'
      'banded-inverse:2', '--min-sep', '20', '--max-participations', '5')
  expected = [
      mechanisms.BLT(2, 100, **pattern), mechanisms.BandedToeplitz(20, 100), mechanisms.Tree(100),
      mechanisms.IndependentGaussian(), mechanisms.Dense(100), mechanisms.Tree(100, 'full'),
      mechanisms.SquareRoot(100), mechanisms.Banded(3, 100),
      mechanisms.Banded(3, 100, method='optimal'), mechanisms.BandedInverse(2, 100, **pattern)]
  for row, mechanism in zip(content['rows'], expected):
    assert row['mean error'] == pytest.approx(mechanism.rmse(100, **pattern), rel=1e-6)
    assert row['max error'] == pytest.approx(mechanism.max_error(100, **pattern), rel=1e-6)
    assert row['sensitivity'] == pytest.approx(mechanism.sensitivity(**pattern), rel=1e-6)
    assert row['rows kept'] == mechanism.memory() and row['draws/step'] == mechanism.passes()
    assert content['lower_bound_of_mean_error'] < row['mean error']
  assert len(content['rows']) == len(expected) and content['rows'][3]['of independent'] == 1
  assert mechanisms.load(tmp_path / 'mechanism.json') == expected[0]
  assert json.loads((tmp_path / 'results.json').read_text()) == content
  assert (tmp_path / 'errors.png').read_bytes()[1:4] == b'PNG'


def test_lower_bound_is_the_nuclear_norm(capsys, tmp_path):
  content = results(capsys, tmp_path, '--steps', '40', '--beside', 'none', '--design', 'dense')
  nuclear = np.linalg.svd(np.tri(40), compute_uv=False).sum() / 40
  assert content['lower_bound_of_mean_error'] == pytest.approx(nuclear, rel=1e-9)
  content = results(capsys, tmp_path, '--steps', '40', '--beside', 'none', '--momentum', '.9')
  assert content['lower_bound_of_mean_error'] is None
  assert content['rows'][0]['mean error'] == pytest.approx(
      mechanisms.BLT(4, 40, workload=mechanisms.Workload(.9)).rmse(), rel=1e-6)


def test_table_of_defaults(capsys, tmp_path):
  assert main.main(['mechanism', '--steps', '300', '--out', str(tmp_path)]) == 0
  out = capsys.readouterr().out
  lines = out.splitlines()
  assert lines[0].startswith('mechanism') and lines[2].startswith('blt:4')
  assert f'{math.sqrt(301 / 2):.4f}' in out and 'No mechanism has a mean error below' in out
  assert str(tmp_path / 'errors.png') in out
  assert [line.split()[0] for line in lines[2:12]] == ['blt:4'] + [
      name for name in designs.alternatives(designs.Wanted(300)) if name != 'blt:4']


def test_streams_are_timed(capsys, tmp_path):
  content = results(capsys, tmp_path, '--steps', '100', '--design', 'blt:2', '--beside',
                    'independent,square-root', '--parameters', '1000')
  blt, independent, root = content['rows']
  assert blt['MB'] == pytest.approx(.008) and independent['MB'] == 0
  assert 0 < blt['ms/step'] and 0 < independent['ms/step'] and root['ms/step'] is None


@pytest.mark.parametrize('arguments', [
    ['--design', 'blt'], ['--design', 'blt:x'], ['--design', 'blt:\u00b2'],
    ['--design', 'blt:' + '9' * 30], ['--design', 'tree:3'], ['--design', 'fourier'],
    ['--design', 'banded:30'], ['--design', 'blt:50'], ['--max-participations', '3'],
    ['--momentum', '1'],
    ['--design', 'dense', '--objective', 'last'], ['--beside', 'tree,,']])
def test_what_cannot_be_designed_is_refused(capsys, tmp_path, arguments):
  folder = tmp_path / 'out'
  assert main.main(['mechanism', '--steps', '20', '--out', str(folder), *arguments]) == 2
  assert 'Received' in capsys.readouterr().err
  assert not folder.exists()


def test_the_folder_must_be_one(capsys, tmp_path):
  (tmp_path / 'file').write_text('')
  assert main.main(['mechanism', '--steps', '20', '--out', str(tmp_path / 'file')]) == 2
  assert '--out' in capsys.readouterr().err


def test_a_fixed_order_is_designed_for_and_shown(capsys, tmp_path):
  pattern = dict(min_sep=5, max_participations=4, fixed_order=True)
  content = results(
      capsys, tmp_path, '--steps', '20', '--design', 'dense', '--min-sep', '5',
      '--max-participations', '4', '--fixed-order')
  best = mechanisms.Dense(20, **pattern)
  assert mechanisms.load(tmp_path / 'mechanism.json') == best
  assert content['rows'][0]['mean error'] == pytest.approx(best.rmse(**pattern), rel=1e-6)
  assert all(row['mean error'] > content['rows'][0]['mean error'] for row in content['rows'][1:])
  assert 'banded-toeplitz:5' in [row['mechanism'] for row in content['rows']]
