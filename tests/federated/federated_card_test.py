# SPDX-License-Identifier: Apache-2.0
"""The card of a simulation: its statement, its weights, and what a second accountant says of it."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import regression

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.privacy import statement
from tfdp_adaptive.report import card_checks
from tfdp_adaptive.report import card_json
from tfdp_adaptive.report import replay


def wrong(card, weights=None):
  return [one.text for one in card_checks.check(card, weights) if one.kind == card_checks.WRONG]


@pytest.mark.thorough
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


def test_a_run_in_a_folder_commits_to_the_seed_of_its_cohorts(tmp_path):
  process = regression.build(rules.dp_adam(), regression.make_plan(steps=4, seed=None))
  users = tfdp.federated.Users(regression.make_users(), batch_size=4)

  def notes(rounds, **kwargs):
    result = tfdp.federated.simulate(process, users, rounds=rounds, progress=False, **kwargs)
    entries = (result.weights.ledger.entries[-1], result.card().runs[-1])
    assert entries[0].notes == entries[1].notes
    return entries[0].notes

  committed = notes(1, out=tmp_path)
  key = sampling_seed.opened(tmp_path / 'coins')['key']
  assert committed == (sampling_seed.COMMITTED.format(sampling_seed.digest(key)),)
  assert notes(2, out=tmp_path) == committed
  result = tfdp.federated.simulate(process, users, rounds=2, progress=False, out=tmp_path)
  card = result.card()
  assert card.runs[-1].notes == committed  # They were saved.
  check = lambda: replay.check(card, tmp_path / 'coins', tmp_path / 'digests')
  assert [one.kind for one in check()] == [card_checks.VERIFIED]
  log = tmp_path / 'digests'
  head, *lines = map(json.loads, log.read_text().splitlines())
  assert (head['size'], [(line['pass'], line['step']) for line in lines]) == (6, [(1, 0), (2, 1)])
  lines[1]['records'].append('0' * 32)
  log.write_text('\n'.join(map(json.dumps, (head, *lines))))
  assert [one.kind for one in check()] == [card_checks.WRONG]
  other = tmp_path / 'other'
  notes(1, out=other)
  shutil.copy(other / 'coins', tmp_path / 'coins')
  assert notes(3, out=tmp_path) == ()  # The cohorts are those of another seed now.
  assert notes(1) == ()  # A seed that no file holds cannot be opened.
