# SPDX-License-Identifier: Apache-2.0
"""The card of a simulation: its statement, its weights, and what a second accountant says of it."""

import dataclasses

import numpy as np
import regression

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.privacy import statement
from tfdp_adaptive.report import card_checks
from tfdp_adaptive.report import card_json


def wrong(card, weights=None):
  return [one.text for one in card_checks.check(card, weights) if one.kind == card_checks.WRONG]


def test_the_card_of_a_simulation_is_what_was_run(tmp_path):
  process = regression.build(rules.dp_adam(), regression.make_plan(steps=4))
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)
  result = tfdp.federated.simulate(process, users, rounds=3, progress=False)
  card = result.card()
  assert (card.unit, card.trust, card.done) == ('user', 'federated', 3)
  assert card.epsilon == process.plan.epsilon(3) < card.planned_epsilon == process.plan.epsilon()
  assert result.statement.startswith(statement.of(card).split('\n\n')[0])
  read = card_json.from_json(card_json.to_json(card))
  np.savez(tmp_path / 'weights.npz', *result.weights.trainable)
  assert wrong(read, tmp_path / 'weights.npz') == []
  moved = [w + np.float32(1) for w in result.weights.trainable]
  np.savez(tmp_path / 'others.npz', *moved)
  assert wrong(read, tmp_path / 'others.npz')
  assert wrong(dataclasses.replace(read, epsilon=0.99 * read.epsilon))
