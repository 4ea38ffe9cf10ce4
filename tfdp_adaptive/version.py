# SPDX-License-Identifier: Apache-2.0
"""The version of the library, for the package's metadata, statements and saved results."""

__version__ = '0.2.0'
# Address of the public repository. `.ci/release.py address URL` writes it here and everywhere else.
REPOSITORY = '<this repository>'
