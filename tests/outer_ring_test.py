# SPDX-License-Identifier: Apache-2.0
"""The outer packages use public names, and these inner modules; the list may only shrink."""

import layers_test
import pytest

import tfdp_adaptive

# Package -> the modules of other packages that it imports and users do not. Delete a module that
# a package no longer needs. Make a name public, or move it, before you add one.
INNER = {
    'advice': (
        'clipping.bookkeeping clipping.engines clipping.interface clipping.losses '
        'contract independence.disclosures independence.validation '
        'keras.first_step keras.named_optimizers keras.private mechanisms.workload private_rule '
        'terms'),
    'audit': (
        'accounting.gaussian accounting.second_accountant batches.sources batches.tags contract '
        'keras.model keras.optimizer keras.private noise.keys noise.streams '
        'privacy.plan_checks'),
    'cli': (
        'examples.audit examples.compare examples.demo examples.designs examples.federated '
        'examples.report examples.settings examples.tasks examples.white_box gate '
        'mechanisms.registry privacy.card privacy.weight_digests report.card_checks '
        'report.card_json report.card_page report.replay report.signing'),
    'estimates': (
        'accounting.cost batches.sources contract independence.disclosures '
        'keras.weight_ledger mechanisms.progress privacy.ledger terms'),
    'federated': (
        'batches.digests batches.passes batches.sampling_seed batches.sources contract '
        'estimates.vocabulary keras.weight_ledger noise noise.keys privacy.card privacy.ledger '
        'privacy.statement privacy.weight_digests private_rule privatizer'),
    'queries': (
        'clipping.choices clipping.projection contract noise private_rule '
        'privatizer weights'),
    'report': (
        'accounting.gaussian accounting.second_accountant batches.digests '
        'batches.sampling_seed batches.tags privacy.card privacy.entry privacy.statement '
        'privacy.weight_digests terms'),
}
# The lowest layer is for every component.
SHARED = layers_test.LAYERS[0]
# pylint: disable=protected-access
PUBLIC = {f'tfdp_adaptive.{name}' for name in tfdp_adaptive._SUBPACKAGES} | {
    f'tfdp_adaptive.{module}.{name}' for name, module in tfdp_adaptive._EXPORTS.items()}


def inner(package):
  """Returns the modules of other packages that a package imports, without the public ones."""
  return {name[len('tfdp_adaptive.'):]
          for module in layers_test.MODULES if layers_test.layer(module) == package
          for name in layers_test.imports(module)
          if name.startswith('tfdp_adaptive.') and name not in PUBLIC
          and layers_test.layer(name) not in (package, *SHARED)}


@pytest.mark.parametrize('package', sorted(INNER))
def test_an_outer_package_imports_no_other_inner_module(package):
  found, listed = inner(package), set(INNER[package].split())
  assert not found - listed, 'Use a public name, make the name public, or move it.'
  assert not listed - found, 'These are no longer needed: delete them from the list.'


def test_public_modules_do_not_count():
  assert 'tfdp_adaptive.mechanisms' in PUBLIC and 'tfdp_adaptive.accounting.sampling' in PUBLIC
  assert 'terms' in inner('advice') and 'errors' not in inner('audit')
