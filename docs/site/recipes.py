# SPDX-License-Identifier: Apache-2.0
"""Recipes as pages: the program's docstring, the program, and what it printed."""

import ast
import pathlib
import re

_RESULTS = 'accuracy|area under|mean absolute|hidden items'  # What a result begins with.


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
  return (
      f'# {title.rstrip(".")}\n{text}\n\n## What it prints\n\n'
      f'{_table(result.read_text(encoding="utf-8"))}\n\n'
      'Private numbers differ from run to run, because the noise is drawn anew.\n\n'
      f'## The program\n\n```python title="{path.name}"\n{code.rstrip()}\n```\n')


def _table(printed):
  """Returns what a recipe prints, lines of a name and its results, as a table and the rest."""
  rows, rest = ['| model | result |', '|---|---|'], ['']
  for line in printed.splitlines():
    found = re.fullmatch(rf'(.+?) +((?:{_RESULTS}) .*)', line)
    if found is None:
      rest.append(line)
    else:
      rows.append(f'| {found[1]} | {found[2]} |')
  return '\n'.join(rows + rest)
