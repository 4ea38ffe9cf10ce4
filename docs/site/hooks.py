# SPDX-License-Identifier: Apache-2.0
"""What `mkdocs.yml` cannot say: the order of the pages, the reference, and pages that are made.

A page that is not in `ORDER` appears under "More": nobody has to know this file to add one.
"""

import ast
import importlib.util
import pathlib
import re
import shutil

import diagram
import notebooks
import recipes

from tfdp_adaptive import optimizers
from tfdp_adaptive import version

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / 'build' / 'docs-source'
ORDER = {
    'Start': ('index.md', 'choosing.md', 'comparison.md', 'glossary.md'),
    'Install': ('guides/installing.md', 'guides/from_tensorflow_privacy.md',
                'guides/from_opacus.md', 'CHANGELOG.md'),
    'Tutorials': ('notebooks.md', 'guides/training.md'),
    'Recipes': ('recipes.md',),
    'How-to': (
        'guides/troubleshooting.md', 'guides/epsilon.md', 'guides/clip_norm.md',
        'guides/batch_size.md', 'guides/users.md', 'guides/features.md', 'guides/lora.md',
        'guides/views.md', 'guides/batch_normalization.md', 'guides/generative.md',
        'guides/federated.md', 'guides/silos.md', 'guides/flower.md', 'guides/ray.md',
        'guides/devices.md', 'guides/resume.md', 'guides/tracking.md', 'callbacks.md',
        'guides/report.md', 'guides/reports_compared.md', 'guides/check_a_claim.md',
        'guides/command_line.md', 'guides/own_layer.md', 'guides/own_rule.md',
        'guides/own_mechanism.md', 'CONTRIBUTING.md'),
    'Explanation': ('promise.md', 'SECURITY.md', 'guides/clipping.md', 'layers.md',
                    'independence.md', 'pitfalls.md', 'scale.md', 'state.md', 'architecture.md'),
    'Evidence': ('evidence.md', 'claims.md', 'frontier.md', 'accounting.md', 'audit.md',
                 'faults.md'),
}
# Documents of the repository's root that are pages of the site as well.
DOCUMENTS = ('CHANGELOG.md', 'CONTRIBUTING.md', 'SECURITY.md')
# The search lists these after the pages of `docs/`.
_SELDOM = '---\nsearch:\n  boost: 0.2\n---\n\n'
# Guides come before the names of the library.
_NAMES = '---\nsearch:\n  boost: 0.4\n---\n\n'
_LINK = re.compile(r'(?<!!)\[([^\]]+)\]\(([\w./-]+)(#[\w-]+)?\)')
# Other words for the subject of a page, which the search finds as well.
SYNONYMS = {
    'choosing.md': 'which optimizer, hyperparameters, learning rate, tuning',
    'callbacks.md': 'early stopping, hyperparameter tuning, grid search, KerasTuner, '
                    'ModelCheckpoint',
    'notebooks.md': 'beginners, getting started, first steps, Colab, Jupyter',
    'recipes.md': 'examples, tutorial, sample code, cookbook',
    'recipes/images.md': 'data augmentation, CNN, convolution, EMA, MNIST, CIFAR, computer vision',
    'recipes/recommender.md': 'recommendation, collaborative filtering, ratings, matrix '
                              'factorization',
    'recipes/series.md': 'time series, forecasting, LSTM, RNN, sliding windows',
    'recipes/text.md': 'NLP, BERT, language model, strings, tokens, TextVectorization, fine-tuning',
    'recipes/table.md': 'tabular data, normalize, standardize, scale features, pandas, DataFrame, '
                        'CSV, one-hot, NaN, imputation, sklearn, scikit-learn',
    'recipes/vae.md': 'synthetic data, generative model, GAN, autoencoder',
    'guides/clip_norm.md': 'max_grad_norm, l2_norm_clip, clipping threshold, bias, calibration, '
                           'class imbalance, imbalanced classes',
    'guides/clipping.md': 'ghost clipping, per-example gradients, microbatches, GradientTape',
    'guides/devices.md': 'multiple GPUs, TPU, multi-GPU, MirroredStrategy, distributed training',
    'guides/epsilon.md': 'what is a good privacy budget, how much privacy, regulators, GDPR, '
                         'HIPAA, membership inference',
    'guides/features.md': 'transfer learning, linear probe, pretrained, fine-tuning',
    'guides/generative.md': 'VAE, GAN, diffusion, synthetic data, time series',
    'guides/lora.md': 'BERT, GPT, LLM, large language model, PEFT, adapters, fine-tuning, '
                      'freeze layers, BitFit',
    'guides/resume.md': 'checkpoint, save the model, export, serve, load, restart, preemption',
    'guides/report.md': 'model card, datasheet, audit trail, compliance',
    'guides/training.md': 'tf.data, Dataset, generator, DataLoader, input pipeline, PyDataset, '
                          'epochs, class_weight, train_on_batch, custom training loop, '
                          'GradientTape',
    'guides/troubleshooting.md': 'OOM, out of memory, gradient accumulation, DataFrame, pandas, '
                                 'class imbalance, imbalanced classes, NaN, low accuracy, '
                                 'slow, generator, DataLoader',
    'guides/users.md': 'user-level, person, patient, customer, group privacy',
    'guides/views.md': 'data augmentation, augmentation multiplicity, random crop, flip, mixup',
}
# {page: (title, names of `tfdp`)}; what is not listed is on the page `tfdp`.
PAGES = {
    'plan': ('Plan, ledger and sampling',
             ('PrivacyPlan', 'Ledger', 'sampling', 'PrivacyError', 'Caution')),
    'models': ('Models', (
        'make_private', 'DPModel', 'DPSequential', 'DPFunctional', 'DPWrapper', 'fix_model',
        'validate_model', 'explain_clipping', 'train_only', 'features', 'join')),
    'callbacks': ('Callbacks and diagnostics', ('callbacks', 'diagnostics')),
    'optimizers/common': ('Arguments of every optimizer', ('DPOptimizer',)),
    **{f'optimizers/{family}': (title, tuple(
        name for name, row in optimizers.OPTIMIZERS.items() if row.family == family))
       for family, title in optimizers.FAMILIES.items()},
}
# What classes show of themselves; their other methods are for Keras and for the library.
MEMBERS = {
    'DPModel': ('compile', 'fit', 'ledger', 'privacy_card'),
    'DPOptimizer': ('epsilon', 'ledger', 'statement', 'steps_done', 'rule_state'),
    'PrivacyPlan': ('calibrate', 'batches', 'index_batches', 'epsilon', 'delta', 'statement',
                    'to_json', 'from_json'),
    'Ledger': ('epsilon', 'delta', 'statement', 'to_json', 'from_json'),
    'MechanismSumQuery': ('build_l2_gaussian_query',),
}
# What a page of the reference says before its names.
INTRODUCTIONS = {
    'federated': ('Several engines run a round; [Federated training](../guides/federated.md) says '
                  'what each of them needs.'),
    'queries': 'Needs tensorflow_privacy, see [Installing](../guides/installing.md).',
    'rules': ('If a rule has a Keras optimizer, the page of the optimizer describes it. The other '
              'names on this page combine rules, or are the parts of a rule.'),
}
_OF_OPTIMIZERS = ('Every optimizer also takes the [arguments of `DPOptimizer`](common.md), such as '
                  '`plan`, by name.')


def exported(package):
  """`{public name: where it is defined}` of a package, or of a module, read from its source."""
  folder = ROOT.joinpath(*package.replace('tfdp_adaptive.federated', 'federated').split('.'))
  paths, is_module = {}, folder.with_suffix('.py').exists()
  source = folder.with_suffix('.py') if is_module else folder / '__init__.py'
  for node in ast.parse(source.read_text(encoding='utf-8')).body:
    if is_module and isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name[0] != '_':
      paths[node.name] = f'{package}.{node.name}'
    if isinstance(node, ast.ImportFrom):
      module = f'{package}.{node.module}' if node.level else node.module
      for alias in node.names:
        if alias.asname == alias.name:
          paths[alias.name] = f'{module}.{alias.name}'
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '_EXPORTS':
      for name, where in _lazy(package).items():
        last = where.rsplit('.', 1)[-1]
        path = (where if where.startswith('tfdp_adaptive') else
                importlib.util.resolve_name(f'.{where}', package))
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
  exports = importlib.import_module(
      package.replace('tfdp_adaptive.federated', 'federated'))._EXPORTS
  return {name: f'tfdp_adaptive.{where}' if where.startswith('federated') else where
          for name, where in exports.items()}


def _classes():
  """`{rule: Keras class}` of the named optimizers."""
  made = [(row.rule, name) for name, row in optimizers.OPTIMIZERS.items()]
  return dict(reversed(made))  # The first, where a rule has two.


def names():
  """`{page: {public name: where it is defined}}` of the whole library."""
  library = importlib.import_module('tfdp_adaptive')
  rest = exported('tfdp_adaptive')
  pages = {page: {name: rest.pop(name) for name in listed} for page, (_, listed) in PAGES.items()}
  for name in library._SUBPACKAGES:
    pages[name] = exported(f'tfdp_adaptive.{name}')
  return {'tfdp': dict(sorted(rest.items())), **pages}


def reference():
  """`{path: text}` of the pages of the reference."""
  texts, shown = {}, {}
  classes = _classes()
  for page, public in names().items():
    package = page not in PAGES and page != 'tfdp'
    prefix = f'tfdp.{page}' if package else 'tfdp'
    introduction = (_OF_OPTIMIZERS if page.startswith('optimizers/') and 'common' not in page
                    else INTRODUCTIONS.get(page, ''))
    text = f'{_NAMES}# {PAGES.get(page, [prefix])[0]}\n\n{introduction}\n\n{_when(page, public)}'
    if package:
      text += (f'::: tfdp_adaptive.{page}\n    options:\n      members: []\n'
               '      show_root_heading: false\n      show_root_toc_entry: false\n\n')
    for name, where in _with_modules(public, shown):
      if where in shown:
        text += f'`{prefix}.{name}` is [`{shown[where]}`][{where}].\n\n'
      elif page == 'rules' and name in classes:
        named = f'tfdp_adaptive.keras.named_optimizers.{classes[name]}'
        text += f'`tfdp.rules.{name}` makes the rule of [`tfdp.{classes[name]}`][{named}].\n\n'
      else:
        text += (f'::: {where}\n    options:\n      heading: {prefix}.{name}\n'
                 f'      toc_label: {name}\n')
        if name in MEMBERS:
          text += f'      members: {list(MEMBERS[name])}\n'
        text += '\n'
        shown[where] = f'{prefix}.{name}'
    texts[f'reference/{page}.md'] = text
  return texts


def _when(page, names_of_page):
  """Returns the rows of `choosing.md` that say when to use the optimizers of a page."""
  if not page.startswith('optimizers/'):
    return ''
  choosing = (ROOT / 'docs' / 'choosing.md').read_text(encoding='utf-8')
  table = choosing.partition('## Which optimizer')[2].partition('\n## ')[0]
  rows = [line for line in table.splitlines() if line.startswith('| ')
          and set(re.findall(r'`(\w+)`', line.split(' | ')[1])) & set(names_of_page)]
  up = '../' * (page.count('/') + 1)
  rows = [re.sub(r'\]\((?=[\w./#-]+\))', f']({up}', row) for row in rows]
  head = (f'When to use them, from [Which optimizer should I use?]({up}choosing.md):\n\n'
          '| your case | take | why |\n|---|---|---|\n')
  return head + '\n'.join(rows) + '\n\n' if rows else ''


def on_startup(**unused):
  """Puts the sources where all modules are in their place, before anybody looks for them."""
  del unused
  shutil.rmtree(SOURCE, ignore_errors=True)
  # A stub would hide the docstrings of what it describes.
  ignored = shutil.ignore_patterns('__pycache__', '*.pyi')
  shutil.copytree(ROOT / 'tfdp_adaptive', SOURCE / 'tfdp_adaptive', ignore=ignored)
  for name in ('federated', 'examples'):
    shutil.copytree(ROOT / name, SOURCE / 'tfdp_adaptive' / name, ignore=ignored)


def on_config(config):
  """Makes the navigation, and names the version at the foot of every page."""
  config.copyright = f'Version {version.__version__} · Apache License 2.0'
  docs = pathlib.Path(config.docs_dir)
  there = {path.relative_to(docs).as_posix() for path in docs.rglob('*.md')
           if 'site' not in path.relative_to(docs).parts}.union(DOCUMENTS)
  config.nav = [{title: [page for page in pages if page in there]}
                for title, pages in ORDER.items() if there.intersection(pages)]
  rest = sorted(there.difference(*ORDER.values()))
  if rest:
    config.nav.append({'More': rest})
  made = _made()
  for entry in config.nav:
    for title, folder in (('Tutorials', 'notebooks/'), ('Recipes', 'recipes/')):
      if title in entry:
        entry[title] += [path for path in made if path.startswith(folder)
                         and path.endswith('.md')]
  pages = {path: public for path, public in zip(reference(), names().values()) if public}
  families = [path for path in pages if '/optimizers/' in path]
  config.nav.append({'Reference': [
      {'Optimizers': families}, *(path for path in pages if path not in families)]})
  return config


def _made():
  """Returns `{path in the site: text or bytes}` of pages that are not in `docs/`."""
  return {
      **notebooks.pages(ROOT / 'colabs'),
      **recipes.pages(ROOT / 'examples' / 'recipes', ROOT / 'benchmarks' / 'results' / 'recipes'),
      **{name: _SELDOM + (ROOT / name).read_text(encoding='utf-8') for name in DOCUMENTS
         if (ROOT / name).exists()}}


def _place(path):
  """Returns the page that shows a file of the repository, or None for a folder."""
  inside = path.relative_to(ROOT).as_posix()
  if inside.startswith('docs/'):
    return inside[len('docs/'):]
  if path.suffix == '.ipynb':
    return f'notebooks/{path.stem}.md'
  if inside.startswith('examples/recipes/'):
    return f'recipes/{path.stem}.md'
  if inside in DOCUMENTS:
    return inside
  return f'files/{inside}.md' if path.is_file() else None


def _folder(source):
  """Returns the folder that the links of a page start from."""
  return ROOT if source in DOCUMENTS else (ROOT / 'docs' / source).parent


def linked_files(sources):
  """Returns `{path in the site: text}` of the files outside `docs/` that pages link to.

  Args:
    sources: `{page: Markdown}`.
  """
  files = {}
  for source, text in sources.items():
    for _, target, _ in _LINK.findall(text):
      path = (_folder(source) / target).resolve()
      if ROOT in path.parents and path.is_file():
        place = _place(path)
        if place.startswith('files/') and place not in files:
          files[place] = _file_page(path)
  return files


def _file_page(path):
  kind = {'.py': 'python', '.md': 'markdown', '.toml': 'toml'}.get(path.suffix, 'text')
  text = path.read_text(encoding='utf-8').replace('`````', '````')
  name = path.relative_to(ROOT).as_posix()
  return (f'---\nsearch:\n  exclude: true\n---\n\n# `{name}`\n\n'
          f'`````{kind}\n{text.rstrip()}\n`````\n')


def on_page_markdown(markdown, page, config, **unused):
  """Leads links to files outside `docs/` to their pages, draws charts, adds words to search."""
  del config, unused
  source = page.file.src_uri

  def led(match):
    text, target, anchor = match.groups()
    path = (_folder(source) / target).resolve()
    if ROOT not in path.parents or not path.exists():
      return match.group(0)  # A page that is made here; or wrong, which is an error.
    place = _place(path)
    if place is None:
      return f'{text} (`{path.relative_to(ROOT).as_posix()}`)'
    if place.startswith('files/'):
      anchor = ''
    return f'[{text}]({"../" * source.count("/")}{place}{anchor or ""})'

  if not source.startswith('files/'):
    markdown = diagram.draw(_LINK.sub(led, markdown))
  if source in SYNONYMS:
    heading, end, rest = markdown.partition('\n')
    markdown = f'{heading}{end}\n<p hidden>{SYNONYMS[source]}</p>\n{rest}'
  return markdown


def on_files(files, config):
  """Adds the pages that are made here."""
  from mkdocs.structure.files import File  # pylint: disable=g-import-not-at-top
  made = _made()
  sources = {file.src_uri: file.content_string for file in files.documentation_pages()}
  sources.update({path: text for path, text in made.items() if isinstance(text, str)})
  for path, content in {**reference(), **made, **linked_files(sources)}.items():
    files.append(File.generated(config, path, content=content))
  return files


def on_page_content(html, page, **unused):
  """Refuses a reference that says nothing of a name (not a constant's), or reads '>' as a quote.

  Every picture says in words what it shows, and leads to itself, since it is small on a phone.
  """
  from mkdocs import exceptions  # pylint: disable=g-import-not-at-top
  for alternative in re.findall(r'<img [^>]*?alt="([^"]*)"', html):
    if len(alternative.split()) < 5:
      raise exceptions.PluginError(
          f'{page.file.src_uri}: {alternative!r} does not say what its picture shows.')
  html = re.sub(r'(<img [^>]*src="([^"]+)"[^>]*>)', r'<a href="\2">\1</a>', html)
  del unused
  if page.file.src_uri in ORDER['Explanation'] + ORDER['Evidence']:
    page.meta['search'] = {'boost': 0.5}  # The search lists them after guides.
  if page.file.src_uri.startswith('reference/'):
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
