# SPDX-License-Identifier: Apache-2.0
"""The privacy proof is short because few functions draw noise or see records: here they are.

Whoever adds one must put it on the list, and so say why it may.
"""

import ast

import build_deps_test
import pytest

# Callers of a source of random numbers that are used as noise, or for sampling.
NOISE = {
    'the rows of a mechanism, on flat vectors': {
        'noise.streams.independent_gaussian', 'noise.banded.from_outputs.advance',
        'noise.blt.buffered.advance',
        'noise.regenerated._regenerated.advance.term', 'noise.tree.online.advance.draw'},
    'the noise of everything a rule sees': {'privatizer.Privatizer.draw'},
    'estimates before training, with their own cost': {
        'estimates.adaptation._moments', 'estimates.moments._noised',
        'estimates.stddevs.private_stddevs',
        'estimates.vocabulary.private_vocabulary'},
    'the score of a run among many, of which the best is released': {
        'accounting.private_search.noisy_score'},
    'which records take part': {'accounting.scheme.bernoulli'},
    'the dropout of a client, which is its own': {'federated.local_training._draw_seeds'},
    'made-up inputs, which are public': {'examples.synthetic.pink_noise'},
    'made-up inputs and errors of a layer that is checked': {
        'clipping.comparison._candidates.moved', 'clipping.comparison._gradients'},
    'the draws of an accountant': {
        'accounting.monte_carlo.BallsInBinsDpEvent.losses',
        'accounting.monte_carlo.MinSeparationDpEvent._chunk'},
}
# Code that turns records, or gradients of single records, into sums.
RECORDS = {
    'engines and their parts': {
        'clipping.chunks.chunked.run', 'clipping.chunks.chunked.run.chunk',
        'clipping.chunks.over_views.run',
        'clipping.chunks.rows_within.needed', 'clipping.engines.guarded.run',
        'clipping.engines.record_gradients', 'clipping.materialized.layered',
        'clipping.materialized.layered.block',
        'clipping.materialized._project'},
    'public records, which rules may see': {'clipping.engines.public_gradients'},
    'the step of a private model': {'keras.step.clip'},
    'one record of a query, at its owner\'s': {
        'private_rule.PrivateRule.record'},
}
_NOISE_CALLS = {'standard_normal', 'normal', 'vectors', 'stateless_normal',
                'random_normal', 'truncated_normal', 'laplace', 'gumbel', 'exponential', 'binomial',
                'uniform'}
_RECORD_CALLS = {'project_record', 'record_gradients', 'layered_gradients', 'jacobian', 'chunked',
                 'engine', 'choose', 'sum_records', 'scaled_norm', 'preprocess_record',
                 'batch_jacobian'}
# Made-up examples and data sets, sketches of public data, plans: no record, no release.
_NOT_OF_A_RUN = ('advice.', 'audit.', 'examples.multi_worker.', 'examples.recipes.',
                 'examples.showcases.', 'rules.subspaces.',
                 'independence.independence.', 'independence.probes.', 'independence.validation.',
                 'keras.first_step.')


def functions(names, also=()):
  """Dotted names of the library's functions that call something of one of these names."""
  callers = set()

  def visit(node, inside):
    for child in ast.iter_child_nodes(node):
      named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
      if isinstance(child, ast.Call):
        called = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(
            child.func, 'id', '')
        if called in names or ast.unparse(child.func).endswith(tuple(also) or ('\0',)):
          callers.add(inside)
      visit(child, f'{inside}.{child.name}' if named else inside)

  for module, path in build_deps_test.modules().items():
    text = (build_deps_test.ROOT / path).read_text(encoding='utf-8')
    visit(ast.parse(text), module.partition('.')[2])
  return {name for name in callers if not name.startswith(_NOT_OF_A_RUN)}


@pytest.mark.parametrize('expected, callers', [
    (NOISE, functions(_NOISE_CALLS, ('_noise.next', '_noise.draw'))),
    (RECORDS, functions(_RECORD_CALLS))], ids=['noise', 'records'])
def test_the_list_is_complete(expected, callers):
  listed = {name for names in expected.values() for name in names}
  assert not callers - listed, 'New functions: add them with their reason, or do without.'
  assert not listed - callers, 'These are gone: take them off the list.'


def test_rules_neither_draw_nor_see_records():
  every = functions(_NOISE_CALLS | _RECORD_CALLS, ('_noise.next',))
  assert every and not [name for name in every if name.startswith('rules.')]
