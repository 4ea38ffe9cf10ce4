# SPDX-License-Identifier: Apache-2.0
"""What `mkdocs.yml` cannot say: the order of the pages, the reference, and drawings.

A page that is not in `ORDER` appears under "More": nobody has to know this file to add one.
"""

import ast
import importlib.util
import pathlib
import re
import shutil

import diagram

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / 'build' / 'docs-source'
ORDER = {
    'Start': (
        'index.md', 'choosing.md', 'claims.md', 'frontier.md', 'notebooks.md', 'glossary.md'),
    'Guides': (
        'guides/installing.md', 'guides/training.md', 'guides/clipping.md', 'guides/users.md',
        'guides/federated.md', 'guides/command_line.md',
        'guides/from_tensorflow_privacy.md', 'guides/from_opacus.md', 'guides/report.md',
        'guides/resume.md', 'guides/devices.md', 'guides/workers.md', 'guides/flower.md',
        'guides/lora.md', 'guides/own_rule.md', 'guides/own_layer.md', 'guides/own_mechanism.md',
        'callbacks.md'),
    'Trust': ('pitfalls.md', 'independence.md', 'accounting.md', 'audit.md', 'faults.md',
              'scale.md', 'architecture.md'),
}
_LINK = re.compile(r'(?<!!)\[([^\]]+)\]\(([\w./-]+)(?:#[\w-]+)?\)')
# What a page of the reference says before its names.
INTRODUCTIONS = {
    'optimizers': 'One Keras class per rule. All take their arguments by name.',
    'federated': 'Needs TensorFlow Federated, see the README under "Installing".',
    'queries': 'Needs tensorflow_privacy, see the README under "Installing".',
}


def exported(package):
  """`{public name: where it is defined}` of a package, read from its `__init__.py`."""
  folder = ROOT.joinpath('federated' if package.endswith('.federated')
                         else package.replace('.', '/'))
  paths = {}
  for node in ast.parse((folder / '__init__.py').read_text(encoding='utf-8')).body:
    if isinstance(node, ast.ImportFrom):
      module = f'{package}.{node.module}' if node.level else node.module
      for alias in node.names:
        if alias.asname == alias.name:
          paths[alias.name] = f'{module}.{alias.name}'
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '_EXPORTS':
      for name, where in _lazy(package).items():
        last = where.rsplit('.', 1)[-1]
        path = importlib.util.resolve_name(f'.{where}', package)
        paths[name] = path + ('' if last == name else f'.{name}')
  return paths


def _with_modules(public, shown):
  """The same as pairs; after a module that was not shown, what it imports to be public in it."""
  for name, where in public.items():
    path = ROOT.joinpath(*where.split('.')).with_suffix('.py')
    expand = path.exists() and where not in shown
    yield name, where
    if expand:
      for node in ast.parse(path.read_text(encoding='utf-8')).body:
        if isinstance(node, ast.ImportFrom):
          for alias in node.names:
            if alias.asname == alias.name:
              yield f'{name}.{alias.name}', f'{node.module}.{alias.name}'


def _lazy(package):
  return importlib.import_module(package.replace('tfdp_adaptive.federated', 'federated'))._EXPORTS


def names():
  """`{page: {public name: where it is defined}}` of the whole library."""
  library = importlib.import_module('tfdp_adaptive')
  pages = {'tfdp': {}, 'optimizers': {}}
  for name, where in sorted(exported('tfdp_adaptive').items()):
    named = library._EXPORTS[name].endswith('named_optimizers')
    pages['optimizers' if named else 'tfdp'][name] = where
  for name in library._SUBPACKAGES:
    pages[name] = exported(f'tfdp_adaptive.{name}')
  return pages


def reference():
  """`{path: text}` of the pages of the reference."""
  texts, shown = {}, {}
  for page, public in names().items():
    top = page in ('tfdp', 'optimizers')
    title = page if top else f'tfdp.{page}'
    prefix = 'tfdp' if top else title
    text = f'# {title}\n\n{INTRODUCTIONS.get(page, "")}\n\n'
    if not top:
      text += (f'::: tfdp_adaptive.{page}\n    options:\n      members: []\n'
               '      show_root_heading: false\n      show_root_toc_entry: false\n\n')
    for name, where in _with_modules(public, shown):
      if where in shown:
        text += f'`{prefix}.{name}` is [`{shown[where]}`][{where}].\n\n'
      else:
        text += (f'::: {where}\n    options:\n      heading: {prefix}.{name}\n'
                 f'      toc_label: {name}\n\n')
        shown[where] = f'{prefix}.{name}'
    texts[f'reference/{page}.md'] = text
  return texts


def on_startup(**unused):
  """Puts the sources where all modules are in their place, before anybody looks for them."""
  del unused
  shutil.rmtree(SOURCE, ignore_errors=True)
  # A stub would hide the docstrings of what it describes.
  ignored = shutil.ignore_patterns('__pycache__', '*.pyi')
  shutil.copytree(ROOT / 'tfdp_adaptive', SOURCE / 'tfdp_adaptive', ignore=ignored)
  shutil.copytree(ROOT / 'federated', SOURCE / 'tfdp_adaptive' / 'federated', ignore=ignored)


def on_config(config):
  """Makes the navigation."""
  docs = pathlib.Path(config.docs_dir)
  there = {path.relative_to(docs).as_posix() for path in docs.rglob('*.md')
           if 'site' not in path.relative_to(docs).parts}
  config.nav = [{title: [page for page in pages if page in there]}
                for title, pages in ORDER.items() if there.intersection(pages)]
  rest = sorted(there.difference(*ORDER.values()))
  if rest:
    config.nav.append({'More': rest})
  config.nav.append({'Reference': list(reference())})
  return config


def on_page_markdown(markdown, page, config, **unused):
  """Names files outside `docs/`, to which only pages in the repository can link; draws charts."""
  del unused
  folder = pathlib.Path(config.docs_dir)
  here = (folder / page.file.src_uri).parent

  def named(match):
    text, target = match.groups()
    path = (here / target).resolve()
    if folder.resolve() in path.parents or not path.exists():
      return match.group(0)  # Of the site; or wrong, which is an error.
    path = path.relative_to(ROOT).as_posix()
    return text if path.rsplit('/', 1)[-1] in text else f'{text} (`{path}`)'

  return diagram.draw(_LINK.sub(named, markdown))


def on_files(files, config):
  """Adds the pages that are made here."""
  from mkdocs.structure.files import File  # pylint: disable=g-import-not-at-top
  for path, text in reference().items():
    files.append(File.generated(config, path, content=text))
  return files


def on_page_content(html, page, **unused):
  """Refuses a reference that says nothing of a name (not a constant's), or reads '>' as a quote."""
  del unused
  if page.file.src_uri.startswith('reference/'):
    from mkdocs import exceptions  # pylint: disable=g-import-not-at-top
    for entry in html.split('<h2 ')[1:]:
      if '<p>' not in entry and 'doc-symbol-attribute' not in entry:
        name = re.search('id="([^"]+)"', entry).group(1)
        raise exceptions.PluginError(f'{page.file.src_uri}: nothing is said about {name}.')
    _, quote, rest = html.partition('<blockquote>')
    if quote:
      rest = ' '.join(re.sub('<[^>]+>', ' ', rest).split())
      raise exceptions.PluginError(
          f'{page.file.src_uri}: a description begins with ">", before {rest[:60]!r}.')
  return html


def on_post_page(output, page, **unused):
  """Refuses what a reader's browser would have to fetch from a network."""
  del unused
  from mkdocs import exceptions  # pylint: disable=g-import-not-at-top
  fetched = re.search(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:\w+:)?//[^"]*', output)
  if fetched:
    raise exceptions.PluginError(f'{page.file.src_uri} needs a network: {fetched.group(0)!r}.')
  return output
