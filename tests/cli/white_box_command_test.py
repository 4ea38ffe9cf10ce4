# SPDX-License-Identifier: Apache-2.0
"""`tfdp audit --white-box`: what it reports, and its exit status."""

import json

import pytest

from tfdp_adaptive import privatizer
from tfdp_adaptive.cli import main

# As sure as a test must be: the noise is another each time.
COMMAND = ['audit', '--white-box', '--canaries', '64', '--batch-size', '8', '--steps', '6',
           '--confidence', '0.999999']


def test_a_claim_that_holds(capsys):
  assert main.main([*COMMAND, '--epsilon', '2']) == 0  # The default method.
  text = capsys.readouterr().out
  assert 'White-box audit of DPAdamSTP: epsilon <= 2' in text and 'Not refuted' in text
  assert 'violated' not in text.lower()


def test_a_claim_that_does_not_hold(capsys, monkeypatch):
  add = privatizer._sum
  monkeypatch.setattr(privatizer, '_sum', lambda value, row, std, asked: add(
      value, row, std / 2, asked))
  assert main.main([*COMMAND, '--method', 'DPAdam', '--set', 'l2_norm_clip=3']) == 3
  assert 'The claim is violated' in capsys.readouterr().out


@pytest.mark.thorough
def test_json_without_a_guarantee(capsys):
  assert main.main([*COMMAND, '--method', 'NonPrivateNoiselessAdam', '--json']) == 0
  report = json.loads(capsys.readouterr().out)
  assert report['vacuous'] and not report['violated'] and report['claimed'] is None
  assert main.main([*COMMAND, '--method', 'NonPrivateNoiselessAdam', '--epsilon', '4']) == 3


@pytest.mark.parametrize('arguments, message', [
    (['--white-box', '--batch-size', '100', '--canaries', '50'], '--batch-size must be at most'),
    (['--white-box', '--canaries', '8', '--batch-size', '4'], '--canaries must be at least 16'),
    (['--white-box', '--set', 'momentum=1'], '--set must name one of'),
    (['--method', 'DPYogi'], 'needs --white-box')])
def test_what_cannot_be_audited(arguments, message, capsys):
  assert main.main(['audit', *arguments]) == 2
  assert message in capsys.readouterr().err
