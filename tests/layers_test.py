# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, and only one file knows which Keras and TFP there are."""

import ast
import pathlib
import re

import build_deps_test
import pytest

# The layers from the lowest up: a component (a package, or a file beside them) may import
# components of lower layers only, and none of its own.
LAYERS = (
    ('version', 'errors', 'checks', 'compat', 'optimizers', 'runfolder', 'trees'),
    ('terms', 'weights'),
    ('contract', 'gate'),
    ('geometry',),
    ('mechanisms', 'rules'),
    ('noise', 'accounting', 'clipping'),
    ('batches', 'independence', 'layers'),
    ('privacy',),
    ('privatizer', 'report'),
    ('private_rule',),
    ('keras', 'queries'),
    ('advice', 'audit', 'estimates', 'frozen_features', 'tuning'),
    ('federated', 'heads'),
    ('examples',),
    ('cli',),
)
LAYER_OF = {component: level for level, components in enumerate(LAYERS) for component in components}
NUMPY_ONLY = ('mechanisms', 'accounting')
ONLY_IN = {  # A library -> the modules that may import it.
    'keras': ('tfdp_adaptive.compat',),
    'tensorflow_privacy': ('tfdp_adaptive.compat',),
    'model_signing': ('tfdp_adaptive.report.signing',),
    'flwr': ('tfdp_adaptive.federated.flower',),
    'ray': ('tfdp_adaptive.federated.ray_engine',),
    'tensorflow_federated': ('tfdp_adaptive.federated.tff_process',),
}
VERSIONS = ('KERAS_3', '__version__', 'VERSION', 'version_info', 'python_version_tuple')
SAY_VERSIONS = {  # They print or compare versions.
    'tfdp_adaptive.examples.report', 'tfdp_adaptive.privacy.card',
    'tfdp_adaptive', 'tfdp_adaptive.version', 'tfdp_adaptive.batches.workers',
    'tfdp_adaptive.cli.doctor',
}
MODULES = build_deps_test.modules()


def layer(module):
  parts = module.split('.')
  return parts[1] if len(parts) > 1 else ''


def imports(module):
  for candidates in build_deps_test.imported_names(MODULES[module]):
    ours = [name for name in candidates if name in MODULES]
    yield ours[-1] if ours else candidates[-1]


PAGE = build_deps_test.ROOT / 'docs' / 'architecture.md'
BEGIN, END = '<!-- drawn from the imports: python tests/layers_test.py -->', '<!-- end -->'


def picture():
  """The components from top to bottom, as Mermaid: a box a component, an arrow an import.

  Left out are the files of the lowest layer, which everybody uses, and arrows that follow
  from others.
  """
  below = {component: set() for component in LAYER_OF}
  for module in MODULES:
    mine = layer(module)
    below.setdefault(mine, set()).update(
        layer(name) for name in imports(module)
        if mine and name.startswith('tfdp_adaptive') and layer(name) not in ('', mine))
  components = [component for level in reversed(LAYERS[1:]) for component in level]

  def reach(component):
    return below[component].union(*(reach(other) for other in below[component]))

  lines = ['```mermaid', 'flowchart TD']
  for level in reversed(LAYERS[1:]):
    lines += [f'  {component}' for component in level]
  for component in components:
    direct = {other for other in below[component] if other in components}
    implied = set().union(*(reach(other) for other in direct)) if direct else set()
    lines += [f'  {component} --> {other}' for other in sorted(direct - implied)]
  return '\n'.join(lines + ['```'])


def test_the_page_shows_the_imports_as_they_are():
  text = PAGE.read_text(encoding='utf-8')
  drawn = text[text.index(BEGIN) + len(BEGIN):text.index(END)].strip()
  assert drawn == picture(), 'Run `python tests/layers_test.py`.'


def test_every_component_has_a_layer():
  components = {layer(module) for module in MODULES} - {''}
  assert len(components) > 10 and not components - set(LAYER_OF)


@pytest.mark.parametrize('module', sorted(MODULES))
def test_imports_point_down(module):
  mine = layer(module)
  for name in imports(module):
    other = layer(name)
    if name.startswith('tfdp_adaptive') and mine and other not in ('', mine):
      assert LAYER_OF[other] < LAYER_OF[mine], f'{module} must not import {name}.'


def circles(below):
  """Those of `{file: the files it imports}` that import themselves in the end, with the next."""
  def reach(module):
    found, left = set(), set(below[module])
    while left:
      found |= left
      left = {name for one in left for name in below[one]} - found
    return found

  reached = {module: reach(module) for module in below}
  return {module: sorted(name for name in below[module] if module in reached[name] | {name})
          for module in below if module in reached[module]}


def test_no_files_import_one_another():
  """At any depth, in functions and for type checkers too."""
  below = {module: {name for name in imports(module) if name in MODULES} for module in MODULES}
  assert len(below) > 200 and sum(map(len, below.values())) > 1000
  assert circles(below) == {}


def test_circles_are_seen():
  assert not circles({'a': {'b', 'c'}, 'b': {'c'}, 'c': set()})
  assert circles({'a': {'b'}, 'b': {'c', 'd'}, 'c': {'b'}, 'd': set()}) == {
      'b': ['c'], 'c': ['b']}
  assert circles({'a': {'a'}}) == {'a': ['a']}


def lazy_imports(module):
  """Modules of ours that a file names in a string, to import them later."""
  text = (build_deps_test.ROOT / MODULES[module]).read_text(encoding='utf-8')
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      name = node.value.rstrip('.')
      if name in MODULES and '.' in name:
        yield name


@pytest.mark.parametrize('module', sorted(MODULES))
def test_lazy_imports_point_down(module):
  mine = layer(module)
  up = {name for name in lazy_imports(module)
        if mine and layer(name) != mine and LAYER_OF[layer(name)] >= LAYER_OF[mine]}
  assert not up


@pytest.mark.parametrize('module', sorted(MODULES))
def test_libraries_stay_where_they_belong(module):
  for name in imports(module):
    top = name.split('.')[0]
    if layer(module) in NUMPY_ONLY:
      assert top not in ('tensorflow', 'keras'), f'{module} is NumPy only; it imports {name}.'
    if top in ONLY_IN:
      assert module.startswith(ONLY_IN[top]), f'{module} must not import {name}.'


def version_questions(tree):
  """What a file asks of the versions of Keras, TensorFlow or Python, as source."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and node.attr in VERSIONS:
      yield ast.unparse(node)
    elif isinstance(node, ast.Constant) and node.value in VERSIONS:
      yield repr(node.value)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ('hasattr', 'getattr'):
      asks = len(node.args) == 3 or ast.unparse(node.func) == 'hasattr'  # It may be missing.
      if asks and re.match(r'(compat\.)?(tf|keras)\b', ast.unparse(node.args[0])):
        yield ast.unparse(node)


@pytest.mark.parametrize('module', sorted(
    name for name in set(MODULES) - SAY_VERSIONS if layer(name) != 'compat'))
def test_only_compat_asks_for_versions(module):
  """A branch on the stack belongs there, behind a name that says what it does."""
  text = (build_deps_test.ROOT / MODULES[module]).read_text(encoding='utf-8')
  assert not list(version_questions(ast.parse(text))), f'{module}: move it to compat.'


def test_questions_for_versions_are_seen():
  asked = ('if compat.KERAS_3: pass', 'tf.__version__', "getattr(tf, 'x', 0)", 'sys.version_info',
           "hasattr(keras.layers.Layer, 'quantize')", "getattr(keras, '__version__')")
  for text in asked:
    assert list(version_questions(ast.parse(text))), text
  assert not list(version_questions(ast.parse('f(layer.call); getattr(layer, "units", None)')))


@pytest.mark.parametrize(
    'module', sorted(m for m in MODULES if layer(m) in build_deps_test.PLACED))
def test_packages_beside_find_their_own_files_by_their_place(module):
  """They are installed under another name than their folder's, which editors cannot know."""
  text = (build_deps_test.ROOT / MODULES[module]).read_text(encoding='utf-8')
  assert f'tfdp_adaptive.{layer(module)}' not in [
      name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)
      for name in (node.module, '.'.join((node.module or '').split('.')[:2]))]


def test_test_modules_have_names_of_their_own():
  """pytest imports them by file name alone."""
  names = [path.name for path in pathlib.Path(__file__).parent.rglob('*_test.py')]
  assert len(names) > 40 and len(names) == len(set(names)), sorted(
      name for name in set(names) if names.count(name) > 1)


if __name__ == '__main__':
  page = PAGE.read_text(encoding='utf-8')
  start, stop = page.index(BEGIN) + len(BEGIN), page.index(END)
  PAGE.write_text(f'{page[:start]}\n{picture()}\n{page[stop:]}', encoding='utf-8')
