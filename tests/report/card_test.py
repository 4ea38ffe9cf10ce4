# SPDX-License-Identifier: Apache-2.0
"""Cards say what follows from their terms, can be read again, and are checked against lies."""

import copy
import dataclasses
import html
import json
import math
import types

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import mechanisms
from tfdp_adaptive.accounting import private_search
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.accounting import second_accountant
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import entry as entry_lib
from tfdp_adaptive.privacy import statement
from tfdp_adaptive.privacy import weight_digests
from tfdp_adaptive.report import card_checks
from tfdp_adaptive.report import card_json
from tfdp_adaptive.report import card_page

FIELDS = dict(population_size=1000, batch_size=50, steps=40, l2_norm_clip=2.0,
              noise_multiplier=1.5, target_delta=1e-5)
BANDED = mechanisms.BandedToeplitz(bands=4, steps=40)
PLANS = {
    'Poisson': {},
    'unknown size': dict(adjacency='add_remove', population_size=None,
                         sampling=sampling.Poisson(sampling_probability=0.05)),
    'replace': dict(adjacency='replace'),
    'fixed order': dict(sampling=sampling.FixedOrder(), mechanism=mechanisms.BLT(
        buffers=2, steps=40)),
    'replaced in a fixed order': dict(sampling=sampling.FixedOrder(), adjacency='replace',
                                      mechanism=mechanisms.SquareRoot(steps=40)),
    'tree': dict(sampling=sampling.FixedOrder(), mechanism=mechanisms.Tree(steps=40)),
    'cyclic': dict(sampling=sampling.CyclicPoisson(cycle=4), mechanism=BANDED),
    'truncated': dict(sampling=sampling.TruncatedPoisson(max_batch_size=80), steps=5),
    'a fresh bin': dict(sampling=sampling.RandomAllocation(20)),
    'one bin': dict(sampling=sampling.BallsInBins(20)),
    "users' examples": dict(
        sampling=sampling.PoissonExamples(examples_per_user=3), unit='user', noise_multiplier=4.0),
    'search': dict(search=private_search.Search(runs=5)),
    'statistics of the past': dict(sampling=sampling.FixedOrder(), extra_releases=(4.0,)),
}


def make_ledger(*changes, **entry):
  ledger = tfdp.Ledger()
  for change in changes or ({},):
    plan = tfdp.PrivacyPlan(**dict(FIELDS, **change))
    ledger = ledger.begin(plan, 'dp_adam', **entry).done(plan.steps)
  return ledger


@pytest.fixture(scope='module')
def card():
  return make_ledger({'steps': 8}, {'steps': 4}).card(
                     words=[card_lib.Words('the data', 'reviews')])


def wrong(card, weights=None):
  return [one.text for one in card_checks.check(card, weights) if one.kind == card_checks.WRONG]


@pytest.mark.thorough(rows=['one bin', 'truncated', "users' examples"])
@pytest.mark.parametrize('changes', PLANS.values(), ids=PLANS)
def test_every_plan_has_a_card_that_a_second_accountant_confirms(changes):
  card = make_ledger(changes).card(plots=False)
  assert card_json.from_json(card_json.to_json(card)) == card
  findings = card_checks.check(card)
  assert not wrong(card)
  assert any('The runs together have epsilon' in one.text for one in findings), findings
  less = dataclasses.replace(card, epsilon=card.epsilon * 0.997)
  assert any('do not give epsilon' in text for text in wrong(less))


@pytest.mark.parametrize('changes', [
    {}, {'sampling': sampling.PoissonExamples(examples_per_user=3), 'unit': 'user'}], ids=str)
def test_a_card_is_checked_without_mixtures_as_on_python_3_9(changes, monkeypatch):
  monkeypatch.setattr(second_accountant, '_MIXTURE', None)
  card = make_ledger({'steps': 8, **changes}).card(plots=False)
  assert not wrong(card)


def test_where_there_is_no_second_accountant_the_first_one_is_asked_again():
  card = make_ledger(dict(
      sampling=sampling.BallsInBins(20), mechanism=BANDED)).card(plots=False)
  findings = card_checks.check(card)
  assert not wrong(card) and any('No second accountant' in one.text for one in findings)
  assert wrong(dataclasses.replace(card, epsilon=card.epsilon * 0.99))


def test_a_card_says_what_its_ledger_says(card):
  ledger = make_ledger({'steps': 8}, {'steps': 4})
  assert card.epsilon == card.planned_epsilon == ledger.epsilon()
  assert card.curve[-1] == (12, card.epsilon)
  assert dict(card.curve)[8] == make_ledger({'steps': 8}).epsilon()
  for epsilon, delta in card.profile:
    assert delta == pytest.approx(ledger.delta(epsilon), rel=1e-9)
  assert statement.of(card) == statement.of(card_json.from_json(card_json.to_json(card)))
  assert statement.guarantee(card).split('. In words')[0] in ledger.statement()


def test_before_the_end_a_card_gives_both_epsilons():
  plan = tfdp.PrivacyPlan(**FIELDS)
  card = tfdp.Ledger().begin(plan).done(10).card(plots=False)
  assert (card.epsilon, card.planned_epsilon) == (plan.epsilon(10), plan.epsilon())
  assert card.curve == ((10, plan.epsilon(10)), (40, plan.epsilon())) and not wrong(card)
  assert not wrong(tfdp.Ledger().begin(plan).card(plots=False))
  assert not wrong(tfdp.Ledger().card(plots=False))


def test_a_card_holds_no_seed_and_says_that_there_was_one():
  cards = [make_ledger({'seed': seed}).card(plots=False) for seed in (987654321, 5, None)]
  texts = [card_json.to_json(card) for card in cards]
  assert texts[0] == texts[1] != texts[2] and '987654321' not in texts[0]
  assert 'FIXED SEED' in statement.of(cards[0]) and 'FIXED SEED' not in statement.of(cards[2])
  assert any('fixed seed' in one.text for one in card_checks.check(cards[0]))


@pytest.mark.parametrize('changes, reason', [
    ([dict(noise_multiplier=0.0)], 'noise multiplier of 0'),
    ([{}, dict(unit='user')], 'must have the same `unit`')])
def test_without_a_guarantee_a_card_says_why(changes, reason):
  card = make_ledger(*changes).card()
  assert card.epsilon is None and reason in card.reason
  assert 'NO PRIVACY' in statement.guarantee(card)
  again = card_json.from_json(card_json.to_json(card))
  assert any('claims no guarantee' in one.text for one in card_checks.check(again)) or wrong(again)


def test_a_run_without_a_plan_has_no_epsilon():
  card = (make_ledger() + tfdp.Ledger().begin(None).done(3)).card()
  assert card.epsilon is None and 'had no plan' in card.reason
  assert card_json.from_json(card_json.to_json(card)) == card and not wrong(card)


def terms(content, run=0):
  return content['card']['runs'][run]['plan']['content']['plan']


def scaled(name, factor):
  return lambda content: content['card'].update({name: content['card'][name] * factor})


def of_terms(**changes):
  return lambda content: terms(content).update(changes)


LIES = {
    'epsilon': scaled('epsilon', 0.995),
    'all epsilons': lambda content: [scaled('epsilon', 0.9)(content), content['card'].update(
        planned_epsilon=content['card']['planned_epsilon'] * 0.9, curve=[])],
    'no epsilon': lambda content: content['card'].update(epsilon=None),
    'planned': scaled('planned_epsilon', 0.9),
    'delta': scaled('delta', 0.1),
    'the adjacency of one run': lambda content: terms(content).update(adjacency='add_remove'),
    'the unit of one run': lambda content: terms(content).update(unit='user'),
    'a run left out': lambda content: content['card']['runs'].pop(),
    'steps': lambda content: content['card']['runs'][0].update(steps=7),
    'sampling': of_terms(sampling={'kind': 'CyclicPoisson', 'config': {'cycle': 1}},
                         batch_size=51),
    'batch size': of_terms(batch_size=100),
    'noise multiplier': of_terms(noise_multiplier=1.45),
    'population': of_terms(population_size=900),
    'the middle of the curve': lambda content: content['card']['curve'][3].__setitem__(1, 1e-3),
    'the profile': lambda content: content['card']['profile'][1].__setitem__(1, 1e-9),
    'a refuting audit': lambda content: content['card'].update(
        audits=[dict(name='white box', refuted=True, text='The claim is violated.')]),
}


def test_nothing_is_wrong_with_the_card_that_lies_are_told_of(card):
  assert not wrong(card_json.from_json(card_json.to_json(card)))


@pytest.mark.parametrize('lie', LIES.values(), ids=LIES)
def test_a_lie_is_found(card, lie):
  content = json.loads(card_json.to_json(card))
  lie(content)
  assert wrong(card_json.from_json(json.dumps(content)))


def test_a_stop_a_seed_and_a_changed_clip_norm_are_on_every_text_of_a_card():
  for changes in (dict(taken=30), dict(seeded=True), dict(clip_norms=((10, 3.0), (30, 2.0)))):
    entry = dataclasses.replace(make_ledger().entries[0], **changes)
    card = tfdp.Ledger((entry,)).card(plots=False)
    (note,) = card.notes
    assert not card.facts and not wrong(card)
    assert note in statement.of(card) and note in html.unescape(card_page.html(card))
    assert note in [one.text for one in card_checks.check(card)]


def test_the_numbers_of_another_run_are_found_by_epsilon_alone():
  mine, other = (make_ledger({'steps': 4, 'noise_multiplier': noise}).card(plots=False)
                 for noise in (1.45, 1.5))
  found = wrong(dataclasses.replace(other, runs=mine.runs, profile=(), curve=()))
  assert len(found) == 1 and 'do not give epsilon' in found[0]


@pytest.mark.parametrize('changes', [
    dict(sampling={'kind': 'FixedOrder', 'config': {}}, adjacency='add_remove'),
    dict(max_participations=3),
    dict(noise_multiplier=-1.0),
    dict(sampling={'kind': 'CyclicPoisson', 'config': {'cycle': 2}},
         mechanism={'kind': 'SquareRoot', 'config': {'steps': 40}}),
])
def test_terms_that_no_plan_may_have_make_a_wrong_card(card, changes):
  content = json.loads(card_json.to_json(card))
  terms(content).update(changes)
  with pytest.raises(card_json.WrongCard, match='no plan can have'):
    card_json.from_json(json.dumps(content))


def test_less_sensitivity_than_the_mechanism_has_is_found_without_the_mechanism(monkeypatch):
  card = make_ledger(PLANS['fixed order']).card(plots=False)
  less = card.runs[0].sensitivity * 0.99
  monkeypatch.setattr(entry_lib.Entry, 'sensitivity', less)
  found = wrong(dataclasses.replace(card, runs=(dataclasses.replace(card.runs[0]),)))
  assert len(found) == 1 and 'can move its releases by' in found[0]


HEAD = f'"format": "tfdp_adaptive.card", "version": {card_json.VERSION}'
NOT_CARDS = {
    'nothing': '', 'no JSON': '{', 'another': '{"format": "x"}', 'a list': '[]',
    'a number': '1' * 5000, 'deep': '[' * 100_000, 'NaN': '{"format": NaN}',
    'infinite': '{"format": 1e999}', 'twice': '{"format": 1, "format": 2}',
    'no card': f'{{{HEAD}}}',
    'a newer one': '{"format": "tfdp_adaptive.card", "version": 99, "card": {}}',
    'no runs': f'{{{HEAD}, "card": {{"runs": 3}}}}',
    'a string of runs': f'{{{HEAD}, "card": {{"runs": ["a"]}}}}',
}


@pytest.mark.parametrize('number', ['NaN', 'Infinity', '-Infinity', '1e999'])
def test_numbers_that_are_not_finite_are_named(number):
  text = card_json.to_json(SMALL).replace(f'"epsilon": {SMALL.epsilon!r}', f'"epsilon": {number}')
  with pytest.raises(card_json.UnreadableCard, match='not finite'):
    card_json.from_json(text)


@pytest.mark.parametrize('text', NOT_CARDS.values(), ids=NOT_CARDS)
def test_what_is_no_card_gets_a_sentence(text):
  with pytest.raises(card_json.UnreadableCard) as error:
    card_json.from_json(text)
  assert len(str(error.value)) < 300 and '\n' not in str(error.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
  path = tmp_path / 'card.json'
  with open(path, 'wb') as file:
    file.truncate(1 << 30)
  with pytest.raises(card_json.UnreadableCard, match='at most 4 MiB'):
    card_json.read(path)
  path.write_bytes(b'\xff\xfe')
  with pytest.raises(card_json.UnreadableCard, match='UTF-8'):
    card_json.read(path)


@pytest.mark.parametrize('change', [
    lambda content: content['card'].update(secret=1),
    lambda content: content['card'].pop('reason'),
    lambda content: content['card'].update(epsilon='1'),
    lambda content: content['card'].update(epsilon=True),
    lambda content: content['card'].update(reason='a\x1b[2Jb'),
    lambda content: content['card'].update(reason='\u202egnihton'),
    lambda content: content['card'].update(reason='a' * 20_000),
    lambda content: content['card'].update(curve=[[1]]),
    lambda content: content['card'].update(epsilon=10**400),
    of_terms(steps=10**12),
    of_terms(seed=3),
    of_terms(mechanism={'kind': 'Dense', 'config': {'steps': 10**6}}),
    of_terms(sampling={'kind': 'MinSeparation', 'config': {'min_sep': 1, 'draws': 10**12}}),
    lambda content: content['card']['runs'][0].clear(),
])
def test_a_card_of_other_types_or_sizes_is_unreadable(card, change):
  content = json.loads(card_json.to_json(card))
  change(content)
  with pytest.raises(card_json.UnreadableCard):
    card_json.from_json(json.dumps(content))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**20) | st.floats(width=32)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                               max_size=3), max_leaves=4)


def places(value, path=()):
  yield path
  if isinstance(value, (dict, list)):
    for key in (value if isinstance(value, dict) else range(len(value))):
      yield from places(value[key], path + (key,))


@pytest.mark.thorough
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=150)
def test_a_damaged_card_is_refused_or_read_never_a_defect(data):
  text = card_json.to_json(SMALL)
  content = json.loads(text)
  *path, last = data.draw(st.sampled_from([p for p in places(content) if p]))
  inner = content
  for key in path:
    inner = inner[key]
  inner[last] = data.draw(JSON)
  damaged = data.draw(st.sampled_from([json.dumps(content), text[:data.draw(
      st.integers(0, len(text)))]]))
  try:
    card = card_json.from_json(damaged)
    card_checks.check(card)
    assert card_page.html(card) and card_page.markdown(card) and statement.of(card)
  except (card_json.UnreadableCard, card_json.WrongCard) as error:
    assert len(str(error)) < 1000


SMALL = make_ledger({'steps': 2}).card(plots=False)


def test_texts_of_ones_own_lose_what_moves_a_terminal():
  plan = tfdp.PrivacyPlan(**FIELDS)
  ledger = tfdp.Ledger().begin(plan, 'r', 'mine\x1b[2J\n\u202e<script>').done(1)
  card = ledger.card(plots=False)
  assert card.runs[0].own_sampler == 'mine [2J <script>' and not card.words
  assert card_json.from_json(card_json.to_json(card)) == card


def test_an_audit_leaves_its_verdict_and_no_number():
  report = types.SimpleNamespace(violated=True, name='mine', epsilon=3.14159)
  card = make_ledger().card(plots=False, audits=[report])
  assert card.audits[0].refuted and '3.14' not in card_json.to_json(card)
  assert any('violated' in text for text in wrong(card))


def test_the_attackers_rates_are_bounds_and_grow():
  card = make_ledger().card()
  rates = [card.true_positive_rate(x) for x in np.linspace(1e-3, 1 - 1e-3, 50)]
  assert rates == sorted(rates) and rates[0] > 1e-3 and rates[-1] <= 1
  assert card.true_positive_rate(0.01) <= card.rate


class TestWeights:

  ARRAYS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)]

  def test_names_and_order_do_not_matter_and_every_bit_does(self):
    digests = weight_digests.of(self.ARRAYS)
    assert weight_digests.of(self.ARRAYS[::-1] + [np.array(['text'])]) == digests
    for change in (np.nextafter, lambda a, b: a.T, lambda a, b: a.astype(np.float64)):
      changed = [change(copy.copy(self.ARRAYS[0]), np.float32(9)), self.ARRAYS[1]]
      assert weight_digests.of(changed) != digests

  def test_a_card_knows_its_file(self, tmp_path):
    card = make_ledger().card(plots=False, weights=weight_digests.of(self.ARRAYS))
    card = card_json.from_json(card_json.to_json(card))
    np.savez(tmp_path / 'right.npz', *self.ARRAYS)
    np.savez(tmp_path / 'wrong.npz', self.ARRAYS[0] + 1, self.ARRAYS[1])
    np.savez(tmp_path / 'more.npz', *self.ARRAYS, np.zeros(1))
    assert not wrong(card, tmp_path / 'right.npz')
    for name in ('wrong', 'more'):
      assert 'arrays of weights' in wrong(card, tmp_path / f'{name}.npz')[0]
    assert wrong(dataclasses.replace(card, weights=()), tmp_path / 'right.npz')

  @pytest.mark.parametrize('content', [b'', b'PK\x03\x04', b'\x89HDF\r\n\x1a\n' + bytes(100)])
  def test_a_damaged_file_gets_a_sentence(self, tmp_path, content):
    (tmp_path / 'weights').write_bytes(content)
    with pytest.raises(ValueError, match='weights'):
      weight_digests.of_file(tmp_path / 'weights')


def test_a_constant_that_is_not_finite_is_never_written():
  with pytest.raises(ValueError):
    card_json.to_json(dataclasses.replace(SMALL, epsilon=math.inf))
