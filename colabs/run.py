# SPDX-License-Identifier: Apache-2.0
"""Runs notebooks and keeps what they show; `make notebooks`.

    python colabs/run.py NOTEBOOK ...

What goes to the error stream is left out: it is of the machine, and not of the notebook.
"""

import hashlib
import pathlib
import sys

import nbclient
import nbformat


def digest(notebook) -> str:
  """Returns what identifies the code whose outputs a notebook shows."""
  code = '\n'.join(cell.source for cell in notebook.cells if cell.cell_type == 'code')
  return hashlib.sha256(code.encode()).hexdigest()[:16]


def run(path: pathlib.Path) -> None:
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(
      notebook, timeout=1800, kernel_name='python3', record_timing=False,
      resources={'metadata': {'path': str(path.parent)}}).execute()
  for cell in notebook.cells:
    if cell.cell_type == 'code':
      cell.outputs = [output for output in cell.outputs if output.get('name') != 'stderr']
  notebook.metadata['tfdp']['outputs_of'] = digest(notebook)
  notebook.metadata['language_info'] = {'name': 'python'}  # Without the version that was at hand.
  nbformat.write(notebook, path)


if __name__ == '__main__':
  for name in sys.argv[1:]:
    run(pathlib.Path(name))
    print(name)
