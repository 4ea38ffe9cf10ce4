# SPDX-License-Identifier: Apache-2.0
"""Both distributions install into empty environments of every Python here, and run the README."""

import functools
import glob
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import sys
import threading

import build_deps_test
import pytest

ROOT = build_deps_test.ROOT
VERSIONS = ('3.9', '3.10', '3.11', '3.12', '3.13')


def _python(version):
  """The first interpreter of a version that can make environments, or None."""
  installed = glob.glob(str(pathlib.Path.home() / f'.pyenv/versions/{version}.*/bin/python'))
  for python in (*installed, f'python{version}'):
    try:
      done = subprocess.run(
          [python, '-c', 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])'],
          capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
      continue
    if done.stdout.strip() == version:
      return python
  return None


def _run(*command, **kwargs):
  done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **kwargs)
  assert not done.returncode, f'{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}'
  return done.stdout


@pytest.fixture(scope='module')
def distributions(tmp_path_factory):
  """`{kind: path}`, built in a copy of the sources; the wheel of what the other one holds."""
  source, out = tmp_path_factory.mktemp('source'), tmp_path_factory.mktemp('dist')
  for name in ('setup.py', 'pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(ROOT / name, source)
  for name in build_deps_test.PACKAGES:
    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns('__pycache__'))
  _run(sys.executable, '-c', 'import sys; from setuptools import build_meta; '
       'build_meta.build_sdist(sys.argv[1])', str(out), cwd=source)
  (sdist,) = out.glob('*.tar.gz')
  _run(sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation',
       '--wheel-dir', str(out), str(sdist))
  (wheel,) = out.glob('*.whl')
  return {'sdist': sdist, 'wheel': wheel}


@pytest.fixture
def address(distributions):
  """Where the wheel is served from, on this machine."""

  class Quiet(http.server.SimpleHTTPRequestHandler):

    def log_message(self, *unused):
      pass

  folder = distributions['wheel'].parent
  server = http.server.ThreadingHTTPServer(
      ('127.0.0.1', 0), functools.partial(Quiet, directory=str(folder)))
  threading.Thread(target=server.serve_forever, daemon=True).start()
  yield f'http://127.0.0.1:{server.server_address[1]}/{distributions["wheel"].name}'
  server.shutdown()
  server.server_close()


def _environment(version, folder):
  python = _python(version)
  if python is None:
    pytest.skip(f'no Python {version} is installed here')
  _run(python, '-m', 'venv', str(folder))
  return str(folder / 'bin' / 'python')


def _reads_the_readme(python, folder):
  blocks = re.findall(r'^```python\n(.*?)^```$', (ROOT / 'README.md').read_text(encoding='utf-8'),
                      re.S | re.M)
  assert blocks
  (folder / 'readme.py').write_text('\n'.join(blocks), encoding='utf-8')
  assert '-differential privacy' in _run(python, '-I', 'readme.py', cwd=folder)
  assert _run(str(pathlib.Path(python).parent / 'tfdp'), '--version').startswith('tfdp-adaptive ')


@pytest.mark.slow
@pytest.mark.parametrize('version', VERSIONS)
@pytest.mark.parametrize('kind', ['wheel', 'sdist'])
def test_an_empty_environment_runs_the_readme(kind, version, distributions, tmp_path):
  python = _environment(version, tmp_path / 'environment')
  _run(python, '-m', 'pip', 'install', '--quiet', str(distributions[kind]))
  _reads_the_readme(python, tmp_path)
  shutil.rmtree(tmp_path / 'environment')  # 2 GB.


def _first_cells():
  """Returns the different first cells of the notebooks: one of them needs KerasHub."""
  return sorted({''.join(next(cell for cell in json.loads(path.read_text())['cells']
                              if cell['cell_type'] == 'code')['source'])
                 for path in (ROOT / 'colabs').glob('*.ipynb')})


@pytest.mark.slow
@pytest.mark.parametrize('cell', _first_cells(), ids=lambda cell: cell.split()[-1])
def test_the_first_cell_of_a_notebook_installs_from_an_address(cell, address, tmp_path):
  """On a bare Python 3.12, without a clone, as on Colab."""
  python = _environment('3.12', tmp_path / 'environment')
  cell, changed = re.subn(r"^WHEEL = '.*'$", f"WHEEL = '{address}'", cell, flags=re.M)
  assert changed == 1
  _run(python, '-m', 'pip', 'install', '--quiet', 'ipython')
  (tmp_path / 'cell.ipy').write_text(cell, encoding='utf-8')
  _run(python, '-m', 'IPython', 'cell.ipy', cwd=tmp_path)
  _run(python, '-I', '-c', 'import matplotlib', cwd=tmp_path)
  _reads_the_readme(python, tmp_path)
  shutil.rmtree(tmp_path / 'environment')
