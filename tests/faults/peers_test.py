# SPDX-License-Identifier: Apache-2.0
"""Defects that were found in other libraries, each with the test that we do not have it.

`python tests/faults/peers_test.py` writes the table into docs/faults.md.
"""

import ast
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp

ROOT = pathlib.Path(__file__).parents[2]
PAGE, HEAD = ROOT / 'docs' / 'faults.md', '| defect | test |\n|---|---|\n'
HERE = 'faults/peers_test.py'
# Defect of another library -> the test that would fail if this library had it.
DEFECTS = {
    'Chunks of a batch are Poisson samples of their own, accounted for as one':
        f'{HERE}::test_chunks_change_neither_batches_nor_epsilon',
    'Poisson sampling is accounted for, and shuffled batches are used':
        'keras/misuse_test.py::test_a_plan_wants_its_own_batches',
    'A noise multiplier is checked for the chunk instead of the batch; a budget has a tolerance':
        f'{HERE}::test_chunks_change_neither_batches_nor_epsilon',
    'A strategy with columns of norm below one adds too little noise':
        'mechanisms/mechanism_contract_test.py::test_columns_have_norm_one_at_most',
    'After its last row, a mechanism repeats that row':
        'privatizer_test.py::test_past_the_end_xla_releases_noise_alone_and_keeps_the_secret',
    'Dropout uses the same mask at every step':
        'clipping/bookkeeping_models_test.py::'
        'test_dropout_is_fresh_each_step_and_the_same_in_both_passes',
    'Batch normalization is accepted':
        'keras/misuse_test.py::test_layers_that_break_per_example_gradients',
    'A saved model does not load, or fails if a frozen weight comes before a trained one':
        'keras/features_test.py::'
        'test_weights_that_are_not_trained_may_come_first_also_in_a_saved_model',
    'The budget counts chunks as steps, so planned steps are refused':
        'keras/misuse_test.py::test_more_steps_than_planned_are_refused',
    'Every `fit` draws the same batches':
        f'{HERE}::test_no_global_seed_fixes_the_batches',
    'A global seed fixes the noise':
        'keras/noise_test.py::test_no_global_seed_fixes_the_noise',
    'An update is NaN if the second moment is zero':
        'rules/rules_contract_test.py::test_finite',
    'The expected batch size depends on a private number of records':
        'privacy/plan_test.py::test_the_private_size_of_a_population_stays_out_of_the_plan',
    'Rounding loses a step when epochs are converted to steps':
        'keras/habits_test.py::test_steps_in_epochs',
    'Sums are divided by the private batch size, and an empty batch fails':
        'keras/noise_test.py::test_an_empty_poisson_batch_is_a_step_of_pure_noise',
    'Neighboring seeds share noise, and the clock is the default seed':
        'noise/noise_keys_test.py::test_children_and_chain_never_meet',
    'A key drawn while a graph is built is reused in every run of the graph':
        'noise/noise_keys_test.py::'
        'test_system_keys_are_fresh_in_eager_mode_and_at_every_run_of_a_graph',
    'A compiled step adds the same noise at every call':
        'keras/noise_test.py::test_steps_fits_and_optimizers_never_share_noise',
    'A restored state repeats noise for other records':
        'keras/noise_test.py::test_restoring_never_repeats_noise',
    'The same key gives different noise when compiled':
        'noise/noise_gaussian_test.py::test_xla_draws_the_same_numbers',
    'Normal draws are truncated because the uniform draws behind them are':
        'noise/noise_gaussian_test.py::test_tensorflows_own_normals_would_not_do',
    'Every replica adds its own noise, or the same noise is added more than once':
        'noise/noise_distribute_test.py::test_replicas_have_the_noise_of_one_device',
    'A private round returns exact metrics of clients':
        'federated/processes_test.py::'
        'test_nothing_exact_about_the_clients_comes_out',
    'Unclipped gradients, or the gradient of a summed loss, are noised as if they were clipped':
        'keras/misuse_test.py::test_ready_made_gradients_are_refused',
}


def rows():
  return ''.join(f'| {what} | `tests/{test}` |\n' for what, test in DEFECTS.items())


@pytest.mark.parametrize('test', sorted(set(DEFECTS.values())))
def test_the_test_exists(test):
  path, name = test.split('::')
  tree = ast.parse((ROOT / 'tests' / path).read_text(encoding='utf-8'))
  assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_page_has_the_table():
  assert HEAD + rows() in PAGE.read_text(encoding='utf-8'), f'Run `python tests/{HERE}`.'


def make_plan():
  return tfdp.PrivacyPlan.calibrate(
      target_epsilon=1.0, target_delta=1e-5, population_size=100, batch_size=8, steps=20,
      l2_norm_clip=1.0)


def test_chunks_change_neither_batches_nor_epsilon():
  plan = make_plan()
  assert plan.epsilon() <= 1.0  # By no tolerance.
  whole, chunked = tfdp.DPSGD(plan=plan), tfdp.DPSGD(
      plan=plan, performance=tfdp.Performance(accumulation_steps=8))
  assert chunked.epsilon() == whole.epsilon() == plan.epsilon()
  assert chunked.noise_multiplier == plan.noise_multiplier and chunked.batch_size == 8
  with pytest.raises(ValueError, match='come from the plan'):
    tfdp.DPSGD(plan=plan, noise_multiplier=1.0,
               performance=tfdp.Performance(accumulation_steps=8))


def test_no_global_seed_fixes_the_batches():
  plan, drawn = make_plan(), []
  for _ in range(2):
    np.random.seed(0)
    tf.random.set_seed(0)
    drawn.append(np.concatenate(list(plan.index_batches())).tolist())
  assert drawn[0] != drawn[1]


if __name__ == '__main__':
  text = PAGE.read_text(encoding='utf-8')
  before, _, after = text.partition(HEAD)
  rest = after.splitlines(keepends=True)
  while rest and rest[0].startswith('|'):
    del rest[0]
  PAGE.write_text(before + HEAD + rows() + ''.join(rest), encoding='utf-8')
