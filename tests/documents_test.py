# SPDX-License-Identifier: Apache-2.0
"""What the documents show is run: their examples, their commands, and the notebooks."""

import argparse
import ast
import importlib.util
import pathlib
import re
import shlex
import sys

import dp_accounting
import pytest

from tfdp_adaptive import compat
from tfdp_adaptive.cli import main

ROOT = pathlib.Path(__file__).parent.parent
HAS_TFF = importlib.util.find_spec('tensorflow_federated') is not None
HAS_FLOWER = importlib.util.find_spec('flwr') is not None
HAS_MLFLOW = importlib.util.find_spec('mlflow') is not None
# The lock file has an older one for Python 3.9 (docs/guides/installing.md).
HAS_SEARCH = hasattr(dp_accounting, 'TruncatedSubsampledGaussianDpEvent')
PAGES = sorted([ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')])
BLOCK = re.compile(r'^```(\w*)[^\n]*\n(.*?)^```$', re.S | re.M)
sys.path.append(str(ROOT / 'docs' / 'site'))  # Appended: `hooks` is a common name.


def blocks(path, language):
  return [text for kind, text in BLOCK.findall(path.read_text(encoding='utf-8'))
          if kind == language]


def name(path):
  return path.relative_to(ROOT).as_posix()


def test_headings_of_errors_are_texts_of_the_library():
  """A search for an error finds the page: every part of a heading is in a text of the code."""
  page = (ROOT / 'docs' / 'guides' / 'troubleshooting.md').read_text(encoding='utf-8')
  errors = page.partition('\n## Errors\n')[2].partition('\n## ')[0]
  parts = [part for heading in re.findall('^### (.*)$', errors, re.M)
           for part in heading.split('; ')]
  assert len(parts) > 12
  said = '\n'.join(
      node.value.replace('`', '') for path in (ROOT / 'tfdp_adaptive').rglob('*.py')
      for node in ast.walk(ast.parse(path.read_text(encoding='utf-8')))
      if isinstance(node, ast.Constant) and isinstance(node.value, str))
  assert [part for part in parts if part not in said] == []


@pytest.mark.thorough(but=['README.md'])
@pytest.mark.parametrize(
    'path', [path for path in PAGES if blocks(path, 'python')], ids=name)
@pytest.mark.usefixtures('own_layers')
def test_examples_run_one_after_the_other(path, monkeypatch, tmp_path, capsys):
  monkeypatch.chdir(tmp_path)
  shared = {'__name__': 'page'}
  for block in blocks(path, 'python'):
    if 'tensorflow_federated' in block and not HAS_TFF or (
        'flwr' in block and not HAS_FLOWER or 'import mlflow' in block and not HAS_MLFLOW) or (
            'privacy.Search(' in block and not HAS_SEARCH):
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


def test_the_comparison_has_the_numbers_of_the_measurements():
  """The least ratio to the plain gradient that each library shows for a model."""
  cases = {'tfdp_adaptive': r'isotropic', 'TensorFlow Privacy': r'DPModel(?: fast)?',
           'Opacus': r'Opacus (?:hooks|ghost)', 'jax_privacy': r'jax_privacy(?: one by one)?'}
  text = (ROOT / 'benchmarks' / 'results' / 'clipping_speed.txt').read_text(encoding='utf-8')
  models = re.split(r'^(\w+) +first s .*$', text, flags=re.M)
  page = (ROOT / 'docs' / 'comparison.md').read_text(encoding='utf-8')
  table = page.partition('| model |')[2].partition('\n\n')[0]
  shown = [[cell.strip() for cell in line.split('|')[1:-1]] for line in table.splitlines()[2:]]
  assert [row[0] for row in shown] == models[1::2] and len(shown) > 4
  for (model, *cells), measured in zip(shown, models[2::2]):
    measured = measured.partition('  TF 2.21')[2]  # The current stack, and the others after it.
    for cell, case in zip(cells, cases.values()):
      ratios = re.findall(rf'^    {case} +[\d.]+ +[\d.]+ +([\d.]+) ', measured, re.M)
      assert cell == min(ratios, key=float, default='-'), (model, case)


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
    for link, anchor in re.findall(r'\]\(([\w./-]*)(?:#([\w-]+))?\)', text):
      if not link.startswith('reference/') and '/reference/' not in link:  # Made by `make docs`.
        target = path.parent / link if link else path
        assert target.exists(), f'{name(path)} links to {link}: it does not exist.'
        assert not anchor or anchor in _anchors(target), f'{name(path)} links to {link}#{anchor}.'


def _anchors(path):
  """What headings are called in a link, as repositories' sites and MkDocs do."""
  headings = re.findall(r'^#+ (.*)$', path.read_text(encoding='utf-8'), re.M)
  return {re.sub(r'[^\w -]', '', heading.lower()).replace(' ', '-') for heading in headings}


def test_reference_holds_every_public_name_with_its_docstring():
  import hooks  # pylint: disable=g-import-not-at-top
  pages = hooks.names()
  listed = [name for page in ('tfdp', *hooks.PAGES) for name in pages[page]]
  assert len(listed) == len(set(listed)) and set(listed) == _exports() and len(pages) > 8
  texts = hooks.reference()
  for page, public in pages.items():
    for public_name, where in public.items():
      text = texts[f'reference/{page}.md']
      assert (f'::: {where}\n' in text or f'][{where}].' in text
              or f'`tfdp.rules.{public_name}` makes the rule of [' in text), public_name
      assert _documented(where), f'{where} has no docstring: its reference would be empty.'


def test_names_that_pages_mention_exist():
  import hooks  # pylint: disable=g-import-not-at-top
  known = {'tfdp'}
  for page, public in hooks.names().items():
    prefix = 'tfdp' if page in hooks.PAGES or page == 'tfdp' else f'tfdp.{page}'
    known.add(prefix)
    for public_name, where in public.items():
      known.add(f'{prefix}.{public_name}')
      source = ROOT.joinpath(*where.replace('tfdp_adaptive.federated', 'federated').split('.'))
      if source.with_suffix('.py').exists():  # A module.
        known.update(f'{prefix}.{public_name}.{member}' for member in hooks.exported(where))
  programs = [*(ROOT / 'examples' / 'recipes').glob('*.py'), *(ROOT / 'colabs').glob('*.ipynb')]
  for path in [*PAGES, ROOT / 'CONTRIBUTING.md', ROOT / 'SECURITY.md', *programs]:
    for found in set(re.findall(r'\btfdp(?:\.[A-Za-z_]\w*)+', path.read_text(encoding='utf-8'))):
      owner = found.rpartition('.')[0]
      of_class = owner in known and owner.rpartition('.')[2][0].isupper()
      assert found in known or of_class, f'{name(path)} mentions {found}, which does not exist.'


def test_every_optimizer_is_on_the_page_of_its_family():
  import hooks  # pylint: disable=g-import-not-at-top

  import tfdp_adaptive as tfdp  # pylint: disable=g-import-not-at-top
  from tfdp_adaptive import optimizers  # pylint: disable=g-import-not-at-top
  named = set(optimizers.OPTIMIZERS)
  families = [names for page, (_, names) in hooks.PAGES.items()
              if page.startswith('optimizers/') and page != 'optimizers/common']
  assert {name for names in families for name in names} == named
  rules = {getattr(tfdp, name).factory.__name__ for name in named}
  assert hooks._classes().keys() == rules


def test_choosing_marks_what_is_experimental():
  from tfdp_adaptive import optimizers  # pylint: disable=g-import-not-at-top
  page = (ROOT / 'docs' / 'choosing.md').read_text(encoding='utf-8')
  marked = set()
  for names in re.findall(r'((?:`\w+`, )*`\w+`) \((?:both )?experimental\)', page):
    last = names.split(', ')[-1:]
    marked.update(name.strip('`') for name in (
        names.split(', ') if f'{names} (both' in page else last))
  shown = set(re.findall(r'`(\w+)`', page)) & set(optimizers.OPTIMIZERS)
  assert marked == {name for name in shown if optimizers.OPTIMIZERS[name].missing}


def test_methods_that_the_reference_shows_exist():
  import hooks  # pylint: disable=g-import-not-at-top

  import tfdp_adaptive as tfdp  # pylint: disable=g-import-not-at-top
  for kind, members in hooks.MEMBERS.items():
    for member in members:
      found = getattr(tfdp, kind, None)
      assert found is None or hasattr(found, member) or member in found.__dataclass_fields__, member


def _exports():
  import tfdp_adaptive as tfdp  # pylint: disable=g-import-not-at-top
  return set(tfdp._EXPORTS)


def _documented(where):
  """Whether there is a docstring in the source, a comment for a constant, or a call's own."""
  module, _, last = where.rpartition('.')
  if module == 'tfdp_adaptive.keras.named_optimizers':
    return True  # Made from a table: `public_names_test` reads their docstrings.
  module = module.replace('tfdp_adaptive.federated', 'federated')
  path = ROOT / module.replace('.', '/')
  for source in (path / last / '__init__.py', path / f'{last}.py'):
    if source.exists() and not path.with_suffix('.py').exists():
      return bool(ast.get_docstring(ast.parse(source.read_text(encoding='utf-8'))))
  source = path.with_suffix('.py') if path.with_suffix('.py').exists() else path / '__init__.py'
  for node in ast.parse(source.read_text(encoding='utf-8')).body:
    if getattr(node, 'name', None) == last:
      return bool(ast.get_docstring(node))
    if isinstance(node, ast.ImportFrom) and last in [alias.name for alias in node.names]:
      return _documented(f'{node.module}.{last}')
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and last in ast.unparse(node).split('=')[0]:
      return True
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


@pytest.mark.parametrize('source, link, led', [
    ('guides/lora.md', '../../SECURITY.md#x', '../SECURITY.md#x'),
    ('guides/lora.md', '../glossary.md', '../glossary.md'),
    ('guides/lora.md', '../../GONE.md', '../../GONE.md'),
    ('guides/lora.md', '../../colabs/1_first_private_model.ipynb',
     '../notebooks/1_first_private_model.md'),
    ('recipes.md', '../examples/recipes/table.py', 'recipes/table.md'),
    ('audit.md', '../tests/layers_test.py#L1', 'files/tests/layers_test.py.md'),
    ('SECURITY.md', 'docs/guides/report.md#x', 'guides/report.md#x'),
    ('CONTRIBUTING.md', 'tfdp_adaptive/contract.py', 'files/tfdp_adaptive/contract.py.md')])
def test_links_out_of_the_pages_lead_to_a_page(source, link, led):
  import hooks  # pylint: disable=g-import-not-at-top
  page = argparse.Namespace(file=argparse.Namespace(src_uri=source))
  assert hooks.on_page_markdown(f'See [it]({link}).', page, None).startswith(f'See [it]({led}).')
  files = hooks.linked_files({source: f'See [it]({link}).'})
  assert list(files) == [led] * led.startswith('files/')


def test_a_link_to_a_folder_names_it():
  import hooks  # pylint: disable=g-import-not-at-top
  page = argparse.Namespace(file=argparse.Namespace(src_uri='index.md'))
  assert hooks.on_page_markdown('See [them](../colabs).', page, None) == 'See them (`colabs`).'


def test_pages_with_other_words_for_the_search_exist():
  import hooks  # pylint: disable=g-import-not-at-top
  made = hooks._made()
  for path in hooks.SYNONYMS:
    assert path in made or (ROOT / 'docs' / path).exists(), path


def test_terms_of_the_search_have_no_digits():
  """lunr names a node by its letters and the numbers of the next nodes: with digits as letters, two
  nodes had one name, and searches for "user" or "threshold" ended with an error."""
  separator = re.search(r"separator: '(.+)'", (ROOT / 'mkdocs.yml').read_text(encoding='utf-8'))[1]
  terms = re.split(separator, 'noise of 0.25 for tfdp.DPAdam and WSConv2D')
  assert terms == ['noise', 'of', 'for', 'tfdp', 'DPAdam', 'and', 'WSConv', 'D']


def test_code_on_pages_has_at_most_80_columns():
  for path in [*PAGES, ROOT / 'CONTRIBUTING.md', ROOT / 'SECURITY.md',
               *(ROOT / 'examples' / 'recipes').glob('*.py')]:
    text = path.read_text(encoding='utf-8')
    text = text if path.suffix == '.py' else '\n'.join(block for _, block in BLOCK.findall(text))
    for line in text.splitlines():
      assert len(line) <= 80, f'{name(path)}: {line}'


def test_recipes_have_a_picture_whose_bars_are_as_long_as_their_numbers():
  import recipes  # pylint: disable=g-import-not-at-top
  results = ROOT / 'benchmarks' / 'results' / 'recipes'
  pages = recipes.pages(ROOT / 'examples' / 'recipes', results)
  assert len(pages) == len(list(results.glob('*.txt'))) > 9
  for path, text in pages.items():
    bars = re.findall(r'width="(\d+)" height="16" style="fill:[^"]+"/><text [^>]+>(\d\.\d+)<', text)
    assert len(bars) > 2, path
    lengths, numbers = zip(*((int(length), float(number)) for length, number in bars))
    most = numbers.index(max(numbers))
    for length, number in zip(lengths, numbers):
      assert abs(length / lengths[most] - number / numbers[most]) < 0.01, path


def test_notebooks_are_pages_with_what_they_showed():
  import notebooks  # pylint: disable=g-import-not-at-top
  files = notebooks.pages(ROOT / 'colabs')
  pages = {path: text for path, text in files.items() if path.endswith('.md')}
  assert len(pages) == len(list((ROOT / 'colabs').glob('*.ipynb'))) > 6
  for path, text in pages.items():
    assert text.startswith('# ') and text.index('.md-button') < text.index('```python'), path
    opened = path.replace('.md', '.ipynb')
    assert files[opened] == (ROOT / 'colabs' / pathlib.Path(opened).name).read_bytes()
    pictures = re.findall(r'^!\[(.+)\]\((\w+\.png)\)$', text, re.M)
    assert pictures
    assert all(files[f'notebooks/{name}'].startswith(b'\x89PNG') for _, name in pictures)
    assert '```text\n' in text


def test_notebooks_open_in_colab_once_there_is_an_address(monkeypatch):
  import notebooks  # pylint: disable=g-import-not-at-top
  path = 'notebooks/1_first_private_model.md'
  assert 'Colab](https' not in notebooks.pages(ROOT / 'colabs')[path].partition('## Install')[0]
  monkeypatch.setattr(notebooks.version, 'REPOSITORY', 'https://example.org/somebody/it')
  assert ('[Open in Colab](https://colab.research.google.com/github/somebody/it/blob/main/colabs/'
          '1_first_private_model.ipynb)') in notebooks.pages(ROOT / 'colabs')[path]


def test_a_chart_that_would_be_drawn_wrongly_is_refused():
  import diagram  # pylint: disable=g-import-not-at-top
  page = lambda chart: f'# A page\n\n```mermaid\n{chart}\n```\n'
  for chart in ('flowchart LR\n  a', 'flowchart TD', 'flowchart TD\n  a\n  a --> b',
                'flowchart TD\n  a\n  b\n  a -.-> b'):
    with pytest.raises(ValueError, match='one --> other'):
      diagram.draw(page(chart))
  assert diagram.draw('# A page\n\n```python\nx\n```\n') == '# A page\n\n```python\nx\n```\n'
