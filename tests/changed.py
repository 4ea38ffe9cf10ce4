# SPDX-License-Identifier: Apache-2.0
"""Runs the quick tests of what was changed: of its room, and of every room that imports it.

    python tests/changed.py PYTHON... [SINCE]

Each PYTHON is that of one stack; a room of tests runs with the first, `tests/federated` with the
last. Changes are those of the checkout since the commit SINCE (`main`, if there is such a branch
and it is not this one; else HEAD: what is not committed).
"""

import functools
import os
import pathlib
import subprocess
import sys

import build_deps_test
import layers_test

ROOT = build_deps_test.ROOT
TESTS = ROOT / 'tests'
# They look at all files, and take seconds.
ALWAYS = ('layers_test.py', 'build_deps_test.py', 'public_names_test.py', 'privacy_proof_test.py',
          'state_test.py', 'named_optimizers_stub_test.py')


@functools.lru_cache(maxsize=None)
def _below():
  """Returns {module: the modules of the library that it imports}."""
  return {module: {name for name in layers_test.imports(module) if name in layers_test.MODULES}
          for module in layers_test.MODULES}


def importers(changed):
  """The modules that are in `changed`, or import one that is, or one that does."""
  reached, new = set(), set(changed)
  while new:
    reached |= new
    new = {module for module, names in _below().items() if names & new} - reached
  return reached


def selected(paths):
  """The folders and files of `tests` for changed files, relative to it."""
  changed, tests = set(), set(ALWAYS)
  of_path = {path.as_posix(): module for module, path in layers_test.MODULES.items()}
  for path in paths:
    parts = pathlib.PurePosixPath(path).parts
    if path in of_path:
      changed.add(of_path[path])
    elif parts[0] == 'tests' and path.endswith('_test.py'):
      tests.add('/'.join(parts[1:]))
    elif parts[0] == 'tests' and path.endswith('.py'):
      tests.add(parts[1] if len(parts) > 2 else '.')
    else:  # Pages, notebooks, lists of packages, the house.
      tests.update(('documents_test.py', 'packaging_test.py'))
  for module in importers(changed):
    room = layers_test.layer(module)
    tests.update(name for name in (room, f'{room}_test.py') if room and (TESTS / name).exists())
  existing = {name for name in tests if (TESTS / name).exists()}
  if '.' in existing:
    return ['.']
  return sorted(name for name in existing if name.partition('/')[0] not in existing - {name})


def _git(*arguments):
  done = subprocess.run(['git', *arguments], cwd=ROOT, text=True, capture_output=True, check=False)
  return done.stdout.split('\n')[:-1] if not done.returncode else None


def since(commit=None):
  """Paths that differ from a commit, and those that git does not know yet."""
  if commit is None:
    mine, main = _git('rev-parse', 'HEAD'), _git('merge-base', 'HEAD', 'main')
    commit = main[0] if main and main != mine else 'HEAD'
  paths = _git('diff', '--name-only', commit)
  if paths is None:
    raise SystemExit(f'SINCE must be a commit of this repository. Received {commit!r}: give one '
                     'that `git log` lists.')
  return paths + (_git('ls-files', '--others', '--exclude-standard') or [])


def main(arguments):
  pythons = [one for one in arguments if os.access(one, os.X_OK) and not os.path.isdir(one)]
  tests = selected(since(*[one for one in arguments if one not in pythons]))
  print('Tests of what was changed:', ', '.join(tests), flush=True)
  runs = [(pythons[0], [name for name in tests if name != 'federated'])]
  if {'federated', '.'} & set(tests):
    runs.append((pythons[-1], ['federated']))
  return max(subprocess.run(
      [python, '-m', 'pytest', '-n', '2', '--dist', 'worksteal', '-q', '-p', 'no:cacheprovider',
       '--part=quick', *(str(TESTS / name) for name in names)], cwd=ROOT, check=False).returncode
             for python, names in runs)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
