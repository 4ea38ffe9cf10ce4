# SPDX-License-Identifier: Apache-2.0
"""Recipes as pages: the program's docstring, the program, and what it printed."""

import ast
import pathlib
import re


def pages(folder, results):
  """Returns `{path in the site: text}`, a page for each program of `folder`.

  Args:
    folder: Programs whose docstrings begin with a title.
    results: Folder of `NAME.txt`, which `make recipes` writes.
  """
  return {f'recipes/{path.stem}.md': _page(path, pathlib.Path(results) / f'{path.stem}.txt')
          for path in sorted(pathlib.Path(folder).glob('*.py'))}


def _page(path, result):
  source = path.read_text(encoding='utf-8')
  title, _, text = ast.get_docstring(ast.parse(source)).partition('\n')
  code = re.sub(r'\A.*?""".*?"""\n+', '', source, count=1, flags=re.DOTALL)
  printed = result.read_text(encoding='utf-8').rstrip()
  return (
      f'# {title.rstrip(".")}\n{text}\n\n## What it prints\n\n```text\n{printed}\n```\n\n'
      'Private numbers differ from run to run, because the noise is drawn anew.\n\n'
      f'## The program\n\n```python title="{path.name}"\n{code.rstrip()}\n```\n')
