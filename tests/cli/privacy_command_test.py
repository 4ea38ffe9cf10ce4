# SPDX-License-Identifier: Apache-2.0
"""`tfdp privacy` answers what dp_accounting says, both ways round."""

import json
import math
import pathlib
import re

import dp_accounting
from dp_accounting import pld
import pytest
from scipy import optimize
from scipy import stats

import tfdp_adaptive as tfdp
from tfdp_adaptive.cli import main
from tfdp_adaptive.cli import privacy

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'guides' / 'check_a_claim.md'

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


def gaussians(noise_multiplier, count, delta):
  """Epsilon of so many Gaussian mechanisms, in closed form: they are one of mu = sqrt(k) / s."""
  mu = math.sqrt(count) / noise_multiplier
  law = stats.norm.cdf
  return optimize.brentq(
      lambda epsilon: law(mu / 2 - epsilon / mu)
      - math.exp(epsilon) * law(-mu / 2 - epsilon / mu) - delta, 0, 500)


# Published claims of the page "Check a claim": epsilon if batches are Poisson samples, and if not.
@pytest.mark.parametrize('batch_size, steps, noise_multiplier, poisson, epochs', [
    ('256', '4680', .4773, 14.79, 20), ('600', '10000', 4.0, .947, 100),
    ('256', '14040', 1.12, 2.308, 60)])
def test_a_published_claim(batch_size, steps, noise_multiplier, poisson, epochs, capsys):
  arguments = ['--population-size', '60000', '--batch-size', batch_size, '--steps', steps,
               '--noise-multiplier', str(noise_multiplier)]
  content = answer(capsys, *arguments)
  assert content['epsilon'] == pytest.approx(poisson, rel=1e-3)
  expected = gaussians(noise_multiplier, epochs, 1e-5)
  assert content['shuffled']['epsilon'] == pytest.approx(expected, rel=1e-3)
  assert f'in each of {epochs} epochs' in content['shuffled']['words']
  row = next(line for line in PAGE.read_text(encoding='utf-8').splitlines()
             if f'| {noise_multiplier:g} |' in line)
  assert [f'{content["epsilon"]:.3g}', f'{content["shuffled"]["epsilon"]:.3g}'] == [
      cell.strip() for cell in row.split('|')[-3:-1]]


def test_an_epoch_without_its_last_batch_is_an_epoch(capsys):
  # 300 epochs of 33 whole batches are 9900 steps, which is 292 epochs of 34.
  content = answer(capsys, '--steps', '9900', '--noise-multiplier', '9')
  assert content['shuffled']['epsilon'] == pytest.approx(gaussians(9, 300, 1e-5), rel=1e-3)


@pytest.mark.parametrize('arguments, words', [
    (['--unit', 'user', '--sampling', 'poisson-examples:3'], 'several examples of a user'),
    (['--adjacency', 'add_remove'], 'no epsilon can be stated. FixedOrder cannot')])
def test_no_epsilon_of_shuffled_batches_where_none_is_known(arguments, words, capsys):
  shuffled = answer(capsys, '--noise-multiplier', '2', '--steps', '3', *arguments)['shuffled']
  assert shuffled['epsilon'] is None and words in shuffled['words']


@pytest.mark.thorough
def test_every_sampling_can_be_planned(capsys):
  for scheme in tfdp.sampling.SCHEMES.values():
    kebab = re.sub('(?<=[a-z])(?=[A-Z])', '-', scheme.__name__).lower()
    size = privacy.SAMPLINGS[kebab][0] and ':520'
    if kebab == 'cyclic-poisson':
      size = ':2'
    content = answer(
        capsys, '--noise-multiplier', '.7', '--steps', '3', '--sampling', kebab + (size or ''),
        '--population-size', '2048', '--draws', '5000', '--delta', '.01',
        *(['--unit', 'user'] if scheme is tfdp.sampling.PoissonExamples else []))
    assert 0 < content['epsilon']
    assert ('shuffled' in content) == (scheme is not tfdp.sampling.FixedOrder)


def test_correlated_noise_is_the_plans_own(capsys, tmp_path):
  steps, bands = 40, 4
  arguments = ['--population-size', '2048', '--steps', str(steps), '--noise-multiplier', '2',
               '--delta', '1e-4', '--sampling', f'cyclic-poisson:{bands}']
  content = answer(capsys, *arguments, '--mechanism', f'banded-toeplitz:{bands}')
  mechanism = tfdp.mechanisms.BandedToeplitz(bands, steps)
  plan = tfdp.PrivacyPlan(
      population_size=2048, batch_size=512, steps=steps, noise_multiplier=2.0, target_delta=1e-4,
      l2_norm_clip=1.0, sampling=tfdp.sampling.CyclicPoisson(bands), mechanism=mechanism)
  assert content['epsilon'] == pytest.approx(plan.epsilon(), rel=1e-6)
  mechanism.save(tmp_path / 'mechanism.json')
  of_file = answer(capsys, *arguments, '--mechanism', str(tmp_path / 'mechanism.json'))
  assert of_file['epsilon'] == content['epsilon']
  assert 'in the same order' in content['shuffled']['words']


@pytest.mark.parametrize('arguments', [
    ['--sampling', 'coins'], ['--sampling', 'poisson:3'], ['--sampling', 'cyclic-poisson'],
    ['--sampling', 'cyclic-poisson:x'], ['--mechanism', 'blt:3'], ['--mechanism', 'blt'],
    ['--mechanism', 'nothing.json'], ['--mechanism', __file__ + '/x.json']])
def test_wrong_samplings_and_mechanisms_are_usage_errors(arguments, capsys):
  assert main.main([*PLAN, '--noise-multiplier', '1', *arguments]) == 2
  said = capsys.readouterr().err
  assert said.startswith('tfdp privacy: error: ') and said.count('\n') == 1


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
  assert '\nIf the batches are shuffled instead: epsilon ' in out


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
