# SPDX-License-Identifier: Apache-2.0
"""`docs/state.md` has every public part, its oracle and its evidence; the gate keeps to it."""

import functools
import inspect
import pathlib
import re
from typing import NamedTuple

import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import contract
from tfdp_adaptive import gate
from tfdp_adaptive import mechanisms
from tfdp_adaptive import optimizers
from tfdp_adaptive import rules
from tfdp_adaptive.accounting import sampling

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / 'docs' / 'state.md'
QUERIES = ROOT / 'tfdp_adaptive' / 'queries' / '__init__.py'  # Not importable everywhere.
GATED = {  # How each part is made.
    **{row.rule: functools.partial(getattr(rules, row.rule), **row.audit)
       for row in optimizers.OPTIMIZERS.values() if row.missing},
    'noisy_adagrad': lambda: rules.noisy_adagrad(1, diagonal=True),
    'PoissonExamples': lambda: sampling.PoissonExamples(examples_per_user=2)}


class Row(NamedTuple):
  names: list
  state: str
  oracle: str
  evidence: str
  missing: str


def rows():
  lines = [line for line in PAGE.read_text(encoding='utf-8').splitlines() if line.startswith('| `')]
  for line in lines:
    first, *rest = (cell.strip() for cell in line.strip('|').split(' | '))
    yield Row(re.findall(r'`([^`]+)`', first), *(cell.strip(' |') for cell in (rest + [''])[:4]))


def public_parts():
  yield from optimizers.OPTIMIZERS
  for name, value in vars(rules).items():
    if inspect.isfunction(value) and name != 'non_private_noiseless_adam' and (
        inspect.signature(value).return_annotation in (contract.Rule, 'contract.Rule')):
      yield name
  yield from mechanisms.KINDS
  yield from sampling.SCHEMES
  yield from re.findall(r'as (\w+Query)$', QUERIES.read_text(encoding='utf-8'), re.M)


def test_every_public_part_has_one_row():
  listed = [name for row in rows() for name in row.names]
  assert len(listed) == len(set(listed)) and len(listed) > 60
  assert not set(public_parts()) - set(listed)


def test_oracles_and_evidence_are_there_and_the_rest_is_behind_the_gate():
  experimental = {}
  for row in rows():
    path, = re.findall(r'`(tests/[\w/.]+)`', row.oracle)
    assert (ROOT / path).exists(), row
    links = re.findall(r'\]\(([^)]+)\)', row.evidence)
    assert all((PAGE.parent / link).exists() for link in links), row
    assert bool(links) == (row.evidence != 'none'), row
    assert row.state == ('experimental' if row.missing else 'stable'), row
    assert row.missing or links, f'{row.names} has no evidence: it is experimental.'
    if row.missing:
      experimental.update({name: row.missing for name in row.names if name in gate.PARTS})
      assert set(row.names) & set(gate.PARTS), row
  assert experimental == gate.PARTS


@pytest.fixture
def closed(monkeypatch):
  monkeypatch.setattr(gate, '_OPEN', set())


@pytest.mark.parametrize('name', GATED)
def test_a_part_is_behind_the_gate_until_it_is_opened_by_name(name, closed):
  with pytest.raises(ValueError) as refused:
    GATED[name]()
  said = str(refused.value)
  assert gate.PARTS[name] in said and f'tfdp.experimental({name!r})' in said
  assert len(said.splitlines()) == 2
  with tfdp.experimental(name):
    GATED[name]()
  with pytest.raises(ValueError, match='is experimental'):
    GATED[name]()
  tfdp.experimental(name)
  GATED[name]()


def test_the_gate_has_a_way_to_make_every_part():
  assert set(GATED) == set(gate.PARTS)


def test_an_inner_block_does_not_close_what_was_open(closed):
  tfdp.experimental('dp_shampoo')
  with tfdp.experimental('dp_shampoo', 'dp_muon'):
    pass
  rules.dp_shampoo()
  with pytest.raises(ValueError, match='is experimental'):
    rules.dp_muon()


def test_names_that_are_no_parts_are_refused():
  with pytest.raises(ValueError, match='`name` must be one of .*dp_shampoo.*Received.*DPShampoo'):
    tfdp.experimental('DPShampoo')


def test_classes_ask_as_their_rules_do_and_saved_ones_load(closed):
  arguments = dict(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4)
  with pytest.raises(ValueError, match='dp_shampoo is experimental'):
    tfdp.DPShampoo(0.1, **arguments)
  with tfdp.experimental('dp_shampoo'):
    config = tfdp.DPShampoo(0.1, **arguments).get_config()
  assert tfdp.DPShampoo.from_config(config).rule.name == 'dp_shampoo'
  with pytest.raises(ValueError, match='is experimental'):
    rules.dp_shampoo()


@pytest.mark.parametrize('name, state', [
    ('dp_adam', 'stable'), ('quantile_clip(dp_shampoo)', 'experimental'),
    ('partition(muon, dp_adam)', 'experimental'), ('BallsInBins', 'stable'),
    ('RandomAllocation', 'stable'), ('PoissonExamples', 'experimental')])
def test_cards_know_the_state_of_what_is_made_of_parts(name, state):
  assert gate.state_of(name) == state
