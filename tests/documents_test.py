# SPDX-License-Identifier: Apache-2.0
"""What the documents show is run: their examples, their commands, and the notebooks."""

import argparse
import ast
import importlib.util
import pathlib
import re
import shlex
import sys

import pytest

from tfdp_adaptive import compat
from tfdp_adaptive.cli import main

ROOT = pathlib.Path(__file__).parent.parent
HAS_TFF = importlib.util.find_spec('tensorflow_federated') is not None
HAS_FLOWER = importlib.util.find_spec('flwr') is not None
PAGES = sorted([ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')])
BLOCK = re.compile(r'^```(\w*)[^\n]*\n(.*?)^```$', re.S | re.M)
sys.path.append(str(ROOT / 'docs' / 'site'))  # Appended: `hooks` is a common name.


def blocks(path, language):
  return [text for kind, text in BLOCK.findall(path.read_text(encoding='utf-8'))
          if kind == language]


def name(path):
  return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    'path', [path for path in PAGES if blocks(path, 'python')], ids=name)
@pytest.mark.usefixtures('own_layers')
def test_examples_run_one_after_the_other(path, monkeypatch, tmp_path, capsys):
  monkeypatch.chdir(tmp_path)
  shared = {'__name__': 'page'}
  for block in blocks(path, 'python'):
    if 'tensorflow_federated' in block and not HAS_TFF or 'flwr' in block and not HAS_FLOWER:
      continue
    if block.startswith('# Keras 3') and not compat.KERAS_3:
      continue
    # One namespace: a page's later examples go on with the earlier ones.
    exec(compile(block, name(path), 'exec'), shared)  # pylint: disable=exec-used
  if path.name == 'README.md':
    assert '-differential privacy' in capsys.readouterr().out


@pytest.mark.parametrize(
    'remarks', sorted((ROOT / 'benchmarks' / 'remarks').glob('*.txt')), ids=lambda path: path.stem)
def test_tables_of_measurements_begin_with_their_remarks(remarks):
  """What is written about a table by hand outlives the next run, and is not of an older one."""
  table = ROOT / 'benchmarks' / 'results' / remarks.name
  assert table.read_text(encoding='utf-8').startswith(remarks.read_text(encoding='utf-8'))


def test_every_block_says_what_it_is():
  for path in PAGES:
    kinds = {kind for kind, _ in BLOCK.findall(path.read_text(encoding='utf-8'))}
    assert kinds <= {'python', 'sh', 'text', 'mermaid'}, f'{name(path)}: {kinds}'


def commands():
  for path in PAGES:
    for block in blocks(path, 'sh'):
      for line in block.replace('\\\n', ' ').splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0].rsplit('/', 1)[-1] == 'tfdp':
          yield name(path), words[1:]


def test_commands_that_are_shown_are_understood(monkeypatch):
  def fail(self, message):
    raise AssertionError(message)

  monkeypatch.setattr(argparse.ArgumentParser, 'error', fail)
  assert len(list(commands())) > 5
  for page, words in commands():
    try:
      main.parser(words).parse_args(words)
    except SystemExit as stopped:  # --help and --version.
      assert not stopped.code, f'{page}: tfdp {shlex.join(words)}'
    except AssertionError as error:
      raise AssertionError(f'{page}: tfdp {shlex.join(words)}: {error}') from error


def test_documents_name_what_exists():
  targets = set(re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(encoding='utf-8'), re.M))
  for path in [*PAGES, ROOT / 'CONTRIBUTING.md', ROOT / 'SECURITY.md']:
    text = path.read_text(encoding='utf-8')
    for target in re.findall(r'(?:^|`)make ([a-z-]+)', text, re.M):
      assert target in targets, f'{name(path)} names make {target}, which does not exist.'
    for link in re.findall(r'\]\(([\w./-]+)\)', text):
      if not link.startswith('reference/') and '/reference/' not in link:  # Made by `make docs`.
        assert (path.parent / link).exists(), f'{name(path)} links to {link}: it does not exist.'


def test_reference_holds_every_public_name_with_its_docstring():
  import hooks  # pylint: disable=g-import-not-at-top
  pages = hooks.names()
  assert {**pages['tfdp'], **pages['optimizers']}.keys() == _exports() and len(pages) > 8
  texts = hooks.reference()
  for page, public in pages.items():
    assert public, f'{page} has no public names.'
    for public_name, where in public.items():
      assert (f'::: {where}\n' in texts[f'reference/{page}.md']
              or f'][{where}].' in texts[f'reference/{page}.md']), public_name
      assert _documented(where), f'{where} has no docstring: its reference would be empty.'


def _exports():
  import tfdp_adaptive as tfdp  # pylint: disable=g-import-not-at-top
  return tfdp._EXPORTS.keys()


def _documented(where):
  """Whether there is a docstring in the source, a comment for a constant, or a call's own."""
  module, _, last = where.rpartition('.')
  module = module.replace('tfdp_adaptive.federated', 'federated')
  path = ROOT / module.replace('.', '/')
  for source in (path / last / '__init__.py', path / f'{last}.py'):
    if source.exists() and not path.with_suffix('.py').exists():
      return bool(ast.get_docstring(ast.parse(source.read_text(encoding='utf-8'))))
  source = path.with_suffix('.py') if path.with_suffix('.py').exists() else path / '__init__.py'
  for node in ast.parse(source.read_text(encoding='utf-8')).body:
    if getattr(node, 'name', None) == last:
      return bool(ast.get_docstring(node))
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and last in ast.unparse(node).split('=')[0]:
      return True  # Named optimizers: `public_names_test` reads what the call makes.
  return False


def test_a_page_that_nobody_listed_is_found(tmp_path):
  import hooks  # pylint: disable=g-import-not-at-top
  docs = tmp_path / 'docs'
  docs.mkdir()
  for page in ('index.md', 'audit.md', 'new.md'):
    (docs / page).write_text('# A page')
  navigation = hooks.on_config(argparse.Namespace(docs_dir=str(docs), nav=None)).nav
  assert navigation[0] == {'Start': ['index.md']} and {'More': ['new.md']} in navigation
  assert all(pages for entry in navigation for pages in entry.values())


def test_links_out_of_the_pages_are_named_instead():
  import hooks  # pylint: disable=g-import-not-at-top
  config = argparse.Namespace(docs_dir=str(ROOT / 'docs'))
  page = argparse.Namespace(file=argparse.Namespace(src_uri='guides/report.md'))
  text = 'See [security](../../SECURITY.md#x), [words](../glossary.md), [gone](../../GONE.md).'
  assert hooks.on_page_markdown(text, page, config) == (
      'See security (`SECURITY.md`), [words](../glossary.md), [gone](../../GONE.md).')


def test_a_chart_that_would_be_drawn_wrongly_is_refused():
  import diagram  # pylint: disable=g-import-not-at-top
  page = lambda chart: f'# A page\n\n```mermaid\n{chart}\n```\n'
  for chart in ('flowchart LR\n  a', 'flowchart TD', 'flowchart TD\n  a\n  a --> b',
                'flowchart TD\n  a\n  b\n  a -.-> b'):
    with pytest.raises(ValueError, match='one --> other'):
      diagram.draw(page(chart))
  assert diagram.draw('# A page\n\n```python\nx\n```\n') == '# A page\n\n```python\nx\n```\n'
