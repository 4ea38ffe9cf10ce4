# SPDX-License-Identifier: Apache-2.0
"""One registration makes a mechanism known everywhere; lists that could disagree are compared."""

import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys

import mechanism_contract_test as contract
import noise_oracle
import numpy as np
import pytest

from tfdp_adaptive import mechanisms
from tfdp_adaptive.cli import mechanism as command
from tfdp_adaptive.mechanisms import registry

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = ROOT / 'tfdp_adaptive' / 'mechanisms' / 'README.md'


def concrete():
  """Every mechanism that some file of the package defines, found by looking."""
  kinds = {}
  for module in pkgutil.iter_modules(mechanisms.__path__):
    members = vars(importlib.import_module(f'{mechanisms.__name__}.{module.name}'))
    kinds.update({name: kind for name, kind in members.items()
                  if inspect.isclass(kind) and issubclass(kind, mechanisms.Mechanism)
                  and not inspect.isabstract(kind) and not name.startswith('_')})
  return kinds


def test_every_mechanism_is_registered_exported_and_offered():
  assert concrete() == mechanisms.KINDS and mechanisms.KINDS
  for name, kind in mechanisms.KINDS.items():
    assert getattr(mechanisms, name) is kind
  assert {kind for kind, _ in mechanisms.DESIGNS.values()} == set(mechanisms.KINDS.values())


@pytest.mark.parametrize('table', [contract.MECHANISMS, noise_oracle.MECHANISMS.values()],
                         ids=['contract', 'noise'])
def test_every_mechanism_is_in_the_tables_of_tests(table):
  assert {type(mechanism) for mechanism in table} == set(mechanisms.KINDS.values())


def section(title):
  return re.search(rf'^## {title}\n(.*?)(?=^## |\Z)', README.read_text(encoding='utf-8'),
                   re.DOTALL | re.MULTILINE).group(1)


@pytest.mark.parametrize('title', ['Which one', 'What a stream reads'])
def test_every_mechanism_is_in_the_tables_of_the_readme(title):
  rows = [line.split('|')[1] for line in section(title).splitlines() if line.startswith('|')]
  named = {name for row in rows for name in re.findall(r'`([A-Z]\w+)', row)}
  without_numbers = {'IndependentGaussian'} if title == 'What a stream reads' else set()
  assert named == set(mechanisms.KINDS) - without_numbers


@pytest.mark.parametrize('name', mechanisms.DESIGNS)
def test_every_design_can_be_typed_and_made(name):
  size = mechanisms.DESIGNS[name][1].size
  text = name if size is None else f'{name}:2'
  assert command.parse(text) == (name, None if size is None else 2)
  options = dict(workload=mechanisms.Workload(), objective='mean', min_sep=3, max_participations=2,
                 fixed_order=False)
  mechanism = registry.design(name, 6, size and 2, **options)
  assert isinstance(mechanism, mechanisms.DESIGNS[name][0]) and mechanism.steps in (6, None)
  np.testing.assert_allclose(
      mechanism.materialize_inverse(6) @ mechanism.materialize(6), np.eye(6), atol=1e-9)


def test_a_name_is_registered_once():
  with pytest.raises(ValueError, match='registered once'):
    registry.register(registry.Design('blt'))(type('Other', (), {}))
  with pytest.raises(ValueError, match='registered once'):
    registry.register(registry.Design('other'))(type('BLT', (), {}))
  with pytest.raises(ValueError, match='at least one design'):
    registry.register()(type('Other', (), {}))
  assert 'Other' not in mechanisms.KINDS and 'other' not in mechanisms.DESIGNS


@pytest.mark.thorough
def test_a_mechanism_without_a_noise_stream_cannot_be_imported():
  """At import, not at the first step of a run; a stream that is inherited is none."""
  code = (
      'from tfdp_adaptive import mechanisms\n'
      'from tfdp_adaptive.mechanisms import registry\n'
      "@registry.register(registry.Design('other'))\n"
      'class Other(mechanisms.BLT):\n'
      '  pass\n'
      'import tfdp_adaptive.noise\n')
  done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,
                        check=False)
  assert done.returncode == 1
  assert 'ImportError: No noise stream is registered for Other.' in done.stderr
  assert 'noise/__init__.py' in done.stderr


