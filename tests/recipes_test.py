# SPDX-License-Identifier: Apache-2.0
"""Recipes run, print their rows in their order, and have a page with what they printed."""

import importlib.util
import pathlib
import re

import numpy as np
import pytest

from tfdp_adaptive import compat

ROOT = pathlib.Path(__file__).parent.parent
RECIPES = sorted((ROOT / 'examples' / 'recipes').glob('*.py'))
RESULTS = ROOT / 'benchmarks' / 'results' / 'recipes'
IMAGES = ('frozen_features', 'images')  # Their data are not in the package.


def load(path):
  spec = importlib.util.spec_from_file_location(f'recipe_{path.stem}', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def kept(name):
  return rows((RESULTS / f'{name}.txt').read_text(encoding='utf-8'))


def rows(printed):
  """Returns `{name of a row: its first number}` of what a recipe prints."""
  found = re.findall(
      r'^(.+?) +(?:accuracy|area under|mean absolute|hidden items)\D*(\d\.\d+)', printed, re.M)
  return {name: float(number) for name, number in found}


@pytest.mark.thorough(but=['users'])
@pytest.mark.parametrize('path', RECIPES, ids=lambda path: path.stem)
@pytest.mark.filterwarnings('ignore')
def test_recipe_prints_the_rows_of_its_page(path, capsys):
  more = {}
  if path.stem in IMAGES:
    rng = np.random.default_rng(0)
    part = lambda count: (rng.random((count, 28, 28, 1)).astype(np.float32),
                          np.arange(count) % 10)
    more = dict(data=(part(1_000), part(100)))
  if path.stem == 'text':
    if not compat.KERAS_3:
      pytest.skip('LoRA needs Keras 3')
    labels = np.arange(1_300) % 3
    texts = [f'the {name} of one number' for name in ('size', 'shape', 'mean')]
    more = dict(data=(texts, np.array(texts)[labels], labels))
  load(path).main(quick=True, **more)
  printed = capsys.readouterr().out
  assert list(rows(printed)) == list(kept(path.stem))
  assert re.search(r'^Guarantee: \(\d\.\d+, 1e-0\d\)-differential privacy', printed, re.M)


@pytest.mark.parametrize('path', RECIPES, ids=lambda path: path.stem)
def test_private_training_is_worth_it(path):
  """What is kept on the pages: private results beat those of the public records alone."""
  found = kept(path.stem)
  sign = -1 if path.stem == 'series' else 1  # Errors are small where they are good.
  public = [value for row, value in found.items() if 'public' in row]
  private = [value for row, value in found.items() if 'epsilon' in row]
  assert public and private
  assert max(sign * value for value in private) > max(sign * value for value in public)


@pytest.mark.parametrize('path', RECIPES, ids=lambda path: path.stem)
def test_recipe_took_less_than_five_minutes(path):
  printed = (RESULTS / f'{path.stem}.txt').read_text(encoding='utf-8')
  (seconds,) = re.findall(r'^Processor time: (\d+) s\.$', printed, re.M)
  assert int(seconds) < 300


def test_the_list_of_recipes_names_all():
  listed = re.findall(r'examples/recipes/(\w+)\.py', (ROOT / 'docs' / 'recipes.md').read_text())
  assert sorted(listed) == [path.stem for path in RECIPES]
