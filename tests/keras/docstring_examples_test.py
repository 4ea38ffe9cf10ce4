# SPDX-License-Identifier: Apache-2.0
"""Docstrings of optimizers say when to use them, and their examples run as they are."""

import inspect
import re
import warnings

import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import gate
from tfdp_adaptive import optimizers


@pytest.fixture(autouse=True)
def closed_again():
  before = set(gate._OPEN)
  yield
  gate._OPEN.clear()
  gate._OPEN.update(before)


def example(name):
  (code,) = re.findall(
      r'^```python\n(.*?)^```$', inspect.getdoc(getattr(tfdp, name)), re.M | re.S)
  return code


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_the_first_line_says_when_to_use_it(name):
  first, *rest = getattr(tfdp, name).__doc__.split('\n\n')
  row = optimizers.OPTIMIZERS[name]
  assert first.startswith('Use ') and first.endswith('.') and '\n' not in first
  assert ('experimental' in first) == bool(row.missing)
  assert rest[0] and 'Example:' in rest and f'tfdp.{name}(' in example(name)
  assert max(map(len, example(name).splitlines())) <= 80


@pytest.mark.thorough(but=['NoisyAdaGrad'])
@pytest.mark.parametrize('name', ['DPOptimizer', *optimizers.OPTIMIZERS])
def test_the_example_trains_all_steps(name):
  scope = {}
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', tfdp.Caution)
    exec(compile(example(name), name, 'exec'), scope)  # pylint: disable=exec-used
  optimizer = scope['model'].optimizer
  assert type(optimizer) is getattr(tfdp, name)
  assert optimizer.steps_done == scope['plan'].steps == 24
  row = optimizers.OPTIMIZERS.get(name)
  if row is not None and name != 'NoisyAdaGrad':  # It may be given a basis.
    assert row.public == (optimizer.rule.public is not None)
