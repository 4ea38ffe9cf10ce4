# SPDX-License-Identifier: Apache-2.0
"""`tfdp audit`: what it reports, and its exit status."""

import dataclasses
import json

import numpy as np
import pytest

from tfdp_adaptive.cli import main
from tfdp_adaptive.examples import compare


@pytest.fixture(scope='module')
def command(tmp_path_factory):
  path = tmp_path_factory.mktemp('data')
  rng = np.random.default_rng(0)
  words = [first + second for first in 'bcdfghlm' for second in ('at', 'en', 'ig', 'op', 'um')]
  (path / 'text.txt').write_text('\n\n'.join(
      ' '.join(rng.choice(words, 8)) + '.' for _ in range(120)), encoding='utf-8')
  (path / 'words.txt').write_text('\n'.join(words), encoding='utf-8')
  return ['audit', '--data', str(path / 'text.txt'), '--vocabulary', str(path / 'words.txt'),
          '--batch-size', '32', '--method', 'dp_adam']


@pytest.mark.thorough
def test_a_private_run_is_consistent(command, capsys):
  assert main.main([*command, '--steps', '5', '--canaries', '80', '--json']) == 0
  report = json.loads(capsys.readouterr().out)
  assert report['canaries'] == 80 and not report['violated']
  assert 3.9 <= report['claimed_epsilon'] <= 4 and report['epsilon_lower'] <= 4
  assert report['method'] == 'DP-Adam' and report['confidence'] == .95


@pytest.mark.thorough
def test_training_without_noise_is_refuted(command, capsys, monkeypatch):
  """The claim is a tiny epsilon, but what runs adds hardly any noise."""
  prepare = compare.prepare

  def leaky(task, method, settings, plan):
    task = task._replace(log_frequencies=np.zeros(task.num_ids))  # Made-up words.
    model, batches, optimizer = prepare(
        task, method, dict(settings, l2_norm_clip=100.),
        dataclasses.replace(plan, noise_multiplier=1e-6))
    object.__setattr__(optimizer.plan, 'epsilon', lambda *_, **__: .01)
    return model, batches, optimizer

  monkeypatch.setattr(compare, 'prepare', leaky)
  assert main.main([*command, '--steps', '100', '--canaries', '80',
                    '--set', 'learning_rate=0.05', '--set', 'epsilon=1e-6']) == 1
  assert 'THE CLAIM IS REFUTED' in capsys.readouterr().out


@pytest.mark.thorough
def test_an_audit_that_can_prove_nothing_says_so(command, capsys):
  assert main.main([*command, '--steps', '2', '--canaries', '20']) == 0
  text = capsys.readouterr().out
  assert 'can prove NOTHING' in text and 'It would take' in text


@pytest.mark.thorough
def test_too_many_canaries(command, capsys):
  assert main.main([*command, '--canaries', '4000']) == 2
  assert '--canaries must be from 2 to the number of training sentences' in capsys.readouterr().err


def test_confidence_too_close_to_one(command, capsys):
  with pytest.raises(SystemExit):
    main.main([*command, '--confidence', '.9999999999999999'])
  assert 'at most 1 - 1e-9' in capsys.readouterr().err
