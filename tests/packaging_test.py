# SPDX-License-Identifier: Apache-2.0
"""A wheel holds every module, those beside the library in their place, and starts `tfdp`."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile

import build_deps_test
import pytest

from tfdp_adaptive import version
from tfdp_adaptive.cli import main

ROOT = build_deps_test.ROOT


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """A wheel of a copy of the sources, so that no stale build folder gets in."""
  source = tmp_path_factory.mktemp('source')
  for name in ('setup.py', 'pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(ROOT / name, source)
  for name in build_deps_test.PACKAGES:
    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns('__pycache__'))
  subprocess.run(
      [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation',
       '--wheel-dir', source / 'dist', source], check=True, stdin=subprocess.DEVNULL)
  (path,) = (source / 'dist').glob('*.whl')
  return path


def test_wheel_holds_every_module_and_the_licence(wheel):
  names = set(zipfile.ZipFile(wheel).namelist())
  expected = {
      (f'tfdp_adaptive/{path.as_posix()}' if path.parts[0] in build_deps_test.PLACED
       else path.as_posix())
      for path in build_deps_test.modules().values()}
  assert expected == {name for name in names if name.endswith('.py')}
  assert any(name.endswith('/LICENSE') for name in names)
  data = {path.relative_to(ROOT).as_posix() for kind in build_deps_test.DATA
          for path in (ROOT / 'tfdp_adaptive').rglob(f'*.{kind}')}
  assert {'tfdp_adaptive/py.typed', *data} <= names and data


def test_wheel_starts_the_command_and_names_what_it_needs(wheel):
  archive = zipfile.ZipFile(wheel)
  texts = {name.rsplit('/', 1)[1]: archive.read(name).decode() for name in archive.namelist()
           if '.dist-info/' in name}
  assert 'tfdp = tfdp_adaptive.cli.main:main' in texts['entry_points.txt']
  needed = re.findall(r'^Requires-Dist: ([\w-]+)[^;\n]*$', texts['METADATA'], re.M)
  assert set(needed) >= {'tensorflow', 'keras', 'dp-accounting', 'numpy', 'scipy', 'tqdm'}
  # Each of them resolves: what federated training needs does not, and is no extra.
  assert set(re.findall(r'^Provides-Extra: ([\w-]+)', texts['METADATA'], re.M)) == {
      'completion', 'dev', 'flower', 'keras-hub', 'onnx', 'plots', 'ray', 'sign'}
  assert f'\nVersion: {version.__version__}\n' in texts['METADATA']
  assert 'Project-URL: Paper, https://arxiv.org/abs/2507.01129\n' in texts['METADATA']
  for minor in range(9, 14):
    assert f'Classifier: Programming Language :: Python :: 3.{minor}\n' in texts['METADATA']


def test_wheel_runs_from_where_it_is_unpacked(wheel, tmp_path):
  zipfile.ZipFile(wheel).extractall(tmp_path)
  code = ('import sys; sys.path.insert(0, sys.argv[1]); from tfdp_adaptive.cli import main; '
          'sys.exit(main.main(["--help"]))')
  done = subprocess.run([sys.executable, '-I', '-c', code, tmp_path], cwd=tmp_path, check=True,
                        stdin=subprocess.DEVNULL, capture_output=True, text=True)
  assert done.stdout.startswith('usage: tfdp')


def test_one_version_everywhere(capsys):
  assert importlib.metadata.version('tfdp-adaptive') == version.__version__
  citation = (ROOT / 'CITATION.cff').read_text(encoding='utf-8')
  assert f'\nversion: {version.__version__}\n' in citation
  with pytest.raises(SystemExit) as stopped:
    main.main(['--version'])
  assert not stopped.value.code and capsys.readouterr().out.startswith(
      f'tfdp-adaptive {version.__version__}, ')


def test_every_source_file_names_its_licence():
  folders = (*build_deps_test.PACKAGES, 'tests', 'benchmarks')
  paths = [path for folder in folders for path in (ROOT / folder).rglob('*.py')]
  assert len(paths) > 100
  for path in paths:
    head = path.read_text(encoding='utf-8').splitlines()[:2]
    assert '# SPDX-License-Identifier: Apache-2.0' in head, path


def test_pinned_lists_name_versions_and_no_addresses():
  for path, least in ((path, 50 if path.stem in ('federated', 'current') else 10)
                      for path in (ROOT / 'requirements').glob('*.lock')):
    lines = path.read_text(encoding='utf-8').splitlines()
    pins = [line for line in lines if not line.startswith('#')]
    assert len(pins) > least, path
    for line in pins:
      assert re.fullmatch(r'[\w.-]+==[\w.+!]+( ; .*)?', line), line
      assert '://' not in line


def test_a_checkout_runs_its_own_code(tmp_path):
  """Also where the installation is an editable one of another checkout."""
  for name in ('tfdp_adaptive', 'federated', 'examples'):
    shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns('__pycache__'))
  code = ('import tfdp_adaptive, importlib.util as u; '
          'print(*(u.find_spec(f"tfdp_adaptive.{name}").origin for name in '
          '("federated", "examples", "rules")), sep="\\n")')
  found = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, stdin=subprocess.DEVNULL,
                         stdout=subprocess.PIPE, text=True, check=True).stdout.split()
  assert found == [str(tmp_path / name / '__init__.py')
                   for name in ('federated', 'examples', 'tfdp_adaptive/rules')]
