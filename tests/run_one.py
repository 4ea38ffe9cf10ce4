# SPDX-License-Identifier: Apache-2.0
"""The main module of Bazel's test targets: pytest on the one file that is named."""

import sys

import pytest

if __name__ == '__main__':
  sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))
