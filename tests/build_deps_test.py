"""BUILD states every module's dependencies; they must be the ones it imports.

`python tests/build_deps_test.py` writes BUILD anew after an import has changed.
"""

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ('tfdp_adaptive', 'federated')
HEADER = '''"""One target per module; `tests/build_deps_test.py` compares deps with the imports."""

load("@pypi//:requirements.bzl", "requirement")
load("@rules_python//python:defs.bzl", "py_library")

licenses(["notice"])  # Apache-2.0

package(default_visibility = ["//visibility:public"])
'''
# Top-level import name -> name of the distribution.
DISTRIBUTIONS = {
    'IPython': 'ipython',
    'dp_accounting': 'dp-accounting',
    'grpc': 'grpcio',
    'keras': 'keras',
    'matplotlib': 'matplotlib',
    'numpy': 'numpy',
    'scipy': 'scipy',
    'tensorflow': 'tensorflow',
    'tensorflow_federated': 'tensorflow-federated',
    'tensorflow_privacy': 'tensorflow-privacy',
    'threadpoolctl': 'threadpoolctl',
    'tqdm': 'tqdm',
    'tree': 'dm-tree',
}


def modules():
  """{dotted import name: path relative to the root} of all library modules."""
  found = {}
  for package in PACKAGES:
    for path in sorted((ROOT / package).rglob('*.py')):
      relative = path.relative_to(ROOT)
      parts = relative.with_suffix('').parts
      if parts[0] == 'federated':
        parts = ('tfdp_adaptive',) + parts
      if parts[-1] == '__init__':
        parts = parts[:-1]
      found['.'.join(parts)] = relative
  return found


def imported_names(path):
  """Dotted names a file imports, `from a import b` being both `a` and `a.b`."""
  for node in ast.walk(ast.parse((ROOT / path).read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield (alias.name,)
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f'{path}: relative imports are not used here.'
      for alias in node.names:
        yield (node.module, f'{node.module}.{alias.name}')


def label(path):
  return path.with_suffix('').as_posix()


def dependencies(path, known):
  """(sorted labels of ours, sorted names of distributions) that a file imports."""
  ours, others = set(), set()
  for candidates in imported_names(path):
    module = next((name for name in reversed(candidates) if name in known), None)
    top = candidates[0].split('.')[0]
    if module is not None:
      ours.add(label(known[module]))
    elif top == 'tfdp_adaptive':
      raise AssertionError(f'{path} imports {candidates[-1]}, which does not exist.')
    elif top in DISTRIBUTIONS:
      others.add(DISTRIBUTIONS[top])
    elif hasattr(sys, 'stdlib_module_names'):  # Python 3.10
      assert top in sys.stdlib_module_names, f'{path} imports {top}: add it to DISTRIBUTIONS.'
  return sorted(ours - {label(path)}), sorted(others)


def target(path, known):
  ours, others = dependencies(path, known)
  lines = ['py_library(', f'    name = "{label(path)}",', f'    srcs = ["{path.as_posix()}"],']
  deps = [f'":{name}"' for name in ours] + [f'requirement("{name}")' for name in others]
  if deps:
    lines += ['    deps = ['] + [f'        {dep},' for dep in deps] + ['    ],']
  return '\n'.join(lines + [')'])


def build_file():
  known = modules()
  return '\n\n'.join([HEADER.rstrip()] + [target(path, known) for path in known.values()]) + '\n'


def declared():
  """{name: (srcs, deps)} read from BUILD, which is also valid Python."""
  targets = {}
  for node in ast.parse((ROOT / 'BUILD').read_text(encoding='utf-8')).body:
    call = getattr(node, 'value', None)
    if isinstance(call, ast.Call) and call.func.id == 'py_library':
      fields = {keyword.arg: keyword.value for keyword in call.keywords}
      deps = [ast.literal_eval(d.args[0] if isinstance(d, ast.Call) else d)
              for d in getattr(fields.get('deps'), 'elts', ())]
      targets[ast.literal_eval(fields['name'])] = (ast.literal_eval(fields['srcs']), deps)
  return targets


def test_build_has_one_target_per_module_with_the_imports_as_deps():
  known = modules()
  assert len(known) > 10  # Not vacuous.
  expected = {}
  for path in known.values():
    ours, others = dependencies(path, known)
    expected[label(path)] = ([path.as_posix()], [f':{name}' for name in ours] + others)
  fix = 'Run `python tests/build_deps_test.py`.'
  assert declared() == expected, fix


if __name__ == '__main__':
  (ROOT / 'BUILD').write_text(build_file(), encoding='utf-8')
