# SPDX-License-Identifier: Apache-2.0
"""A card as a draft for the registry of differential privacy deployments.

The registry (of OpenDP, with NIST) has one YAML file a deployment, of a published schema. The draft
has the fields that follow from the card. The author gives the others in words.
"""

import datetime
import json
import re
from typing import Any, Dict, Iterator, List

from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import statement

NAME = 'registry.yaml'
# Words of the author: `--words ABOUT=TEXT` -> the field of the registry.
REQUIRED = {'name': 'name', 'curator': 'data_curators', 'description': 'description',
            'intended use': 'intended_use', 'region': 'data_product_region',
            'publication date': 'publication_date', 'registry author': 'registry_authors'}


def fields(card: card_lib.Card) -> Dict[str, Any]:
  """Returns the fields of the registry, as nested dictionaries.

  Raises:
    ValueError: If the card has no guarantee, or lacks words that the registry requires.
  """
  if card.epsilon is None:
    raise ValueError('A registry lists deployments with a guarantee. Received: a card without one '
                     f'({card.reason or "no reason given"}).')
  words = {own.about: own.text for own in card.words}
  missing = [about for about in REQUIRED if about not in words]
  if missing:
    raise ValueError('The registry needs what only you can say. Give '
                     + ' '.join(f"--words '{about}=TEXT'" for about in missing)
                     + f'. Received: words on {sorted(words) or "nothing"}.')
  try:
    date = datetime.date.fromisoformat(words['publication date']).isoformat()
  except ValueError as error:
    raise ValueError('The words on `publication date` must be a date such as 2026-11-28. '
                     f'Received: {words["publication date"][:40]}.') from error
  return {
      'url_slug': re.sub('[^a-z0-9]+', '-', words['name'].lower()).strip('-') or 'model',
      'status': 'Draft', 'tier': 3, 'deployment': {
          'basic': {
              'name': words['name'], 'data_curators': _listed(words['curator']),
              'intended_use': words['intended use'],
              'data_product_type': 'Machine learning model',
              'data_product_region': words['region'], 'description': words['description'],
              'publication_date': date},
          **_privacy(card, card.epsilon),
          'administrative': {'registry_authors': _listed(words['registry author'])}}}


def _privacy(card: card_lib.Card, epsilon: float) -> Dict[str, Any]:
  return {
      'dp_variant': {
          'variant_name': 'Approximate DP',
          'unprotected_quantities': '; '.join(statement.not_covered(card))},
      'privacy_loss': {
          'privacy_unit': f'{card.unit.capitalize()}-level',
          'privacy_unit_details': statement.neighbours(card),
          'privacy_parameters': {
              'epsilon': float(statement.rounded_up(epsilon)), 'delta': card.delta},
          'privacy_parameters_details': statement.guarantee(card)},
      'deployment_model': {
          'model_name': 'Central' if card.trust == 'central' else 'Federated',
          'release_type': 'One release', 'access_type': 'Non-interactive'},
      'accounting': {
          'composition': ' '.join((
              f'All {card.done} steps of {len(card.runs)} run(s) are composed.',
              *(statement.accounting(card, run) for run in card.runs if run.plan is not None)))},
      'implementation': {
          'mechanisms': ' '.join(text for run in card.runs if run.plan is not None
                                 for text in statement.described(run).values())}}


def _listed(text: str) -> List[str]:
  found = [one.strip() for one in text.split(',') if one.strip()]
  if not found:
    raise ValueError('The words on `curator` and on `registry author` must be names, with commas '
                     f'between them. Received: {text[:40]!r}.')
  return found


def to_yaml(value: Dict[str, Any]) -> str:
  """Returns nested dictionaries as YAML; strings are quoted as JSON, which YAML reads."""
  return '\n'.join(_lines(value, '')) + '\n'


def _lines(value: Dict[str, Any], indent: str) -> Iterator[str]:
  for name, item in value.items():
    if isinstance(item, dict):
      yield f'{indent}{name}:'
      yield from _lines(item, indent + '  ')
    elif isinstance(item, list):
      yield f'{indent}{name}:'
      yield from (f'{indent}  - {json.dumps(one, ensure_ascii=False)}' for one in item)
    else:
      # YAML 1.1 takes 1e-05 for a text, and 1.0e-05 for a number.
      text = json.dumps(item, ensure_ascii=False)
      number = isinstance(item, float) and 'e' in text and '.' not in text
      yield f'{indent}{name}: {text.replace("e", ".0e") if number else text}'


def files(card: card_lib.Card) -> Dict[str, str]:
  """Returns the draft by the name of its file."""
  return {NAME: to_yaml(fields(card))}
