# SPDX-License-Identifier: Apache-2.0
"""An auditor who is shown the coins of a run draws its batches again, and sees what is wrong."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.batches import digests
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.cli import main
from tfdp_adaptive.report import card_json

N, STEPS = 60, 6
X = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
Y = np.arange(N, dtype=np.float32)
SAMPLINGS = {
    'Poisson': (tfdp.sampling.Poisson(), 'zero_out'),
    'TruncatedPoisson': (tfdp.sampling.TruncatedPoisson(max_batch_size=14), 'zero_out'),
    'CyclicPoisson': (tfdp.sampling.CyclicPoisson(3), 'add_remove'),
    'BallsInBins': (tfdp.sampling.BallsInBins(5), 'zero_out'),
    'RandomAllocation': (tfdp.sampling.RandomAllocation(5), 'zero_out'),
    'FixedOrder': (tfdp.sampling.FixedOrder(), 'zero_out'),
}


def make_plan(name='Poisson'):
  sampling, adjacency = SAMPLINGS[name]
  return tfdp.PrivacyPlan(
      population_size=N, population_is_public=True, batch_size=12, steps=STEPS, l2_norm_clip=1.0,
      noise_multiplier=2.0, target_delta=1e-3, sampling=sampling, adjacency=adjacency)


def run(folder, plan, steps=STEPS, data=(X, Y)):
  """Draws the batches in two passes, as a run that is resumed; returns what the ledger holds."""
  files = dict(coins=folder / 'coins', digests_to=folder / 'digests')
  first = plan.batches(data, **files)
  notes = first.notes()
  half = steps // 2
  assert len([*zip(range(half), first.as_numpy_iterator())]) == half
  list(plan.batches(data, start_step=half, **files).as_numpy_iterator())
  return notes


def write_card(folder, plan, notes, steps=STEPS):
  ledger = tfdp.Ledger().begin(plan, 'dp_sgd').done(steps)
  entry = dataclasses.replace(ledger.entries[0], notes=tuple(notes))
  card = tfdp.Ledger((entry,)).card(plots=False)
  (folder / 'card.json').write_text(card_json.to_json(card))


def verify(folder, coins='coins', log='digests'):
  return main.main(['verify', str(folder / 'card.json'), '--opened', str(folder / coins),
                    '--digests', str(folder / log)])


@pytest.mark.parametrize('name', SAMPLINGS)
def test_what_ran_is_verified(name, tmp_path, capsys):
  plan = make_plan(name)
  notes = run(tmp_path, plan)
  write_card(tmp_path, plan, notes)
  assert verify(tmp_path) == 0, capsys.readouterr()
  assert f'all {STEPS} batches follow from them' in capsys.readouterr().out
  public = (tmp_path / 'card.json').read_text()
  assert str(sampling_seed.opened(tmp_path / 'coins')['key']) not in public


@pytest.fixture(scope='module', name='done')
def make_done(tmp_path_factory):
  folder = tmp_path_factory.mktemp('run')
  plan = make_plan()
  write_card(folder, plan, run(folder, plan))
  other = tmp_path_factory.mktemp('other')
  run(other, plan)
  (folder / 'others').write_bytes((other / 'coins').read_bytes())
  return folder


def edited(folder, change, sealed=True):
  """A file of digests as a trainer with the coins could write it, or anyone else."""
  header, *lines = map(json.loads, (folder / 'digests').read_text().splitlines())
  change(lines)
  key = sampling_seed.opened(folder / 'coins')['key']
  for line in lines if sealed else ():
    line['seal'] = digests.seal(key, header['size'], line)
  (folder / 'edited').write_text('\n'.join(map(json.dumps, [header, *lines])))
  return 'edited'


def shuffled(lines):
  """Batches of one size, as plain Keras makes them."""
  flat = [one for line in lines for one in line['records']]
  for i, line in enumerate(lines):
    line['records'] = flat[12 * i:12 * i + 12]


def swapped(lines):
  """A batch of as many other records."""
  lines[-1]['records'] = [f'{i:032x}' for i in range(len(lines[-1]['records']))]
  lines[-2]['records'] = [f'{i + 1:032x}' for i in range(len(lines[-2]['records']))]
  lines[-3]['records'] = [f'{i + 2:032x}' for i in range(len(lines[-3]['records']))]


@pytest.mark.parametrize('change, said', [
    (lambda lines: lines[2].update(records=lines[2]['records'][1:]), 'at step 2 the coins draw'),
    (shuffled, 'the coins draw'), (swapped, 'another digest before'),
    (lambda lines: [lines.remove(one) for one in lines[:] if one['step'] == 4],
     'no digests of step 4'),
    (lambda lines: lines[0].update({'pass': 9}), 'nothing of a pass 9'),
    (lambda lines: lines[-1].update(step=99), 'no digests of step 5'),
    (lambda lines: lines.append(dict(lines[-1], step=99)), 'steps that the pass does not have'),
    (lambda lines: lines.insert(2, dict(lines[2], records=[])), 'at step 2 the coins draw')])
def test_what_did_not_run_is_wrong(done, capsys, change, said):
  assert verify(done, log=edited(done, change)) == 3
  assert said in capsys.readouterr().out


@pytest.mark.parametrize('name, value', [
    ('records', ['0' * 32]), ('step', 99), ('pass', 3), ('seal', '0' * 32)])
def test_a_change_by_others_is_seen(done, capsys, name, value, line=3):
  change = lambda lines: lines[line].update({
      name: value + lines[line]['records'][1:] if name == 'records' else value})
  assert verify(done, log=edited(done, change, sealed=False)) == 3
  said = capsys.readouterr().out
  assert 'not the ones that the run wrote' in said or 'no digests of step' in said


@pytest.mark.parametrize('size, status', [(N + 1, 3), (-1, 2), (0, 2), ('"60"', 2)])
def test_another_number_of_records_is_seen(done, capsys, size, status):
  text = (done / 'digests').read_text().replace(f'"size": {N}', f'"size": {size}')
  (done / 'edited').write_text(text)
  assert verify(done, log='edited') == status
  assert 'number of records' in capsys.readouterr().out or status == 2


@pytest.mark.parametrize('coins, log, said', [
    ('others', 'digests', 'coins of another run'), ('card.json', 'digests', 'file of coins'),
    ('no', 'digests', 'file of coins'), ('coins', 'card.json', 'file of digests'),
    ('coins', 'no', 'No such file')])
def test_wrong_files_are_usage_errors(done, capsys, coins, log, said):
  assert verify(done, coins, log) == 2
  text = capsys.readouterr().err
  assert said in text and text.count('\n') == 1


@pytest.mark.parametrize('steps', [STEPS, STEPS - 2])
def test_batches_without_a_step_on_the_card_are_told(tmp_path, capsys, steps):
  plan = make_plan()
  files = dict(coins=tmp_path / 'coins', digests_to=tmp_path / 'digests')
  batches = plan.batches((X, Y), **files)
  assert len(list(batches.as_numpy_iterator())) == STEPS
  write_card(tmp_path, plan, batches.notes(), steps)
  assert verify(tmp_path) == 0
  said = capsys.readouterr().out
  assert ('taken on 2 further batch' in said) == (steps == STEPS - 2) == ('further' in said)


def test_one_of_both_files_is_not_enough(done, capsys):
  assert main.main(['verify', str(done / 'card.json'), '--opened', str(done / 'coins')]) == 2
  assert 'go together' in capsys.readouterr().err


def test_digests_need_coins(tmp_path):
  with pytest.raises(ValueError, match='coins of a run in a file'):
    make_plan().batches((X, Y), digests_to=tmp_path / 'digests')


def test_a_digest_tells_nothing_without_the_coins():
  one, other = (list(digests.of_records((X[:2], Y[:2]), key)) for key in (1, 2))
  assert len(set(one + other)) == 4
  assert one == list(digests.of_records((X[:2], Y[:2]), 1))
  assert one != list(digests.of_records((X[:2], Y[1:3]), 1))


def test_every_pass_has_other_batches(tmp_path):
  plan = make_plan()
  coins = sampling_seed.SamplingSeed(plan, tmp_path / 'coins')
  passes = [np.concatenate(list(sampling_seed.drawn(plan, N, 0, coins))).tolist() for _ in range(2)]
  assert passes[0] != passes[1] and sampling_seed.opened(tmp_path / 'coins')['starts'] == [0, 0]


def make_model(plan):
  model = tfdp.make_private(compat.keras.Sequential([
      compat.keras.layers.Input([2]), compat.keras.layers.Dense(1)]))
  model.compile(tfdp.DPSGD(0.1, plan=plan), loss='mse', jit_compile=False)
  return model


def by_train_on_batch(model):
  return model.train_on_batch


def by_a_step_of_ones_own(model):
  return lambda *batch: model.train_step(batch)


def by_a_traced_step(model):
  return tf.function(lambda *batch: model.train_step(batch)['loss'], reduce_retracing=True)


@pytest.mark.parametrize('loop', [by_train_on_batch, by_a_step_of_ones_own, by_a_traced_step])
def test_a_loop_of_ones_own_commits_before_its_first_step(loop, tmp_path):
  plan = dataclasses.replace(make_plan(), target_delta=2e-3, steps=STEPS + len(loop.__name__))
  model = make_model(plan)
  model.optimizer.build(model.trainable_variables)
  batches = plan.batches((X, Y), coins=tmp_path / 'coins', digests_to=tmp_path / 'digests')
  take = loop(model)
  for step, batch in zip(range(STEPS), batches):
    take(*batch)
    if not step:
      assert any('sampling seed was fixed' in note for note in model.ledger.entries[0].notes)
  (tmp_path / 'card.json').write_text(card_json.to_json(model.privacy_card()))
  assert model.optimizer.steps_done == STEPS and verify(tmp_path) == 0


def test_a_loop_with_batches_of_two_seeds_commits_to_none(tmp_path):
  plan = dataclasses.replace(make_plan(), steps=41)
  model = make_model(plan)
  first = next(iter(plan.batches((X, Y), coins=tmp_path / 'coins')))
  next(iter(plan.batches((X, Y))))
  model.train_on_batch(*first)
  assert not any('sampling seed' in note for note in model.ledger.entries[0].notes)


def test_the_digest_is_in_the_ledger_before_the_first_step(tmp_path):
  seen = []

  class Look(compat.keras.callbacks.Callback):

    def on_train_batch_begin(self, batch, logs=None):
      if not batch:
        seen.append(model.optimizer.run.said['notes'])
        seen.append(model.optimizer.steps_done)

  plan = make_plan()
  model = make_model(plan)
  batches = plan.batches((X, Y), coins=tmp_path / 'coins', digests_to=tmp_path / 'digests')
  model.fit(batches, steps_per_epoch=STEPS, epochs=1, verbose=0, callbacks=[Look()])
  sentence = sampling_seed.COMMITTED.format(
      sampling_seed.digest(sampling_seed.opened(tmp_path / 'coins')['key']))
  assert sentence in seen[0] and not seen[1]
  assert sentence in model.ledger.entries[0].notes
  (tmp_path / 'card.json').write_text(card_json.to_json(model.privacy_card()))
  assert verify(tmp_path) == 0
