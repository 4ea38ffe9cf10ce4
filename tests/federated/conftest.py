# SPDX-License-Identifier: Apache-2.0
"""The ways to reach clients."""

import pytest


@pytest.fixture(scope='module', params=[
    'in_process', pytest.param('tff', marks=pytest.mark.federated)])
def engine(request):
  """Its name; `regression.build` takes it."""
  return request.param
