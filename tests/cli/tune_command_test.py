# SPDX-License-Identifier: Apache-2.0
"""`tfdp tune`: one epsilon for all runs, and nothing of those that lost."""

import json

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import tuning
from tfdp_adaptive.accounting import cost
from tfdp_adaptive.cli import main
from tfdp_adaptive.examples import compare
from tfdp_adaptive.examples import settings
from tfdp_adaptive.examples import tune

pytestmark = pytest.mark.skipif(
    not cost._HAS_TRUNCATED, reason='needs a current dp-accounting')
WORDS = ('the', 'cat', 'dog', 'sees', 'and', 'runs', 'away')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('data')
  rng = np.random.default_rng(0)
  (path / 'text.jsonl').write_text('\n'.join(
      json.dumps({'client': i % 40, 'text': f'The {rng.choice(WORDS[1:3])} sees and runs away.'})
      for i in range(400)), encoding='utf-8')
  (path / 'words.txt').write_text('\n'.join(WORDS), encoding='utf-8')
  return path


def command(folder, out, *more):
  return ['tune', '--data', str(folder / 'text.jsonl'), '--vocabulary', str(folder / 'words.txt'),
          '--batch-size', '32', '--steps', '2', '--method', 'dp_sgd', '--out', str(folder / out),
          '--runs', '3', '--grid', 'learning_rate=0.25,0.5', *more]


@pytest.mark.slow
def test_an_interrupted_search_goes_on_and_saves_the_best_run(folder, monkeypatch, capsys):
  monkeypatch.setattr(tfdp.privacy.Search, 'draw', lambda self: 2)
  coins, trained = iter([1, 0]), []
  monkeypatch.setattr(tuning.secrets, 'randbelow', lambda most: next(coins))
  monkeypatch.setattr(tune, 'sentence_scores', lambda model, x, y: np.full(len(y), len(trained)))
  prepare = compare.prepare

  def interrupted(task, method, tried, plan):
    trained.append(tried)
    if len(trained) == 2:
      raise KeyboardInterrupt
    return prepare(task, method, tried, plan)

  monkeypatch.setattr(compare, 'prepare', interrupted)
  assert main.main(command(folder, 'run')) == 130
  assert (folder / 'run' / 'tune.state').exists()
  assert main.main(command(folder, 'run', '--json')) == 0
  assert [one['learning_rate'] for one in trained[:3]] == [.5, .25, .25]
  row = json.loads(capsys.readouterr().out)['rows'][1]
  assert 3.9 < row['epsilon'] <= 4 and row['seconds_per_step'] is None
  rate = row['settings']['learning_rate']  # Noise decides: scores beyond 1 count as 1.
  assert rate in (.25, .5)
  assert row['settings'] == {**settings.CENTRALIZED['dp_sgd'].settings, 'learning_rate': rate}
  out = folder / 'run'
  assert sorted(p.name for p in out.iterdir()) == [
      'card.html', 'card.json', 'card.md', 'model.keras', 'privacy.txt', 'results.json',
      'vocabulary.txt']
  text = (out / 'privacy.txt').read_text(encoding='utf-8')
  assert 'Selection: the best of a secret, random number of runs (geometric, 3 expected)' in text
  assert 'Settings were chosen by this command' in text and 'recorded ones' not in text


@pytest.mark.parametrize('more, words', [
    (('--runs', '.5'), 'a number from 1 to 10000'), (('--shape', 'nan'), 'from 0 to 100'),
    (('--grid', 'colour=1'), '--grid must name one of'),
    (('--grid', 'learning_rate=1,x'), '--grid learning_rate must be a positive number'),
    (('--epsilon', '.1'), 'number of runs alone')])
def test_what_cannot_be_is_said_in_one_line(folder, capsys, more, words):
  try:
    status = main.main(command(folder, 'refused', *more))
  except SystemExit as error:
    status = error.code
  assert status == 2 and words in capsys.readouterr().err


def test_scores_are_shares_of_words():
  model = lambda x, training: np.eye(4)[np.asarray(x)]
  targets = np.array([[1, 2, 3], [1, 1, 0], [0, 0, 0]])
  padding = tune.next_word.PADDING
  assert padding == 0
  scores = tune.sentence_scores(model, np.array([[1, 2, 2], [1, 2, 3], [1, 1, 1]]), targets)
  np.testing.assert_allclose(scores, [2 / 3, 1 / 2, 0])
