# SPDX-License-Identifier: Apache-2.0
"""Cards as others read them: the Hub's README, and the registry of deployments."""

import json
import re

import dp_accounting
import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive.cli import main
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.report import card_json
from tfdp_adaptive.report import huggingface
from tfdp_adaptive.report import registry

# The registry's schema in our words: required fields, then others that a draft may have.
REQUIRED = {
    '': {'url_slug': str, 'status': str, 'tier': int, 'deployment': dict},
    'deployment': {'basic': dict},
    'deployment.basic': {
        'name': str, 'data_curators': list, 'description': str, 'intended_use': str,
        'data_product_type': str, 'data_product_region': str, 'publication_date': str},
    'deployment.administrative': {'registry_authors': list}}
OPTIONAL = {
    'deployment': {'dp_variant', 'privacy_loss', 'deployment_model', 'accounting',
                   'implementation', 'administrative'},
    'deployment.basic': {'data_product_sector'},
    'deployment.dp_variant': {'variant_name', 'data_domain', 'unprotected_quantities'},
    'deployment.privacy_loss': {'privacy_unit', 'privacy_unit_details', 'privacy_parameters',
                                'privacy_parameters_details'},
    'deployment.privacy_loss.privacy_parameters': {'epsilon', 'delta', 'rho'},
    'deployment.deployment_model': {
        'model_name', 'model_name_details', 'actors', 'release_type', 'release_type_details',
        'data_source_type', 'data_source_type_details', 'access_type', 'access_type_details'},
    'deployment.accounting': {'post_processing', 'composition'},
    'deployment.implementation': {
        'preprocessing_and_hyperparameter_tuning', 'mechanisms', 'justification'},
    'deployment.administrative': {'sources', 'notes'}}
VALUES = {
    'status': {'Draft'}, 'tier': {1, 2, 3},
    'deployment.basic.data_product_type': {'Machine learning model'},
    'deployment.dp_variant.variant_name': {'Approximate DP'},
    'deployment.deployment_model.model_name': {'Central', 'Federated'},
    'deployment.deployment_model.release_type': {'One release'},
    'deployment.deployment_model.access_type': {'Non-interactive'}}
WORDS = {'name': 'Reviews: a "model"', 'curator': 'One, Two', 'description': 'Tells # moods.',
         'intended use': 'to test', 'region': 'Europe', 'publication date': '2026-11-28',
         'registry author': 'The author'}


def make_card(trust='central', steps=4, words=None, **fields):
  plan = tfdp.PrivacyPlan(**{**dict(
      population_size=1000, batch_size=50, steps=4, l2_norm_clip=2.0, noise_multiplier=1.5,
      target_delta=1e-5), **fields})
  card = tfdp.Ledger().begin(plan, 'dp_adam').done(steps).card(plots=False, trust=trust)
  return card.with_words([card_lib.Words(*one) for one in (words or {}).items()])


def validate(value, path=''):
  required, more = REQUIRED.get(path, {}), OPTIONAL.get(path, set())
  assert set(required) <= set(value) <= set(required) | more, path
  for name, item in value.items():
    where = f'{path}.{name}'.lstrip('.')
    assert isinstance(item, required.get(name, (str, float, dict, list))), where
    assert item in VALUES.get(where, [item]), where
    if isinstance(item, dict):
      validate(item, where)
    elif isinstance(item, list):
      assert item and all(isinstance(one, str) for one in item)


def read_yaml(text):
  """The part of YAML that the draft uses: mappings, lists, and scalars as JSON has them."""
  result = {}
  stack = [(-1, result)]
  for line in text.splitlines():
    indent = len(line) - len(line.lstrip())
    while stack[-1][0] >= indent:
      stack.pop()
    if line.lstrip().startswith('- '):
      parent, name = stack[-1][1]
      if not isinstance(parent[name], list):
        parent[name] = []
      parent[name].append(json.loads(line.lstrip()[2:]))
      continue
    target = stack[-1][1]
    if isinstance(target, tuple):
      target = target[0][target[1]]
    name, _, value = line.strip().partition(':')
    target[name] = json.loads(value) if value else {}
    if not value:
      stack.append((indent, (target, name)))
  return result


@pytest.mark.parametrize('fields', [
    {}, {'unit': 'user'}, {'adjacency': 'replace', 'sampling': tfdp.sampling.FixedOrder()},
    {'adjacency': 'add_remove', 'population_is_public': True}], ids=str)
@pytest.mark.parametrize('trust', ['central', 'federated', 'silo'])
def test_the_draft_of_the_registry_has_its_schema(fields, trust):
  card = make_card(trust, words=WORDS, **fields)
  draft = registry.fields(card)
  validate(draft)
  text = registry.to_yaml(draft)
  assert read_yaml(text) == json.loads(json.dumps(draft))
  parameters = draft['deployment']['privacy_loss']['privacy_parameters']
  assert card.epsilon <= parameters['epsilon'] <= 1.01 * card.epsilon + 1e-3
  assert re.search(r'\n +delta: 1\.0e-05\n', text)  # YAML 1.1 takes 1e-05 for a text.


@pytest.mark.parametrize('words, said', [
    ({name: text for name, text in WORDS.items() if name != 'region'}, "--words 'region=TEXT'"),
    ({**WORDS, 'publication date': 'soon'}, 'must be a date'),
    ({**WORDS, 'curator': ' , '}, 'must be names'),
    ({**WORDS, 'registry author': ','}, 'must be names')])
def test_the_registry_needs_what_only_the_author_can_say(words, said):
  with pytest.raises(ValueError, match=said):
    registry.fields(make_card(words=words))


@pytest.mark.parametrize('said, fields', [
    ('privacy loss distributions, of', {}),
    ('the exact Gaussian trade-off, of', {'sampling': tfdp.sampling.FixedOrder()}),
    pytest.param('Renyi differential privacy, of', {'search': tfdp.privacy.Search(runs=3)},
                 marks=pytest.mark.skipif(
                     not hasattr(dp_accounting, 'TruncatedSubsampledGaussianDpEvent'),
                     reason='needs dp-accounting 0.6.0'))])
def test_the_registry_names_the_accountant_that_computed_epsilon(said, fields):
  draft = registry.fields(make_card(words=WORDS, **fields))
  assert said in draft['deployment']['accounting']['composition']


def test_no_registry_without_a_guarantee():
  with pytest.raises(ValueError, match='with a guarantee'):
    registry.fields(make_card(words=WORDS, noise_multiplier=0.0))


def test_the_readme_has_front_matter_statement_and_blanks():
  card = make_card(words={'dataset': 'imdb, own', 'metrics': 'accuracy', 'limits': 'a [b](c)'})
  text = huggingface.readme(card)
  head, rest = text.split('---\n')[1:]
  assert head.startswith('library_name: keras\ntags:\n- differential-privacy\n- dp-sgd\n')
  assert 'datasets:\n- "imdb"\n- "own"\nmetrics:\n- "accuracy"\n' in head
  assert re.search(r'Guarantee: \(0\.\d+, 1e-05\)-differential privacy', rest)
  assert rest.count('*To be written by the author.*') == 3
  assert 'a \\[b\\](c)' in rest and 'No program has checked them.' in rest
  for section in huggingface.SECTIONS:
    assert f'\n## {section.capitalize()}\n' in rest


def test_one_release_has_no_tag_of_steps():
  ledger = tfdp.estimates.second_moments(np.zeros([9, 2]), noise_multiplier=2.0).ledger
  text = huggingface.readme(ledger.card(plots=False))
  assert '- differential-privacy\n- keras\n' in text and 'dp-sgd' not in text.split('---')[1]


def test_a_model_without_a_guarantee_has_no_tag_of_one():
  assert 'differential-privacy\n' not in huggingface.readme(make_card(noise_multiplier=0.0))


def test_the_folder_has_what_may_be_published(tmp_path, capsys):
  (tmp_path / 'card.json').write_text(card_json.to_json(make_card()))
  out = tmp_path / 'out'
  assert main.main(['card', str(tmp_path), '--format', 'huggingface', '--out', str(out)]) == 0
  assert sorted(path.name for path in out.iterdir()) == ['README.md', 'card.json']
  assert main.main(['card', str(tmp_path), '--format', 'registry', '--out', str(out)]) == 2
  said = capsys.readouterr().err
  assert said.count('\n') == 1 and "--words 'name=TEXT'" in said


@pytest.mark.parametrize('source', ['nothing', 'out'])
def test_a_folder_without_a_card_is_an_error(tmp_path, capsys, source):
  (tmp_path / 'out').mkdir()
  assert main.main(['card', str(tmp_path / source), '--format', 'huggingface']) == 2
  said = capsys.readouterr().err
  assert said.startswith('tfdp card: error: ') and said.count('\n') == 1
  assert 'must be a card' in said and 'No such file' in said


def test_a_draft_of_the_registry_is_no_card_and_blanks_are_no_words(tmp_path, capsys):
  draft = tmp_path / registry.NAME
  draft.write_text(registry.to_yaml({**registry.fields(make_card(words=WORDS)), 'more': 'fields'}))
  (tmp_path / 'card.json').write_text(card_json.to_json(make_card()))
  for arguments in (['card', str(draft)], ['verify', str(draft)],
                    ['card', str(tmp_path), '--words', 'name= '], ['card', str(tmp_path), '--words',
                                                                  ' =name']):
    assert main.main(arguments) == 2
    assert capsys.readouterr().err.count('\n') == 1


def test_weights_are_copied_and_a_file_with_secrets_is_not(tmp_path):
  from tfdp_adaptive.cli import card as command  # pylint: disable=import-outside-toplevel
  for name in ('model.weights.h5', 'model.keras'):
    np.save(tmp_path / name, np.ones(3))
    (tmp_path / f'{name}.npy').rename(tmp_path / name)
  out = tmp_path / 'out'
  out.mkdir()
  for name in ('model.weights.h5', 'model.keras'):
    command._with_weights(tmp_path / name, out)
  assert [path.name for path in out.iterdir()] == ['model.weights.h5']
