# SPDX-License-Identifier: Apache-2.0
"""Notebooks are whole, show what they computed, and run: without training, in full where slow."""

import ast
import base64
import importlib.util
import os
import pathlib
import re

from IPython.core import inputtransformer2
import nbclient
import nbformat
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import fit as fit_lib

ROOT = pathlib.Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location('run_notebooks', ROOT / 'colabs' / 'run.py')
run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)
PATHS = sorted((ROOT / 'colabs').glob('*.ipynb'))
HAS_TFF = importlib.util.find_spec('tensorflow_federated') is not None
# Each runs in the ordinary tests of one stack, so that both stay short.
HERE = [path for path in PATHS
        if path.stem.startswith(('1', '4', '7') if HAS_TFF else ('2', '3', '5', '6'))]


_LONG = ('federated.simulate(', 'tfdp.recommend(')  # Seconds of tracing.


@pytest.fixture(autouse=True)
def quiet_pictures(monkeypatch):
  import matplotlib.pyplot as plt  # pylint: disable=g-import-not-at-top
  plt.switch_backend('Agg')
  monkeypatch.setattr(plt, 'show', lambda: plt.close('all'))


@pytest.fixture
def no_training(monkeypatch):
  """Optimizers are built and nothing is trained: tracing a step takes seconds, as in `--slow`."""

  def build(model, *unused, **unused_too):
    del unused, unused_too
    model.optimizer.build(model.trainable_variables)

  def fit(model, x=None, y=None, **arguments):
    if isinstance(model, tfdp.DPModel):
      fit_lib.check_fit(model.optimizer, x, y, arguments)  # It still refuses.
    build(model)

  for kind in (tfdp.DPModel, compat.keras.Model):
    monkeypatch.setattr(kind, 'fit', fit)
  monkeypatch.setattr(compat.keras.Model, 'train_on_batch', build)


def read(path):
  notebook = nbformat.read(path, as_version=4)
  return notebook, [cell for cell in notebook.cells if cell.cell_type == 'code']


def runs_here(path):
  text = path.read_text(encoding='utf-8')
  return (HAS_TFF or 'import tensorflow_federated' not in text) and (
      compat.KERAS_3 or 'enable_lora' not in text) and (
      'import keras_hub' not in text or importlib.util.find_spec('keras_hub') is not None) and (
      'from sklearn' not in text or importlib.util.find_spec('sklearn') is not None)


def assigned(source):
  return {name.id for node in ast.parse(source).body for name in ast.walk(node)
          if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_notebook_is_whole(path):
  notebook, code = read(path)
  nbformat.validate(notebook)
  first = notebook.cells[0]
  assert first.cell_type == 'markdown' and first.source.startswith('# ')
  assert 'At the end you have' in first.source
  assert re.search(r'It takes (about|a few) ', first.source)
  assert 'https://colab.research.google.com/' in notebook.cells[1].source
  for before, cell in zip(notebook.cells, notebook.cells[1:]):
    assert cell.cell_type == 'markdown' or before.cell_type == 'markdown', cell.source
  assert notebook.cells[-1].source.startswith('## What to try')
  assert '%pip install' in code[0].source and "find_spec('tfdp_adaptive')" in code[0].source
  (parameters,) = [cell for cell in code if 'parameters' in cell.metadata.get('tags', ())]
  assert assigned(notebook.metadata['tfdp']['short']) <= assigned(parameters.source)


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_notebook_shows_what_it_computed(path):
  _, code = read(path)
  assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
  outputs = [output for cell in code for output in cell.outputs]
  assert all(output.output_type in ('stream', 'display_data') for output in outputs)
  assert not any(output.get('name') == 'stderr' for output in outputs)
  pictures = [base64.b64decode(output.data['image/png']) for output in outputs
              if 'image/png' in output.get('data', {})]
  assert pictures and max(map(len, pictures)) < 80_000
  said = ''.join(output.get('text', '') for output in outputs)
  assert said and not re.search(r'/(home|root|tmp|work|usr)/', said)


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_outputs_are_those_of_the_code_that_is_shown(path):
  notebook, code = read(path)
  assert all(len(line) <= 80 for cell in code for line in cell.source.splitlines())
  assert notebook.metadata['tfdp']['outputs_of'] == run.digest(notebook), (
      'The code changed after it was run: call `make notebooks`.')


@pytest.mark.parametrize('path', HERE, ids=lambda path: path.stem)
@pytest.mark.usefixtures('own_layers')
def test_notebook_runs_briefly(path, monkeypatch, tmp_path, no_training):
  if not runs_here(path):
    pytest.skip('needs KerasHub, which build/peers/hub has')
  monkeypatch.chdir(tmp_path)
  notebook, code = read(path)
  manager, shared = inputtransformer2.TransformerManager(), {'__name__': 'notebook'}
  for number, cell in enumerate(code):
    if any(call in cell.source for call in _LONG):
      break  # The cells that follow show its result.
    source = manager.transform_cell(cell.source)
    if 'parameters' in cell.metadata.get('tags', ()):
      source += '\n' + notebook.metadata['tfdp']['short']
    exec(compile(source, f'{path.stem}[{number}]', 'exec'), shared)  # pylint: disable=exec-used


def test_every_notebook_can_run_on_one_stack():
  assert {path.stem[0] for path in PATHS} == set('1234567')
  assert HERE and all(runs_here(path) for path in HERE if path.stem[0] != '5')  # It needs KerasHub.


@pytest.mark.slow
@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_notebook_runs_in_full_from_a_clean_kernel(path, monkeypatch):
  if not runs_here(path):
    pytest.skip('needs the other stack, or KerasHub')
  monkeypatch.setenv('PYTHONPATH', str(ROOT), prepend=os.pathsep)
  notebook, _ = read(path)
  nbclient.NotebookClient(notebook, timeout=900, kernel_name='python3').execute()


def test_the_documents_list_every_notebook():
  text = (ROOT / 'docs' / 'notebooks.md').read_text(encoding='utf-8')
  assert set(re.findall(r'^\| \[(\w+)\]\(', text, re.M)) == {path.stem for path in PATHS}
