# SPDX-License-Identifier: Apache-2.0
"""Every field of every kind of card is changed: `verify` finds it, or lists the field."""

import copy
import dataclasses
import json

import dp_accounting
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import private_search
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.accounting import second_accountant
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.report import card_checks
from tfdp_adaptive.report import card_json

FIELDS = dict(population_size=100, batch_size=10, steps=6, l2_norm_clip=2.0,
              noise_multiplier=2.0, target_delta=1e-4, sampling=sampling.FixedOrder())


def entry(steps=4, **changes):
  more = {name: changes.pop(name) for name in list(changes) if name not in FIELDS and name not in (
      'mechanism', 'adjacency', 'unit', 'search')}
  plan = tfdp.PrivacyPlan(**{**FIELDS, **changes})
  done, = tfdp.Ledger().begin(plan, 'dp_adam').done(steps).entries
  return dataclasses.replace(done, **{
      'run': 'a1', 'engines': ('bookkeeping',), 'clipping': ('In groups.',), **more})


CARDS = {
    'plain': dict(entries=[entry()], plots=True),
    'two runs': dict(entries=[
        entry(6, run='b2', notes=('Noted.',)), entry(3, own_sampler='mine', seeded=True)]),
    'correlated noise': dict(entries=[entry(mechanism=mechanisms.BLT(buffers=2, steps=6))]),
    'users, unknown size': dict(trust='federated', entries=[entry(
        unit='user', adjacency='add_remove', population_size=None, examples_per_user=3,
        sampling=sampling.Poisson(sampling_probability=0.1))]),
    'stopped': dict(entries=[entry(6, taken=4)]),
    'looks': dict(entries=[entry(4)], looks=tfdp.privacy.Looks((2, 4, 6), total=(6,))),
    'another clip norm': dict(entries=[entry(clip_norms=((1, 3.0), (3, 2.0)))]),
    'adapted layers': dict(entries=[entry(), entry(2, delta=1e-5, run='c3')]),
}
if hasattr(dp_accounting, 'TruncatedSubsampledGaussianDpEvent'):  # Not with Python 3.9's pins.
  CARDS['tuned'] = dict(entries=[entry(6, search=private_search.Search(runs=3.0))])


def made(entries, plots=False, **more):
  return json.loads(card_json.to_json(tfdp.Ledger(tuple(entries)).card(
      plots=plots, words=[card_lib.Words('the data', 'reviews')],
      weights=['0' * 32], **more)))


def leaves(value, path=()):
  """Yields (path, value, values of neighbours) of everything that is no container."""
  keys = list(value if isinstance(value, dict) else range(len(value)))
  for key in keys:
    if isinstance(value[key], (dict, list)):
      yield from leaves(value[key], path + (key,))
    else:
      yield path + (key,), value[key], [value[other] for other in keys if other != key
                                        and not isinstance(value[other], (dict, list))]


def free(path, runs, kind):
  """Whether the list of `verify` has the field of a path, or says that it moves nothing."""
  return bool((TRUSTED | FREE) & set(map(str, path))
              or path[-2:] == ('config', 'steps') or kind == 'tuned' and path[-1] == 'steps'
              or path[-2:] == ('plan', 'steps') and (path[2] < runs - 1 or kind == 'looks'))


def changes(value, neighbours):
  if isinstance(value, bool):
    yield not value
  elif isinstance(value, int):
    yield from (value + max(1, value // 100), value - max(1, value // 100))
  elif isinstance(value, float):
    yield from (value * 1.01, value * 0.99)
  yield from neighbours[:1]


@pytest.fixture(autouse=True)
def one_accountant(monkeypatch):
  """The accountant of the card alone; a second one takes seconds for every card."""
  monkeypatch.setattr(second_accountant, 'answer', lambda *_: second_accountant.Answer(
      None, 'it was not asked'))


def findings(content):
  """Returns what is wrong or claims less, or that the card cannot be read."""
  try:
    found = card_checks.check(card_json.from_json(json.dumps(content)))
  except ValueError as error:
    return {str(error)}
  return {one.text for one in found if one.kind == card_checks.WRONG or 'claims less' in one.text}


# These move no number of a run in a fixed order, or with a sampling probability of its own.
FREE = {'population_size', 'batch_size', 'min_sep', 'buffers'}
TRUSTED = set(card_checks.TRUSTED)


@pytest.mark.thorough(rows=['users, unknown size'])
@pytest.mark.parametrize('kind', CARDS)
def test_every_change_is_found_or_the_field_is_listed(kind):
  content = made(**CARDS[kind])
  assert not findings(content)
  unnoticed = []
  for path, value, neighbours in leaves(content):
    for new in changes(value, neighbours):
      if new == value or free(path, len(CARDS[kind]['entries']), kind):
        continue
      changed = copy.deepcopy(content)
      inner = changed
      for key in path[:-1]:
        inner = inner[key]
      inner[path[-1]] = new
      if not findings(changed):
        unnoticed.append((path, value, new))
  assert not unnoticed, '\n'.join(map(str, unnoticed))


def test_what_is_listed_is_no_number_of_the_guarantee():
  assert not TRUSTED & {'epsilon', 'planned_epsilon', 'delta', 'curve', 'profile', 'steps',
                        'noise_multiplier'}


def test_what_follows_from_the_terms_has_no_place_on_a_card_to_be_left_out():
  for kind in ('two runs', 'stopped', 'looks', 'another clip norm'):
    card = card_json.from_json(json.dumps(made(**CARDS[kind])))
    assert not card.facts and card.notes, kind
