# SPDX-License-Identifier: Apache-2.0
"""Designs of these tests are made in every run: nothing is read from the user's cache."""

import pytest


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
  monkeypatch.setenv('TFDP_MECHANISM_CACHE', 'off')
