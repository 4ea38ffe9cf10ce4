# SPDX-License-Identifier: Apache-2.0
"""`tfdp card` and `tfdp verify`: what they print, and with which status they end."""

import json

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive.cli import main
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import weight_digests
from tfdp_adaptive.report import card_json

WEIGHTS = [np.ones([2, 3], np.float32), np.zeros(3, np.float32)]


@pytest.fixture(scope='module', name='folder')
def make_folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('card')
  plan = tfdp.PrivacyPlan(population_size=1000, batch_size=50, steps=4, l2_norm_clip=2.0,
                          noise_multiplier=1.5, target_delta=1e-5)
  ledger = tfdp.Ledger().begin(plan, 'dp_adam').done(4)
  card = ledger.card(plots=False, weights=weight_digests.of(WEIGHTS))
  (folder / 'card.json').write_text(card_json.to_json(card))
  np.savez(folder / 'weights.npz', *WEIGHTS)
  np.savez(folder / 'others.npz', WEIGHTS[0] + 1, WEIGHTS[1])
  content = json.loads((folder / 'card.json').read_text())
  content['card']['epsilon'] *= 0.9
  (folder / 'edited.json').write_text(json.dumps(content))
  (folder / 'NaN.json').write_text(json.dumps(content).replace('true', 'NaN'))
  content['card']['epsilon'] /= 0.9
  plan = content['card']['runs'][0]['plan']['content']['plan']
  plan['sampling'] = {'kind': 'TruncatedPoisson', 'config': {'max_batch_size': 1}}
  (folder / 'refused.json').write_text(json.dumps(content))
  (folder / 'empty').mkdir()
  (folder / 'registry.yaml').write_text('deployment:\n  name: x\n')
  with open(folder / 'gigabyte.json', 'wb') as file:
    file.truncate(1 << 30)
  return folder


@pytest.mark.parametrize('name, weights, status, said', [
    ('card.json', 'weights.npz', 0, 'Nothing that can be checked on this card is wrong.'),
    ('card.json', None, 0, 'Which weights the card is about'),
    ('.', 'weights.npz', 0, 'Nothing that can be checked on this card is wrong.'),
    ('registry.yaml', None, 2, 'must be JSON'),
    ('card.json', 'others.npz', 3, '1 of them are the same'),
    ('edited.json', None, 3, 'The terms do not give epsilon'),
    ('refused.json', None, 3, 'no plan can have'),
    ('NaN.json', None, 2, 'must be JSON'),
    ('gigabyte.json', None, 2, 'at most 4 MiB'),
    ('no.json', None, 2, 'No such file'),
    ('empty', None, 2, 'No such file'),
    ('card.json', 'card.json', 2, 'file of weights'),
    ('card.json', 'no.npz', 2, 'No such file'),
])
def test_verify(folder, capsys, name, weights, status, said):
  more = [] if weights is None else ['--weights', str(folder / weights)]
  assert main.main(['verify', str(folder / name), *more]) == status
  out, err = capsys.readouterr()
  assert said in out + err and (err.count('\n') == 1) == (status == 2)
  if status == 0:
    for kind in ('verified:', "trainer's word:", 'cannot be known:'):
      assert kind in out


def test_verify_as_json(folder, capsys):
  assert main.main(['verify', str(folder / 'edited.json'), '--json']) == 3
  content = json.loads(capsys.readouterr().out)
  assert content['wrong'] == sum(one['kind'] == 'wrong' for one in content['findings']) > 0


def test_a_card_that_takes_too_long_gets_a_sentence(folder, capsys, monkeypatch):
  from tfdp_adaptive.report import card_checks

  def forever(*_):
    while True:
      pass

  monkeypatch.setattr(card_checks, 'check', forever)
  assert main.main(['verify', str(folder / 'card.json'), '--seconds', '1']) == 2
  assert 'more than 1 seconds' in capsys.readouterr().err


def test_card_writes_three_files_that_say_one_thing(folder, capsys, tmp_path):
  out = tmp_path / 'made'
  assert main.main(['card', str(folder), '--words', 'the data=my reviews', '--out', str(out)]) == 0
  assert sorted(path.name for path in out.iterdir()) == ['card.html', 'card.json', 'card.md']
  assert card_json.read(out / 'card.json').words == (card_lib.Words('the data', 'my reviews'),)
  for name in ('card.html', 'card.md'):
    assert 'my reviews' in (out / name).read_text(encoding='utf-8')
  capsys.readouterr()
  assert main.main(['card', str(out)]) == 0
  assert capsys.readouterr().out == (out / 'card.md').read_text(encoding='utf-8')


def test_the_cards_of_a_demo_are_found_by_their_folder(folder, capsys, tmp_path):
  text = (folder / 'card.json').read_text(encoding='utf-8')
  (tmp_path / 'card_noise.json').write_text(text, encoding='utf-8')
  (tmp_path / 'results.json').write_text('{}', encoding='utf-8')
  assert main.main(['card', str(tmp_path), '--json']) == 0
  assert capsys.readouterr().out == text
  (tmp_path / 'card_scales.json').write_text(text, encoding='utf-8')
  for command in ('card', 'verify'):
    assert main.main([command, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / 'card_noise.json') in said and 'card_scales.json' in said
    assert 'results.json' not in said
  (tmp_path / 'card.json').write_text(text, encoding='utf-8')
  assert main.main(['card', str(tmp_path), '--json']) == 0


@pytest.mark.parametrize('arguments', [['no'], ['--words', 'nothing'], ['weights.npz']])
def test_card_of_nothing_gets_a_sentence(folder, capsys, arguments):
  arguments = [str(folder / one) if one == 'weights.npz' else one for one in arguments]
  if '--words' in arguments:
    arguments.append(str(folder))
  assert main.main(['card', *arguments]) == 2
  assert capsys.readouterr().err.startswith('tfdp card: error:')
