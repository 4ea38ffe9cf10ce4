# SPDX-License-Identifier: Apache-2.0
"""Recipes as pages: the program's docstring, the program, and what it printed, with a picture.

`python docs/site/recipes.py FILE` runs a recipe, and prints its processor time.
"""

import ast
import html
import pathlib
import re
import resource
import runpy
import sys

_RESULTS = 'accuracy|area under|mean absolute|hidden items'  # What a result begins with.
_WIDTH, _BAR, _ROW = 600, 300, 26  # Sizes of a picture, its longest bar and a row.


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
  printed = result.read_text(encoding='utf-8')
  title, _, text = ast.get_docstring(ast.parse(source)).partition('\n')
  code = re.sub(r'\A.*?""".*?"""\n+', '', source, count=1, flags=re.DOTALL)
  return (
      f'# {title.rstrip(".")}\n{text}\n\n## What it prints\n\n'
      f'{_picture(printed)}\n\n{_table(printed)}\n\n'
      'Private numbers differ from run to run, because the noise is drawn anew.\n\n'
      f'## The program\n\n```python title="{path.name}"\n{code.rstrip()}\n```\n')


def _picture(printed):
  """Returns bars of the first number of every row, in the colors of the page: SVG in one line."""
  rows = re.findall(rf'^(.+?) +((?:{_RESULTS})[^\d\n]*)(\d\.\d+)', printed, re.M)
  most = max(float(number) for _, _, number in rows)
  parts = []
  for i, (name, _, number) in enumerate(rows):
    color = ('var(--md-primary-fg-color)' if 'epsilon' in name
             else 'var(--md-default-fg-color--lighter)')
    middle, length = _ROW * i + _ROW / 2, _BAR * float(number) / most
    parts.append(
        f'<text x="235" y="{middle + 4:g}" text-anchor="end">{html.escape(name)}</text>'
        f'<rect x="245" y="{middle - 8:g}" width="{length:.0f}" height="16" style="fill:{color}"/>'
        f'<text x="{250 + length:.0f}" y="{middle + 4:g}">{number}</text>')
  words = html.escape(rows[0][1].strip())
  said = html.escape('; '.join(f'{name}: {number}' for name, _, number in rows))
  return (f'<figure><svg viewBox="0 0 {_WIDTH} {_ROW * len(rows)}" role="img" '
          f'aria-label="{words} of {said}" style="width:{_WIDTH}px;max-width:100%;'
          'font-size:13px;fill:var(--md-default-fg-color)">'
          f'{"".join(parts)}</svg><figcaption>{words.capitalize()}</figcaption></figure>')


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


if __name__ == '__main__':
  runpy.run_path(sys.argv[1], run_name='__main__')
  used = resource.getrusage(resource.RUSAGE_SELF)
  print(f'Processor time: {used.ru_utime + used.ru_stime:.0f} s.')
