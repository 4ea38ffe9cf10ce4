# SPDX-License-Identifier: Apache-2.0
"""Writes docs/pitfalls.md from the tests of misuse: `python tests/pitfalls.py`.

A test that is marked `@pytest.mark.pitfall('what goes wrong', severity=..., stops=...)` is a
line of the page. The sources are read, not run.
"""

import ast
import pathlib
from typing import Iterator, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / 'docs' / 'pitfalls.md'
SEVERITIES = {
    'critical': 'the guarantee would silently be false or meaningless',
    'high': 'privacy loss exceeds the guarantee, exact data leaks, or one record decides a result',
    'medium': 'no privacy is lost, but time is, or the user is misled'}
AREAS = {
    'keras': 'Models and steps', 'clipping': 'Clipping', 'rules': 'Optimizers',
    'queries': 'Queries', 'noise': 'Noise', 'mechanisms': 'Mechanisms',
    'independence': 'Models that mix examples', 'batches': 'Batches',
    'privacy': 'Plans and ledgers', 'accounting': 'Accounting', 'cli': 'Command line',
    'faults': 'Interrupted runs',
    'estimates': 'Estimates before training', 'federated': 'Federated users'}
TEXT = '''# What can go wrong

This page lists {count} mistakes, how severe each one is, and how the library prevents it. The last
column links the test that makes the mistake. `python tests/pitfalls.py` writes this page from the
tests.

{severities}

[SECURITY.md](../SECURITY.md) lists what the library cannot prevent, such as a dishonest curator,
Python code that hides its use of data, and people with several records.
'''


class Pitfall(NamedTuple):
  area: str
  severity: str
  what: str
  stops: str
  test: str  # 'file::name'


def collect(root: pathlib.Path = ROOT) -> Iterator[Pitfall]:
  """All marked tests, in the order of files and lines."""
  for path in sorted((root / 'tests').glob('**/*_test.py')):
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      for mark in getattr(node, 'decorator_list', ()):
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == 'pytest.mark.pitfall':
          what, = (ast.literal_eval(argument) for argument in mark.args)
          more = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
          yield Pitfall(AREAS[path.parent.name], more['severity'], what, more['stops'],
                        f'{path.relative_to(root)}::{node.name}')


def page(pitfalls) -> str:
  pitfalls = list(pitfalls)
  parts = [TEXT.format(count=len(pitfalls), severities='\n'.join(
      f'* {name}: {meaning}.' for name, meaning in SEVERITIES.items()))]
  for area in AREAS.values():
    rows = sorted((one for one in pitfalls if one.area == area),
                  key=lambda one: list(SEVERITIES).index(one.severity))
    if rows:
      parts.append(f'\n## {area}\n\n| What goes wrong | Severity | What stops it | Test |\n'
                   '|---|---|---|---|\n' + ''.join(
                       f'| {one.what} | {one.severity} | {one.stops} | '
                       f'[{pathlib.Path(one.test).name}](../{one.test.split("::")[0]}) |\n'
                       for one in rows))
  return ''.join(parts)


if __name__ == '__main__':
  PAGE.write_text(page(collect()), encoding='utf-8')
