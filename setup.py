# SPDX-License-Identifier: Apache-2.0
"""The packages of tfdp_adaptive; pyproject.toml says everything else."""

import setuptools

setuptools.setup(
    packages=(
        setuptools.find_packages(include=['tfdp_adaptive', 'tfdp_adaptive.*'])
        + ['tfdp_adaptive.federated', 'tfdp_adaptive.examples']
    ),
    package_dir={'tfdp_adaptive.federated': 'federated', 'tfdp_adaptive.examples': 'examples'},
)
