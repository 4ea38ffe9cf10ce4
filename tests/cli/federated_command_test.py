# SPDX-License-Identifier: Apache-2.0
"""`tfdp federated` and `tfdp demo` on a few users."""

import json

import dp_accounting
from dp_accounting import pld
import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive.cli import main
from tfdp_adaptive.examples import settings
from tfdp_adaptive.examples import showcases

WORDS = ('the', 'cat', 'dog', 'sees', 'hears', 'and', 'runs', 'away')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A text of 30 clients with one to four sentences each, and its public vocabulary."""
  path = tmp_path_factory.mktemp('data')
  rng = np.random.default_rng(0)
  with open(path / 'text.jsonl', 'w', encoding='utf-8') as stream:
    for client in range(30):
      for _ in range(1 + client % 4):
        text = f'The {rng.choice(WORDS[1:3])} {rng.choice(WORDS[3:5])} it and runs away.'
        stream.write(json.dumps({'client': f'c{client}', 'text': text}) + '\n')
  (path / 'words.txt').write_text('\n'.join(WORDS), encoding='utf-8')
  return path


def arguments(command, folder, *more):
  return [command, '--data', str(folder / 'text.jsonl'), '--vocabulary',
          str(folder / 'words.txt'), '--clients-per-round', '5', '--rounds', '2', *more]


def results(path):
  return json.loads((path / 'results.json').read_text(encoding='utf-8'))


@pytest.mark.thorough
def test_the_demo_has_both_parts_in_one_table(folder, capsys, monkeypatch):
  few = {name: settings.CENTRALIZED[name] for name in ('adam', 'dp_sgd')}
  monkeypatch.setattr(settings, 'CENTRALIZED', few)
  shown = []
  monkeypatch.setattr(showcases, 'run', lambda case, report, tune: shown.append(case.part))
  out = folder / 'demo'
  assert main.main(arguments(
      'demo', folder, '--steps', '2', '--batch-size', '16', '--out', str(out))) == 0
  assert shown == ['scales', 'noise']
  content = results(out)
  private = {(row['part'], row['method']): row for row in content['rows']
             if row['epsilon'] is not None}
  assert set(private) == (
      {('centralized', 'DP-SGD')}
      | {('federated', method.label) for method in settings.FEDERATED.values()})
  assert {'DP-Adam', 'DP-AdamSTP'} <= {method for part, method in private if part == 'federated'}
  for (part, _), row in private.items():
    assert row['unit'] == {'centralized': 'sentence', 'federated': 'client'}[part]
    assert np.isfinite(row['loss']) and [point[0] for point in row['curve']] == [0, 1, 2]

  statement = (out / 'privacy.txt').read_text(encoding='utf-8')
  federated = statement[statement.index('(federated) =='):]
  sigma = float(federated.split('noise multiplier ')[1].split(',')[0])
  event = dp_accounting.PoissonSampledDpEvent(
      5 / content['clients'], dp_accounting.GaussianDpEvent(sigma))
  expected = pld.PLDAccountant().compose(event, 2).get_epsilon(1e-2)
  assert private['federated', 'DP-Adam']['epsilon'] == pytest.approx(expected, rel=1e-3)
  assert 'at the level of one user' in federated
  card = json.loads((out / 'card_federated.json').read_text())['card']
  assert card['trust'] == 'federated' and 'What the server sees' in ' '.join(card['facts'])
  assert 'a trusted server' in (out / 'card_federated.md').read_text()
  assert json.loads((out / 'card_centralized.json').read_text())['card']['trust'] == 'central'
  assert (out / 'curves.png').stat().st_size > 10_000
  printed = capsys.readouterr().out
  assert ' client ' in printed and ' sentence ' in printed and str(out / 'privacy.txt') in printed


@pytest.mark.parametrize('text, message', [
    ('{"text": "one two three"}', '`client` is missing in a line'),
    ('one two three', 'plain text does not say whose it is'),
])
def test_text_without_users_is_refused(tmp_path, text, message, capsys):
  (tmp_path / 'text').write_text(text, encoding='utf-8')
  assert main.main(['federated', '--data', str(tmp_path / 'text')]) == 2
  assert message in capsys.readouterr().err


def test_too_many_clients_per_round(folder, capsys):
  assert main.main(arguments('federated', folder, '--clients-per-round', '31')) == 2
  assert 'at most the number of training clients' in capsys.readouterr().err


@pytest.mark.thorough
def test_an_unfinished_run_goes_on_as_it_was_begun_or_not_at_all(folder, capsys, monkeypatch):
  from tfdp_adaptive.federated import run as run_lib  # pylint: disable=import-outside-toplevel

  def interrupt(*_):
    raise KeyboardInterrupt

  out = folder / 'begun'
  command = arguments('federated', folder, '--methods', 'dp_adam', '--out', str(out))
  with monkeypatch.context() as patch:
    patch.setattr(run_lib.Releases, 'release', interrupt)
    assert main.main(command) == 130
  state = out / 'federated.state' / 'dp_adam' / 'state.npz'
  saved = state.read_bytes()
  assert main.main([*command, '--rounds', '3']) == 2
  error = capsys.readouterr().err
  received, expected = error.split('Received: ')[1].split('Expected: ')
  assert "'steps': 3" in received and "'steps': 2" in expected
  assert 'or give another folder' in error and 'population_size' not in error
  (folder / 'other').mkdir()
  other = folder / 'other' / 'text.jsonl'  # As many sentences of the same clients.
  text = (folder / 'text.jsonl').read_text(encoding='utf-8')
  other.write_text(text.replace('cat', 'dog'), encoding='utf-8')
  assert main.main([*command, '--data', str(other)]) == 2
  assert 'an unfinished run with other data or arguments' in capsys.readouterr().err
  assert state.read_bytes() == saved
  state.write_bytes(saved[:-50])
  assert main.main(command) == 2
  assert 'cannot be read: ' in capsys.readouterr().err and state.read_bytes() == saved[:-50]
  state.write_bytes(saved)
  assert main.main(command) == 0


@pytest.mark.thorough
def test_a_run_that_lost_its_worker_goes_on(folder, capsys, monkeypatch):
  from tfdp_adaptive.federated import rounds  # pylint: disable=import-outside-toplevel
  run, taken = rounds.run, []

  def losing(*arguments, **more):
    taken.append(0)
    if len(taken) == 2:
      raise tfdp.federated.WorkerLostError('The worker was lost.')
    return run(*arguments, **more)

  monkeypatch.setattr(rounds, 'run', losing)
  out = folder / 'lost'
  command = arguments('federated', folder, '--methods', 'dp_adam', '--out', str(out))
  assert main.main(command) == 2
  assert f'The worker was lost. Give the same command with --out {out}' in capsys.readouterr().err
  assert main.main(['compare', *command[1:5], '--batch-size', '8', '--out', str(out)]) == 2
  assert 'belongs to an unfinished run of another command' in capsys.readouterr().err
  assert main.main(command) == 0
  assert len(taken) == 3  # One round was done, one lost, and that one taken again.
  assert [row['method'] for row in results(out)['rows']][1:] == ['DP-Adam']
  assert [point[0] for point in results(out)['rows'][1]['curve']] == [0, 1, 2]
  assert not list(out.glob('*.state'))
  assert main.main(command) == 2
  assert 'exists and would be overwritten' in capsys.readouterr().err
