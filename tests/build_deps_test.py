# SPDX-License-Identifier: Apache-2.0
"""BUILD states what every package depends on; it must be what its files import.

A directory of `tfdp_adaptive` is one target, and so is each module beside them.
`python tests/build_deps_test.py` rewrites BUILD after an import has changed.
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
PLACED = ('federated', 'examples')  # Packages of `tfdp_adaptive` that lie beside it.
PACKAGES = ('tfdp_adaptive', *PLACED)
FEDERATED, EXAMPLES = PLACED
TFF = 'tensorflow-federated'
INIT = 'package'  # The target of `tfdp_adaptive/__init__.py` and what it imports at once.
INIT_MODULES = ('__init__', 'optimizers', 'version')
DATA = ('css', 'json')  # Files that a package reads.
HEADER = '''"""One target per package; `tests/build_deps_test.py` checks or writes their deps."""

load("@pypi//:requirements.bzl", "requirement")
load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

licenses(["notice"])  # Apache-2.0

package(default_visibility = ["//visibility:public"])

# TensorFlow Federated is on the lock file of Python 3.11 alone, see MODULE.bazel.
FEDERATED_ONLY = select({
    "@rules_python//python/config_settings:is_python_3.11": [],
    "//conditions:default": ["@platforms//:incompatible"],
})

FEDERATED_IF_IT_IS_THERE = select({
    "@rules_python//python/config_settings:is_python_3.11": [":federated"],
    "//conditions:default": [],
})

# `federated/` is imported as `tfdp_adaptive.federated`, and so is `examples/`.
[genrule(
    name = "tfdp_adaptive_" + path.replace("/", "_"),
    srcs = [path],
    outs = ["tfdp_adaptive/" + path],
    cmd = "cp $< $@",
) for path in glob(["examples/*.py", "federated/*.py"])]
'''
FOOTER = '''py_binary(
    name = "tfdp",
    srcs = ["tfdp_adaptive/cli/main.py"],
    main = "tfdp_adaptive/cli/main.py",
    deps = [":cli"],
)

py_library(
    name = "testing",
    testonly = True,
    srcs = glob(
        ["tests/**/*.py"],
        exclude = ["tests/**/*_test.py"],
    ),
    data = glob([
        "*",
        "benchmarks/**",
        "colabs/**",
        "examples/**",
        "federated/**",
        "requirements/**",
        "tests/**",
        "tfdp_adaptive/**",
    ]),
    imports = ["tests"],
    deps = [
        ":cli",
        ":tfdp_adaptive",
        requirement("hypothesis"),
        requirement("nbclient"),
        requirement("nbformat"),
        requirement("pytest"),
    ],
)

[py_test(
    name = path[:-len(".py")],
    size = "large",
    srcs = [
        path,
        "tests/run_one.py",
    ],
    args = [path],
    main = "tests/run_one.py",
    deps = [":testing"],
) for path in glob(
    ["tests/**/*_test.py"],
    exclude = ["tests/federated/**"],
)]

[py_test(
    name = path[:-len(".py")],
    size = "large",
    srcs = [
        path,
        "tests/run_one.py",
    ],
    args = [path],
    main = "tests/run_one.py",
    target_compatible_with = FEDERATED_ONLY,
    deps = [
        ":federated",
        ":testing",
    ],
) for path in glob(["tests/federated/*_test.py"])]
'''
# Top-level import name -> name of the distribution.
OPTIONAL = ('flwr', 'model_signing', 'ray')  # Extras: no lock of a stack has them.
DISTRIBUTIONS = {
    'h5py': 'tensorflow',  # Keras reads its files with it.
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


def dotted(path):
  """The name a file of the library is imported by, in a package of ours or beside them."""
  parts = path.with_suffix('').parts
  if parts[0] in PLACED:
    parts = ('tfdp_adaptive',) + parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def modules():
  """{dotted import name: path relative to the root} of all library modules."""
  paths = {}
  for package in PACKAGES:
    for path in sorted((ROOT / package).rglob('*.py')):
      if {'flower_app', 'recipes'} & set(path.parts):  # Programs, and a project of its own.
        continue
      relative = path.relative_to(ROOT)
      paths[dotted(relative)] = relative
  return paths


def _is_for_type_checkers(node):
  return isinstance(node, ast.If) and ast.unparse(node.test) in (
      'TYPE_CHECKING', 'typing.TYPE_CHECKING')


def imported_names(path):
  """Dotted names a file imports, `from a import b` being both `a` and `a.b`.

  Relative imports are written out. What an `__init__.py` shows to type checkers
  alone is not imported.
  """
  path = pathlib.Path(path)
  package = dotted(path) if path.name == '__init__.py' else dotted(path).rpartition('.')[0]
  nodes = [ast.parse((ROOT / path).read_text(encoding='utf-8'))]
  while nodes:
    node = nodes.pop()
    if path.name == '__init__.py' and _is_for_type_checkers(node):
      nodes.extend(node.orelse)
      continue
    nodes.extend(ast.iter_child_nodes(node))
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield (alias.name,)
    elif isinstance(node, ast.ImportFrom):
      module = node.module
      if node.level:
        above = package.split('.')[:len(package.split('.')) - node.level + 1]
        assert above, f'{path}: {ast.unparse(node)} leaves the package.'
        module = '.'.join(above + ([node.module] if node.module else []))
      for alias in node.names:
        yield (module, f'{module}.{alias.name}')


def target_of(path):
  """The target a file belongs to: its package, or itself beside the packages."""
  parts = path.with_suffix('').parts
  if parts[0] in PLACED:
    return parts[0]
  return INIT if parts[1] in INIT_MODULES else parts[1]


def dependencies(path, known):
  """(sorted targets of ours, sorted names of distributions) that a file imports."""
  ours, others = set(), set()
  for candidates in imported_names(path):
    module = next((name for name in reversed(candidates) if name in known), None)
    top = candidates[0].split('.')[0]
    if module == 'tfdp_adaptive':
      ours.add('tfdp_adaptive')  # Whoever imports it by name may use all of it.
    elif module is not None:
      ours.add(target_of(known[module]))
    elif top == 'tfdp_adaptive':
      raise AssertionError(f'{path} imports {candidates[-1]}, which does not exist.')
    elif top in DISTRIBUTIONS:
      others.add(DISTRIBUTIONS[top])
    elif top not in OPTIONAL and hasattr(sys, 'stdlib_module_names'):  # Python 3.10
      assert top in sys.stdlib_module_names, f'{path} imports {top}: add it to DISTRIBUTIONS.'
  return sorted(ours), sorted(others)


def libraries():
  """{target: (its files, sorted targets of ours, sorted distributions)} by the imports."""
  known = modules()
  files, deps = {}, {}
  for path in known.values():
    name = target_of(path)
    files.setdefault(name, []).append(path.as_posix())
    ours, others = deps.setdefault(name, (set(), set()))
    mine, theirs = dependencies(path, known)
    ours.update({INIT, *mine})
    others.update(theirs)
  # All that `import tfdp_adaptive` may load on first use.
  files['tfdp_adaptive'] = []
  deps['tfdp_adaptive'] = (set(files) - {'tfdp_adaptive', 'cli', *PLACED}, set())
  return {name: (sorted(files[name]), sorted(deps[name][0] - {name}), sorted(deps[name][1]))
          for name in sorted(files)}


def target(name, files, ours, others):
  lines = ['py_library(', f'    name = "{name}",']
  if name in PLACED:
    lines.append(f'    srcs = ["tfdp_adaptive/" + path for path in glob(["{name}/*.py"])],')
    lines += ['    target_compatible_with = FEDERATED_ONLY,'] * (name == FEDERATED)
  elif name == INIT:
    lines += ['    srcs = ['] + [f'        "{path}",' for path in files] + [
        '    ],', '    data = ["tfdp_adaptive/py.typed"],']
  elif len(files) > 1:
    lines.append(f'    srcs = glob(["tfdp_adaptive/{name}/**/*.py"]),')
    data = sorted(path.relative_to(ROOT).as_posix()
                  for kind in DATA for path in (ROOT / 'tfdp_adaptive' / name).rglob(f'*.{kind}'))
    if data:
      lines += ['    data = ['] + [f'        "{path}",' for path in data] + ['    ],']
  elif files:
    lines.append(f'    srcs = ["{files[0]}"],')
  optional = FEDERATED in ours
  deps = [f'":{dep}"' for dep in ours if dep != FEDERATED] + [
      f'requirement("{dep}")' for dep in others]
  if deps:
    lines += ['    deps = ['] + [f'        {dep},' for dep in deps] + [
        '    ] + FEDERATED_IF_IT_IS_THERE,' if optional else '    ],']
  return '\n'.join(lines + [')'])


def build_file():
  parts = [HEADER.rstrip(), *(target(name, *rest) for name, rest in libraries().items()), FOOTER]
  return '\n\n'.join(parts)


def _glob(include, exclude=()):
  def matches(patterns):
    return {path for pattern in patterns for path in ROOT.glob(re.sub(r'\*\*$', '**/*', pattern))}

  return sorted(path.relative_to(ROOT).as_posix() for path in matches(include) - matches(exclude)
                if path.is_file() and '__pycache__' not in path.parts)


def _select(choices):
  """The choice of Python 3.11, which has all packages."""
  return next(value for key, value in choices.items() if key.endswith('is_python_3.11'))


def evaluated():
  """{rule: {target: its attributes}} of BUILD, which is also valid Python."""
  rules = {name: {} for name in ('py_library', 'py_binary', 'py_test', 'genrule')}

  def adder(rule):
    def add(name, **attributes):
      assert not any(name in targets for targets in rules.values()), f'two targets {name}'
      rules[rule][name] = attributes
    return add

  names = {name: adder(name) for name in rules}
  names.update(load=lambda *args: None, licenses=lambda *args: None, package=lambda **kwargs: None,
               glob=_glob, select=_select, requirement='requirement {}'.format)
  exec((ROOT / 'BUILD').read_text(encoding='utf-8'), names)  # pylint: disable=exec-used
  return rules


def test_build_is_short():
  assert len((ROOT / 'BUILD').read_text(encoding='utf-8').splitlines()) < 700


def test_every_package_has_one_target_with_its_imports_as_deps():
  expected = libraries()
  assert len(expected) > 10  # Not vacuous.
  declared = evaluated()['py_library']
  fix = 'Run `python tests/build_deps_test.py`.'
  assert set(declared) == {*expected, 'testing'}, fix
  for name, (files, ours, others) in expected.items():
    placed = [f'tfdp_adaptive/{path}' if name in PLACED else path for path in files]
    assert sorted(declared[name].get('srcs', ())) == placed, fix
    assert sorted(declared[name].get('deps', ())) == sorted(
        [f':{dep}' for dep in ours] + [f'requirement {dep}' for dep in others]), f'{name}: {fix}'


def test_targets_do_not_depend_on_one_another_in_circles():
  left = {name: set(ours) for name, (_, ours, _) in libraries().items()}
  while left:
    ready = {name for name, ours in left.items() if not ours & set(left)}
    assert ready, f'Circular imports among {left}.'
    left = {name: ours for name, ours in left.items() if name not in ready}


def test_every_test_file_is_a_target_and_all_labels_exist():
  rules = evaluated()
  tests = {path.relative_to(ROOT).with_suffix('').as_posix()
           for path in (ROOT / 'tests').rglob('*_test.py')}
  assert set(rules['py_test']) == tests
  made = {out for rule in rules['genrule'].values() for out in rule['outs']}
  names = {name for targets in rules.values() for name in targets}
  for targets in rules.values():
    for name, attributes in targets.items():
      for source in (*attributes.get('srcs', ()), *attributes.get('data', ())):
        assert source in made or (ROOT / source).is_file(), f'{name} names {source}.'
      for dep in attributes.get('deps', ()):
        assert dep.startswith('requirement ') or dep[1:] in names, f'{name} names {dep}.'


def test_what_is_required_is_in_the_lock_files_that_the_module_names():
  module = (ROOT / 'MODULE.bazel').read_text(encoding='utf-8')
  parsed = re.findall(
      r'python_version = "([\d.]+)",\s*requirements_lock = "//:(requirements/[\w.-]+)"', module)
  assert dict(parsed)['3.11'] == 'requirements/federated.lock'
  for version, lock in parsed:
    text = (ROOT / lock).read_text(encoding='utf-8')
    needed = {
        dep.split()[1] for name, rule in evaluated()['py_library'].items()
        if version == '3.11' or name != FEDERATED
        for dep in rule.get('deps', ()) if dep.startswith('requirement ')}
    assert (TFF in needed) == (version == '3.11')
    missing = {name for name in needed if not re.search(rf'^{name}==', text, re.M)}
    assert not missing, f'{lock} lacks {missing}.'


def test_relative_imports_are_written_out(tmp_path, monkeypatch):
  folder = tmp_path / 'federated' / 'inner'
  folder.mkdir(parents=True)
  monkeypatch.setattr(sys.modules[__name__], 'ROOT', tmp_path)
  text = 'from . import users\nfrom ..privacy import plan\nfrom .. import compat\n'
  (folder.parent / 'rounds.py').write_text(text)
  (folder / '__init__.py').write_text(
      'from . import users\nimport typing\nif typing.TYPE_CHECKING:\n  from .. import rounds\n')
  names = {name for candidates in imported_names('federated/rounds.py') for name in candidates}
  assert names == {
      'tfdp_adaptive.federated', 'tfdp_adaptive.federated.users', 'tfdp_adaptive.privacy',
      'tfdp_adaptive.privacy.plan', 'tfdp_adaptive', 'tfdp_adaptive.compat'}
  names = {
      name for candidates in imported_names('federated/inner/__init__.py') for name in candidates}
  assert names == {
      'tfdp_adaptive.federated.inner', 'tfdp_adaptive.federated.inner.users', 'typing'}


if __name__ == '__main__':
  (ROOT / 'BUILD').write_text(build_file(), encoding='utf-8')
