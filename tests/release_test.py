# SPDX-License-Identifier: Apache-2.0
"""The release script, and what is there for the day of publication."""

import datetime
import importlib.util
import json
import os
import re
import runpy

import build_deps_test
import pytest
import setuptools

from tfdp_adaptive import version
from tfdp_adaptive.cli import main

ROOT = build_deps_test.ROOT
SPEC = importlib.util.spec_from_file_location('release', ROOT / '.ci' / 'release.py')
release = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release)

ADDRESS = 'https://example.org/somebody/tfdp_adaptive'
DOCUMENTS = [path for pattern in ('*.md', '*.cff', '*.toml', '.github/**/*.yml', '.github/**/*.md',
                                  'docs/**/*.md', 'Dockerfile', 'tfdp_adaptive/*.py')
             for path in ROOT.glob(pattern)]


def text_of(path):
  return (ROOT / path).read_text(encoding='utf-8')


def test_the_address_is_in_one_constant_and_every_file_that_names_it_is_known():
  assert len(DOCUMENTS) > 50
  named = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS
           if version.REPOSITORY in path.read_text(encoding='utf-8')}
  assert named == set(release.PLACES)


def test_the_address_is_written_everywhere():
  for path in release.PLACES:
    text = text_of(path) if version.REPOSITORY == release.UNKNOWN else release.UNKNOWN
    changed = release.with_address(text, ADDRESS)
    assert ADDRESS in changed and release.UNKNOWN not in changed and '<!-- colab' not in changed
  line = f'# Repository = "{release.UNKNOWN}"'
  assert release.with_address(line, ADDRESS) == f'Repository = "{ADDRESS}"'
  link = release.with_address('See <!-- colab 1_first -->.', ADDRESS + '/')
  assert '/github/somebody/tfdp_adaptive/blob/main/colabs/1_first.ipynb)' in link
  with pytest.raises(SystemExit, match='must be https'):
    release.with_address('', 'somewhere')


def test_every_notebook_gets_a_link_to_itself():
  assert len(release.NOTEBOOKS) == 7
  address = ADDRESS if version.REPOSITORY == release.UNKNOWN else version.REPOSITORY
  owner = address.split('/', 3)[3]
  for path in release.NOTEBOOKS:
    text = release.with_address(text_of(path), address)
    json.loads(text)
    assert f'/github/{owner}/blob/main/{path})' in text and '<!-- colab' not in text
    assert 'Upload' not in text, path


def test_notebooks_of_links_exist():
  found = re.findall(r'<!-- colab (\w+) -->|colabs/(\w+)\.ipynb', text_of('README.md'))
  assert found
  for names in found:
    assert (ROOT / 'colabs' / f'{max(names)}.ipynb').is_file()


def test_the_version_of_a_tag_is_in_every_place():
  texts = release.read([release.VERSION, 'CITATION.cff'])
  texts['SECURITY.md'] = '| 9.8 | yes |\n'
  texts['CHANGELOG.md'] = '# Log\n\n## Unreleased\n\n### Added\n\n* A.\n\n## 0.2.0 (x)\n\n* B.\n'
  changed = release.with_version(texts, 'v9.8.7', datetime.date(2030, 1, 2))
  assert "__version__ = '9.8.7'" in changed[release.VERSION]
  assert '\nversion: 9.8.7\n' in changed['CITATION.cff']
  assert release.notes(changed['CHANGELOG.md'], '9.8.7') == '### Added\n\n* A.'
  assert '## 9.8.7 (2030-01-02)\n' in changed['CHANGELOG.md']
  for tag, log in (('9.8.7', texts['CHANGELOG.md']), ('v9.8', texts['CHANGELOG.md']),
                   ('v9.8.7', '## Unreleased\n\n## 0.2.0\n\n* B.\n')):
    with pytest.raises(SystemExit):
      release.with_version({**texts, 'CHANGELOG.md': log}, tag, datetime.date(2030, 1, 2))
  with pytest.raises(SystemExit, match='no row of 9.8'):
    release.with_version({**texts, 'SECURITY.md': '| 0.2 | yes |\n'}, 'v9.8.7',
                         datetime.date(2030, 1, 2))


def test_this_version_is_in_the_table_of_supported_versions():
  assert f'| {version.__version__.rpartition(".")[0]} | yes |' in text_of('SECURITY.md')


def test_the_page_on_an_index_links_into_the_repository_of_this_version(monkeypatch):
  made = []
  monkeypatch.setattr(setuptools, 'setup', lambda **named: made.append(named))
  setup = runpy.run_path(str(ROOT / 'setup.py'))
  readme = text_of('README.md')
  assert made[0]['long_description'] == setup['page'](
      readme, version.__version__, version.REPOSITORY)
  assert setup['page'](readme, '9.8.7', release.UNKNOWN) == readme
  text = setup['page'](readme, '9.8.7', ADDRESS)
  links = re.findall(r'(!?)\[[^][]*\]\(([^)]+)\)', text)
  assert len(links) > 20 and all(link.startswith('https://') for _, link in links)
  for picture, link in links:
    base, found, path = link.partition('/v9.8.7/')
    if found:
      assert base == f'{ADDRESS}/{"raw" if picture else "blob"}' and (ROOT / path).exists(), link
  assert len(re.findall(ADDRESS, text)) > 20


def test_a_release_of_another_version_is_refused(monkeypatch):
  monkeypatch.setattr(release, 'run', lambda *_, **__: pytest.fail('something was run'))
  with pytest.raises(SystemExit, match='version of the tag'):
    release.main(['build', 'v99.0.0'])


def check_command(command):
  """A step of a workflow runs a target of the Makefile, or a file of the checkout."""
  words = command.split()
  if words[0] == 'make':
    assert words[1] in re.findall(r'^([\w-]+):', text_of('Makefile'), re.M), command
  else:
    assert (ROOT / words[0]).is_file() and os.access(ROOT / words[0], os.X_OK), command


def test_workflows_run_the_commands_of_this_checkout():
  commands = [line.strip() for path in (ROOT / '.github' / 'workflows').glob('*.yml')
              for line in re.findall(r'^\s+(?:- )?run: (.*)$', path.read_text(), re.M)]
  assert {'.ci/run', 'make docs', 'make wheel'} <= set(commands)
  for command in commands:
    check_command(command)
  for path in (ROOT / '.github').rglob('*.yml'):
    assert '\t' not in path.read_text() and '://' not in path.read_text(), path


def test_workflows_are_yaml_and_each_step_uses_or_runs_something():
  yaml = pytest.importorskip('yaml')
  files = {path.relative_to(ROOT / '.github').as_posix(): yaml.safe_load(path.read_text())
           for path in (ROOT / '.github').rglob('*.yml')}
  jobs = [(name, job) for name, content in files.items()
          for job in content.get('jobs', {}).values()]
  assert len(jobs) >= 3 and files['dependabot.yml']['version'] == 2
  for name, job in jobs:
    assert True in files[name] and job['runs-on'], name  # YAML 1.1 reads `on` as a truth value.
    for step in job['steps']:
      assert ('uses' in step) != ('run' in step), (name, step)
      for command in step.get('run', '').splitlines():
        check_command(command)


def pins(name):
  """`{package: versions}` of a lock file, on any Python."""
  found = {}
  for package, number in re.findall(r'^([\w.-]+)==([^\s;]+)', text_of(name), re.M):
    found.setdefault(package, set()).add(number)
  return found


def test_make_lock_makes_every_lock():
  (looped,) = re.findall(r'for list in ([\w\s\\-]+);', text_of('Makefile'))
  lists = {path.stem for path in (ROOT / 'requirements').glob('*.in')}
  assert set(re.findall(r'[\w-]+', looped)) == lists
  stacks = {path.stem for path in (ROOT / 'requirements').glob('*.toml')}
  assert {path.stem for path in (ROOT / 'requirements').glob('*.lock')} == lists | stacks


def test_jupyter_in_the_image_is_complete_and_changes_nothing_of_the_stack():
  jupyter, stack = pins('requirements/jupyter.lock'), pins('requirements/current.lock')
  # Imported when the server starts; markers of the stack's list leave them out on Python 3.11.
  assert {'markupsafe', 'cffi'} <= set(jupyter)
  for package in set(jupyter) & set(stack):
    assert jupyter[package] <= stack[package], package


def test_every_source_and_command_of_the_image_exists():
  instructions = [line.partition(' ')[::2] for line in re.sub(
      r'\\\n', ' ', text_of('Dockerfile')).splitlines() if line and not line.startswith('#')]
  assert instructions[0] == ('FROM', 'python:3.11-slim') and len(instructions) > 6
  copied = set()
  for word, rest in instructions:
    if word == 'COPY':
      *sources, _ = rest.split()
      copied.update(sources)
      assert all((ROOT / source).exists() for source in sources), rest
    elif word == 'RUN':
      for name in re.findall(r'-r (\S+)', rest):  # A list is copied before it is installed.
        assert name in copied, name
    elif word == 'CMD':
      program, command = json.loads(rest)
      assert program == 'tfdp' and command in main.COMMANDS
  pinned = ''.join(text_of(name) for name in copied if name.endswith('.lock'))
  # `--no-build-isolation` builds with what is installed; a comment of the file starts Jupyter.
  for name in ('setuptools', 'jupyterlab', 'tensorflow'):
    assert re.search(rf'^{name}==', pinned, re.M), name
  assert '://' not in text_of('Dockerfile') and 'USER tfdp' in text_of('Dockerfile')
