# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that puts the library's accounting in the place of dp_accounting's."""

import os

import dp_accounting
from dp_accounting import privacy_accountant
from dp_accounting.pld import pld_privacy_accountant

from tfdp_adaptive.accounting import cost

_ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


class Accountant(privacy_accountant.PrivacyAccountant):
  """Composes events; `cost` computes their epsilon and delta."""

  def __init__(self, neighboring_relation=_ADD_OR_REMOVE, value_discretization_interval=None):
    del value_discretization_interval
    super().__init__(neighboring_relation)
    self._event = dp_accounting.NoOpDpEvent()

  def _maybe_compose(self, event, count, do_compose):
    together = dp_accounting.ComposedDpEvent([
        self._event, dp_accounting.SelfComposedDpEvent(event, max(1, count))])
    try:
      cost.epsilon(together, 0.5, neighbors=self.neighboring_relation)
    except ValueError as error:
      while True:
        inner = getattr(event, 'event', None) or (getattr(event, 'events', None) or [None])[-1]
        if inner is None:
          return self.CompositionErrorDetails(event, str(error))
        event = inner
    if do_compose:
      self._event = together
    return None

  def get_epsilon(self, target_delta):
    return cost.epsilon(self._event, target_delta, neighbors=self.neighboring_relation)

  def get_delta(self, target_epsilon):
    return cost.delta(self._event, target_epsilon, neighbors=self.neighboring_relation)


def pytest_configure(config):
  del config
  if os.environ.get('TFDP_PEERS') == 'private':
    pld_privacy_accountant.PLDAccountant = Accountant
