# SPDX-License-Identifier: Apache-2.0
"""Each part has the tests that it should, and `make test-changed` runs what a change touches."""

import os
import pathlib
import subprocess
import sys
import types

import changed
import pytest
import selection

TESTS = pathlib.Path(__file__).parent


def _item(path, row='', names=(), marks=(), fixtures=None):
  code = types.SimpleNamespace(co_names=names)
  return types.SimpleNamespace(
      nodeid=f'tests/{path}::test_it' + (f'[{row}]' if row else ''), path=TESTS / path,
      function=types.SimpleNamespace(__code__=code),
      get_closest_marker=lambda name: {mark.name: mark for mark in marks}.get(name),
      _fixtureinfo=types.SimpleNamespace(name2fixturedefs=fixtures or {}))


def _stacks(item, monkeypatch):
  found = []
  for keras_2 in (False, True):
    monkeypatch.setattr(selection, 'KERAS_2', keras_2)
    if selection._is_ours(item):
      found.append(keras_2)
  return found


def test_every_test_runs_on_one_stack_and_those_that_ask_on_both(monkeypatch):
  rows = [_stacks(_item('keras/some_test.py', str(i)), monkeypatch) for i in range(200)]
  assert all(len(stacks) == 1 for stacks in rows)
  assert 60 < sum(stacks == [True] for stacks in rows) < 140
  both = [False, True]
  assert _stacks(_item('keras/some_test.py', names=('KERAS_3',)), monkeypatch) == both
  for mark in ('skipif', 'federated', 'both_stacks'):
    item = _item('accounting/some_test.py', marks=[getattr(pytest.mark, mark).mark])
    assert _stacks(item, monkeypatch) == both
  assert _stacks(_item('accounting/some_test.py'), monkeypatch) == [False]
  assert _stacks(_item('federated/some_test.py'), monkeypatch) == [True]


def test_what_shares_a_fixture_of_its_file_stays_together(monkeypatch):
  fixture = types.SimpleNamespace(scope='module', baseid='tests/keras/some_test.py')
  stacks = [_stacks(_item('keras/some_test.py', str(i), fixtures={'f': [fixture]}), monkeypatch)
            for i in range(20)]
  assert all(one == stacks[0] for one in stacks)


def test_rows_that_are_kept():
  def quick(row, **patterns):
    marker = pytest.mark.thorough(**patterns).mark
    return selection._is_quick(_item('keras/some_test.py', row, marks=[marker]))

  kept = {'but': ['a', '*-xla']}
  assert quick('a', **kept) and quick('b-xla', **kept)
  assert not quick('b', **kept) and not quick('ab', **kept)
  assert quick('b', rows=['a*']) and not quick('ab', rows=['a*'])
  assert not quick('a') and selection._is_quick(_item('keras/some_test.py', 'a'))


def test_the_parts_are_all_there_is():
  """Of each test on each stack: in one part at most, and in some part of some stack."""
  items = [_item('keras/some_test.py', str(i)) for i in range(50)] + [
      _item('accounting/some_test.py', str(i)) for i in range(5)] + [
          _item('federated/some_test.py')]

  class Config:
    hook = types.SimpleNamespace(pytest_deselected=lambda items: None)

    def __init__(self, part):
      self._options = {'--part': part, '--slow': False}

    def getoption(self, name):
      return self._options.get(name)

  def part(name):
    left = list(items)
    selection.pytest_collection_modifyitems(Config(name), left)
    return left

  half, rest = part('half'), part('rest')
  assert not [item for item in half if item in rest]
  assert len(part('quick')) == len(part(None)) == len(items)
  assert len(half) + len(rest) == len(items) - (5 if selection.KERAS_2 else 0)


def test_shuffled_tests_stay_with_their_file():
  items = [_item(f'keras/{file}_test.py', str(i)) for file in 'abcde' for i in range(9)]
  first, again, other = (selection.shuffled(items, seed) for seed in (1, 1, 2))
  name = lambda item: item.nodeid
  assert first == again != other and sorted(first, key=name) == items
  files = [item.path for item in first]
  assert sum(one != two for one, two in zip(files, files[1:])) == 4
  assert [item for item in first if item.path == files[0]] != items[:9]


def test_a_limit_begins_no_more_tests_and_says_so(tmp_path):
  """A test that runs is ended, and one that fails in time fails the run."""
  (tmp_path / 'some_test.py').write_text(
      'import time\n'
      'def test_long():\n  time.sleep(.6)\n  assert False\n'
      'def test_left():\n  pass\n'
      'def test_left_too():\n  pass\n')
  run = lambda *options: subprocess.run(
      [sys.executable, '-m', 'pytest', '-q', '-p', 'selection', '-p', 'no:cacheprovider',
       '--rootdir', str(tmp_path), str(tmp_path), *options],
      env={**os.environ, 'PYTHONPATH': str(TESTS)}, capture_output=True, text=True, check=False)
  limited, whole = run('--limit=.5'), run()
  assert limited.returncode == whole.returncode == 1
  assert '2 tests left out: time was up' in limited.stdout
  assert '1 failed, 2 skipped' in limited.stdout
  assert '1 failed, 2 passed' in whole.stdout and 'left out' not in whole.stdout


def test_what_a_change_touches():
  of = lambda *paths: changed.selected(paths)
  everywhere = of('tfdp_adaptive/trees.py')
  for room in ('clipping', 'keras', 'noise', 'queries', 'rules', 'privatizer_test.py'):
    assert room in everywhere
  rule = of('tfdp_adaptive/rules/muon.py')
  assert 'rules' in rule and 'mechanisms' not in rule and 'accounting' not in rule
  assert of('tests/rules/muon_test.py') == sorted({*changed.ALWAYS, 'rules/muon_test.py'})
  assert of('tests/rules/table.py') == sorted({*changed.ALWAYS, 'rules'})
  assert of('tests/conftest.py') == ['.']
  assert 'documents_test.py' in of('README.md')
  assert of('tfdp_adaptive/federated_that_is_gone.py') == of('README.md')


def test_every_package_has_a_room_of_tests():
  """Or `make test-changed` would run none for it."""
  packages = {path.name for path in (TESTS.parent / 'tfdp_adaptive').iterdir()
              if (path / '__init__.py').exists()}
  rooms = {path.name for path in TESTS.iterdir()}
  assert packages and packages - rooms == {'compat'}  # Every test uses it.
