# SPDX-License-Identifier: Apache-2.0
"""Publishes a version. Nothing leaves this machine: the owner pushes the tag and uploads.

  python .ci/release.py address URL       writes the address of the repository into every file
  python .ci/release.py version v0.3.0    writes the version of a tag, and closes `Unreleased`
  python .ci/release.py build v0.3.0      builds and checks both distributions, drafts the notes
                                          (dist/notes.md), and tags the commit
"""

import argparse
import datetime
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
UNKNOWN = '<this repository>'
VERSION = 'tfdp_adaptive/version.py'
# The files that name the repository. `tests/release_test.py` finds those that are missing.
PLACES = (
    VERSION, 'README.md', 'SECURITY.md', 'CODE_OF_CONDUCT.md', 'CITATION.cff', 'pyproject.toml',
    '.github/ISSUE_TEMPLATE/config.yml', 'docs/promise.md')
# Those that get a link to Colab besides.
NOTEBOOKS = tuple(sorted(f'colabs/{path.name}' for path in (ROOT / 'colabs').glob('*.ipynb')))
_COLAB = re.compile(r'<!-- colab (\w+) -->( On \[Colab\]\S+ choose \*Upload\* [^.]*\.)?')
_TAG = re.compile(r'v(\d+\.\d+\.\d+)')


def with_address(text, address):
  """Returns a file's text with the address, and with links that open notebooks in Colab."""
  owner = re.fullmatch(r'https://[\w.-]+/([\w.-]+/[\w.-]+?)/?', address)
  if owner is None:
    raise SystemExit(f'The address must be https://HOST/OWNER/NAME. Received: {address}')

  def link(found):
    return ('[Open in Colab](https://colab.research.google.com/github/'
            f'{owner[1]}/blob/main/colabs/{found[1]}.ipynb)' + ('.' if found[2] else ''))

  # Lines of TOML and YAML with an unknown address are comments until now.
  text = re.sub(rf'^# ([\w-]+(?: =|:) "{re.escape(UNKNOWN)}")', r'\1', text, flags=re.M)
  return _COLAB.sub(link, text.replace(UNKNOWN, address.rstrip('/')))


def with_version(texts, tag, date):
  """Returns `{path: text}` of the files that name the version, with the version of a tag."""
  found = _TAG.fullmatch(tag)
  if found is None:
    raise SystemExit(f'The tag must be v and three numbers, such as v0.3.0. Received: {tag}')
  number = found[1]
  if not notes(texts['CHANGELOG.md'], 'Unreleased'):
    raise SystemExit('CHANGELOG.md must tell of the changes below "## Unreleased". Received: none.')
  if f'| {number.rpartition(".")[0]} | yes |' not in texts['SECURITY.md']:
    raise SystemExit('SECURITY.md must say below "Supported versions" that this version gets '
                     f'fixes. Received: no row of {number.rpartition(".")[0]}.')
  changed = {
      VERSION: re.sub(r"__version__ = '.*'", f"__version__ = '{number}'", texts[VERSION]),
      'CITATION.cff': re.sub(r'(?m)^version: .*$', f'version: {number}', texts['CITATION.cff']),
      'CHANGELOG.md': texts['CHANGELOG.md'].replace(
          '## Unreleased', f'## {number} ({date.isoformat()})', 1)}
  return changed


def notes(changelog, heading):
  """Returns the section of a changelog whose heading begins so, or an empty text."""
  found = re.search(rf'(?ms)^## {re.escape(heading)}\b[^\n]*\n(.*?)(?=^## |\Z)', changelog)
  return '' if found is None else found[1].strip()


def read(paths):
  return {path: (ROOT / path).read_text(encoding='utf-8') for path in paths}


def write(texts):
  for path, text in texts.items():
    (ROOT / path).write_text(text, encoding='utf-8')
    print(path)


def build(tag):
  """Builds, checks, drafts the notes and tags. Each command is one that CI runs as well."""
  texts = read([VERSION, 'CHANGELOG.md'])
  if f"__version__ = '{tag[1:]}'" not in texts[VERSION]:
    raise SystemExit(f'{VERSION} must have the version of the tag: run `release.py version {tag}` '
                     'and commit.')
  if UNKNOWN in texts[VERSION]:
    raise SystemExit('The address of the repository must be known: run `release.py address URL`.')
  if run('git', 'status', '--porcelain', capture_output=True).stdout.strip():
    raise SystemExit('Everything must be committed before a release.')
  if run('git', 'tag', '--list', tag, capture_output=True).stdout.strip():
    raise SystemExit(f'There is a tag {tag} already.')
  run('make', 'wheel')
  run(sys.executable, '-m', 'pytest', '-q', '--slow', 'tests/install_test.py')
  (ROOT / 'dist' / 'notes.md').write_text(notes(texts['CHANGELOG.md'], tag[1:]) + '\n',
                                          encoding='utf-8')
  run('git', 'tag', '--annotate', tag, '--message', f'Version {tag[1:]}')
  print(f'Tagged {tag}. Push the tag, upload the two distributions in dist, and publish '
        'dist/notes.md.')


def run(*command, **kwargs):
  return subprocess.run(
      command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, text=True, **kwargs)


def main(argv=None):
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('action', choices=('address', 'version', 'build'))
  parser.add_argument('value', metavar='URL|TAG')
  arguments = parser.parse_args(argv)
  if arguments.action == 'address':
    texts = read([*PLACES, *NOTEBOOKS])
    write({path: with_address(text, arguments.value) for path, text in texts.items()})
  elif arguments.action == 'version':
    paths = [VERSION, 'CITATION.cff', 'CHANGELOG.md', 'SECURITY.md']
    write(with_version(read(paths), arguments.value, datetime.date.today()))
  else:
    build(arguments.value)


if __name__ == '__main__':
  main()
