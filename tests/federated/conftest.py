# SPDX-License-Identifier: Apache-2.0
"""The ways to reach clients, and one TFF worker for all tests."""

import pytest

import tfdp_adaptive as tfdp


@pytest.fixture(scope='session')
def worker():
  with tfdp.federated.Workers() as started:
    yield started


@pytest.fixture(scope='module', params=[
    'in_process', pytest.param('tff', marks=pytest.mark.federated)])
def engine(request):
  """Its name; `regression.build` takes it."""
  if request.param == 'tff':
    request.getfixturevalue('worker')
  return request.param


@pytest.fixture(scope='module')
def workers(engine, request):
  """What `process.engine` takes."""
  return request.getfixturevalue('worker') if engine == 'tff' else ()
