# SPDX-License-Identifier: Apache-2.0
"""What the documents show is run: the notebook, and the examples of the README."""

import importlib.util
import os
import pathlib
import re

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize('path', sorted((ROOT / 'colabs').glob('*.ipynb')), ids=lambda p: p.stem)
def test_notebook_runs_and_is_saved_without_output(path, monkeypatch):
  monkeypatch.setenv('PYTHONPATH', str(ROOT), prepend=os.pathsep)
  notebook = nbformat.read(path, as_version=4)
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  assert code and not any(cell.outputs or cell.execution_count for cell in code)
  nbclient.NotebookClient(
      notebook, timeout=600, kernel_name='python3',
      resources={'metadata': {'path': ROOT}}).execute()
  printed = ''.join(output.get('text', '') for cell in code for output in cell.outputs)
  assert 'Guarantee: (' in printed
  for accuracy in re.findall(r'accuracy[a-z ]* (0\.\d+)', printed):
    assert float(accuracy) > .8


def test_readme_examples_run(capsys):
  text = (ROOT / 'README.md').read_text(encoding='utf-8')
  blocks = re.findall(r'```python\n(.*?)```', text, re.S)
  assert len(blocks) > 1
  for block in blocks:
    if 'tensorflow_federated' in block and importlib.util.find_spec('tensorflow_federated') is None:
      continue
    exec(compile(block, 'README.md', 'exec'), {'__name__': 'readme'})  # pylint: disable=exec-used
  assert '-differential privacy' in capsys.readouterr().out


def test_readme_names_what_exists():
  text = (ROOT / 'README.md').read_text(encoding='utf-8')
  targets = set(re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(encoding='utf-8'), re.M))
  for target in re.findall(r'(?:^|`)make ([a-z-]+)', text, re.M):
    assert target in targets, f'README.md names make {target}, which does not exist.'
  for path in re.findall(r'\]\(([\w./-]+)\)', text):
    assert (ROOT / path).exists(), f'README.md links to {path}, which does not exist.'
