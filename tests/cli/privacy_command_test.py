# SPDX-License-Identifier: Apache-2.0
"""`tfdp privacy` answers what dp_accounting says, both ways round."""

import json
import sys

import dp_accounting
from dp_accounting import pld
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive.cli import main

PLAN = ['privacy', '--population-size', '17140', '--batch-size', '512', '--steps', '300']


def answer(capsys, *arguments):
  assert main.main([*PLAN, *arguments, '--json']) == 0
  return json.loads(capsys.readouterr().out)


def reference(noise_multiplier, delta):
  event = dp_accounting.PoissonSampledDpEvent(
      512 / 17140, dp_accounting.GaussianDpEvent(noise_multiplier))
  return pld.PLDAccountant().compose(event, 300).get_epsilon(delta)


def test_epsilon_of_a_noise_multiplier(capsys):
  content = answer(capsys, '--noise-multiplier', '.8')
  assert content['delta'] == 1e-5  # The largest power of ten below 1 / 17140.
  assert content['epsilon'] == pytest.approx(reference(.8, 1e-5), rel=1e-3)
  assert content['epsilon'] == pytest.approx(5.56, abs=.01)


def test_noise_multiplier_for_an_epsilon_and_back(capsys):
  sigma = answer(capsys, '--epsilon', '3', '--delta', '1e-6')['noise_multiplier']
  assert 2.97 <= reference(sigma, 1e-6) <= 3.001
  content = answer(capsys, '--noise-multiplier', repr(sigma), '--delta', '1e-6')
  assert 2.97 <= content['epsilon'] <= 3


def test_fixed_order_is_not_amplified(capsys):
  amplified = answer(capsys, '--noise-multiplier', '2')
  fixed = answer(capsys, '--noise-multiplier', '2', '--sampling', 'fixed-order')
  assert fixed['epsilon'] > 2 * amplified['epsilon']
  assert 'No amplification' in fixed['statement']


@pytest.mark.parametrize('scheme, method', [
    (['balls-in-bins'], 'privacy loss distributions'),
    (['random-allocation'], 'privacy loss distributions'),
    (['min-separation', '--min-sep', '3'], '100000 draws of the privacy loss')], ids=str)
def test_secret_patterns_are_amplified(scheme, method, capsys):
  same = ['--noise-multiplier', '2', '--delta', '4e-4', '--steps', '3', '--draws', '100000',
          '--population-size', '2048', '--sampling']
  content = answer(capsys, *same, *scheme)
  assert method in content['statement']
  assert 0 < content['epsilon'] < answer(capsys, *same, 'fixed-order')['epsilon']


def test_table_and_statement(capsys):
  assert main.main([*PLAN, '--noise-multiplier', '1', '--unit', 'user']) == 0
  out = capsys.readouterr().out
  assert 'noise multiplier  1\n' in out and 'unit              user' in out
  assert 'Unit and adjacency: The unit of privacy is one user' in out


def test_what_cannot_be_accounted_for_is_refused(capsys):
  arguments = [*PLAN, '--noise-multiplier', '1', '--sampling', 'fixed-order',
               '--adjacency', 'add_remove']
  assert main.main(arguments) == 2
  assert 'FixedOrder cannot be accounted for' in capsys.readouterr().err


@pytest.mark.parametrize('arguments', [
    ['--noise-multiplier', '0'], ['--noise-multiplier', '1e-300'], ['--noise-multiplier', '1e300'],
    ['--noise-multiplier', '1', '--population-size', '9' * 400], ['--epsilon', '-1'],
    ['--epsilon', 'x'], [],
    ['--epsilon', '1', '--noise-multiplier', '1'], ['--epsilon', '1', '--delta', '1']])
def test_wrong_numbers_are_usage_errors(arguments, capsys):
  with pytest.raises(SystemExit) as error:
    main.main([*PLAN, *arguments])
  assert error.value.code == 2
  said = capsys.readouterr().err
  assert said.startswith('tfdp privacy: error: ') and said.count('\n') == 1


def test_advice_is_that_of_the_library(capsys):
  arguments = PLAN + ['--noise-multiplier', '0.8', '--advise', '33000']
  advice = tfdp.advise(batch_size=512, noise_multiplier=0.8, parameters=33000, l2_norm_clip=1.0)
  main.main(arguments)
  assert str(advice) in capsys.readouterr().out
  main.main(arguments + ['--json'])
  assert json.loads(capsys.readouterr().out)['advice'] == advice.to_dict()


def test_a_budget_proposes_batch_size_and_steps(capsys):
  budget = ['privacy', '--population-size', '256', '--epsilon', '2', '--budget', '4096']
  assert main.main([*budget, '--advise', '100']) == 0
  assert 'proposed' in capsys.readouterr().out
  for wrong in ([*budget, '--steps', '3'], budget[:5]):
    with pytest.raises(SystemExit):
      sys.exit(main.main(wrong))
    assert '--budget' in capsys.readouterr().err
