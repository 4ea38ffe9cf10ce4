# SPDX-License-Identifier: Apache-2.0
"""One TFF worker for all tests."""

import pytest

import tfdp_adaptive as tfdp


@pytest.fixture(scope='session', autouse=True)
def worker():
  with tfdp.federated.Workers() as started:
    yield started
