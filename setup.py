# SPDX-License-Identifier: Apache-2.0
"""The packages of tfdp_adaptive, and its page on an index; pyproject.toml says everything else."""

import pathlib
import re
import runpy

import setuptools

ROOT = pathlib.Path(__file__).parent


def page(readme, version, repository):
  """Returns the README with links into the repository, because an index knows no other files."""
  if '://' not in repository:
    return readme
  return re.sub(
      r'(!?)\[([^][]*)\]\((?!\w+:|#)', lambda found: (
          f'{found[0]}{repository}/{"raw" if found[1] else "blob"}/v{version}/'), readme)


VERSION = runpy.run_path(str(ROOT / 'tfdp_adaptive' / 'version.py'))

setuptools.setup(
    packages=(
        setuptools.find_packages(include=['tfdp_adaptive', 'tfdp_adaptive.*'])
        + ['tfdp_adaptive.federated', 'tfdp_adaptive.examples']
    ),
    package_dir={'tfdp_adaptive.federated': 'federated', 'tfdp_adaptive.examples': 'examples'},
    long_description=page((ROOT / 'README.md').read_text(encoding='utf-8'),
                          VERSION['__version__'], VERSION['REPOSITORY']),
    long_description_content_type='text/markdown',
)
