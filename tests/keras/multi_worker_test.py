# SPDX-License-Identifier: Apache-2.0
"""Two processes under MultiWorkerMirroredStrategy: one draw of everything, one process' steps."""

import cluster
import numpy as np
import pytest

# Records are unit vectors and the loss is an output, so a step of DP-SGD tells who took part in it.
_WHO = '''
from tfdp_adaptive import gate
tfdp.experimental(*gate.PARTS)  # Whoever tests it knows what it is.
N, sampling = 21, tfdp.sampling
records = np.eye(N, dtype='float32'), np.zeros((N, 1), 'float32')

class Look(keras.callbacks.Callback):
  def on_train_begin(self, logs=None):
    self.last, self.steps, self.done = np.zeros(N), [], []
  def on_train_batch_end(self, batch, logs=None):
    now = self.model.get_weights()[0][:, 0]
    self.steps.append(self.last - now)
    self.done.append(self.model.optimizer.steps_done)
    self.last = now

def who(data=records, users=None, own=(), epochs=1, loop=False, **kwargs):
  plan = tfdp.PrivacyPlan(**{**dict(
      population_size=N, batch_size=7, steps=3, l2_norm_clip=1.0, noise_multiplier=0.0,
      target_delta=1e-6, population_is_public=True), **kwargs})
  keras.utils.set_random_seed(worker)  # The chief's count.
  with strategy.scope():
    model = tfdp.DPSequential([keras.layers.Input((N,)), keras.layers.Dense(
        1, use_bias=False, kernel_initializer='zeros')])
    model.compile(tfdp.DPSGD(float(plan.batch_size), plan=plan, **dict(own)),
                  loss=lambda y, out: out[:, 0])
  look = Look()
  users = {} if users is None else dict(users=users, examples_per_user=2)
  if loop:
    look.set_model(model)
    look.on_train_begin()
    tfdp.validate_model(model)
    step = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)))
    for number, batch in enumerate(plan.batches(data, strategy=strategy, **users)):
      step(batch)
      look.on_train_batch_end(number)
  else:
    model.fit(plan.batches(data, **users), verbose=0, callbacks=[look], epochs=epochs,
              steps_per_epoch=plan.steps // epochs)
  assert look.done == list(range(1, plan.steps + 1)), look.done
  return plan, np.array(look.steps)

'''

_COINS = _WHO + '''
drawn = {}
for name, kwargs in {
    'poisson': {},
    'loop': dict(loop=True),
    'truncated': dict(sampling=sampling.TruncatedPoisson(max_batch_size=9)),
    'ordered': dict(sampling=sampling.FixedOrder()),
    'allocated': dict(sampling=sampling.RandomAllocation(cycle=3), adjacency='add_remove'),
    'cyclic': dict(sampling=sampling.CyclicPoisson(cycle=2), adjacency='add_remove'),
    'separated': dict(sampling=sampling.MinSeparation(min_sep=2, draws=0)),
    'bins': dict(sampling=sampling.BallsInBins(cycle=3, draws=0), adjacency='add_remove'),
}.items():
  _, drawn[name] = who(**kwargs)
# Of 7 users, with 3 records each, 2 are taken; a record weighs half.
_, drawn['users'] = who(users=np.arange(N) // 3, unit='user', population_size=7, batch_size=3)
_, drawn['examples'] = who(users=np.arange(N) // 3, unit='user',
                           sampling=sampling.PoissonExamples(examples_per_user=2))
np.savez(f'{sys.argv[1]}/drawn{worker}', **drawn)

def refused(why, *args, **kwargs):
  try:
    who(*args, **kwargs)
  except tfdp.PrivacyError as error:
    assert 'same order' in str(error) and (f"['{why}']" in str(error)) == bool(worker), error
  else:
    raise AssertionError(f'workers with other {why} went on')

refused('records', (np.ascontiguousarray(records[0][::-1 if worker else 1]), records[1]))
refused('records', (records[0], records[1] + worker), loop=True)
refused('optimizer', own=dict(l2_norm_clip=1.0 + worker))
refused('fit', epochs=1 + 2 * worker)
version, tfdp.version.__version__ = tfdp.version.__version__, f'0.{worker}'
refused('versions')
tfdp.version.__version__ = version
'''


@pytest.mark.thorough
def test_every_record_takes_part_once_at_most_and_all_workers_agree(folder):
  first, second = (dict(np.load(folder / f'drawn{worker}.npz')) for worker in (0, 1))
  assert len(first) == 10
  for name, took in first.items():
    np.testing.assert_array_equal(took, second[name])
    weight = 2 if name == 'users' else 1  # Two of a user, who is their mean.
    part = np.round(took * weight, 5)
    assert np.isin(part, [0, 1]).all(), (name, part)
    assert 0 < part.sum() < part.size, name
  assert np.all(first['separated'][:-1] + first['separated'][1:] <= 1 + 1e-6)
  assert np.all(first['bins'].sum(0) < 1 + 1e-6) and np.isclose(first['bins'].sum(), 21)
  assert np.all(first['ordered'].sum(1) == 7) and np.all(first['ordered'].sum(0) == 1)
  assert np.isclose(first['allocated'].sum(0), 1).all()  # Once in every cycle of three.
  assert ((first['examples'] > 0.5).any(0).reshape(7, 3).sum(1) <= 2).all()  # Two of a user.
  assert np.all((first['users'].reshape(3, 7, 3) > 0.5).sum(2) % 2 == 0)  # Two of a user, or none.


_FIT = '''
import contextlib, os
rng = np.random.default_rng(0)
x, y = rng.normal(size=(32, 3)).astype('float32'), rng.normal(size=(32, 1)).astype('float32')
user_of = np.repeat(np.arange(8), 4)

def train(scope, users=False, **kwargs):
  plan = tfdp.PrivacyPlan(
      population_size=8 if users else 32, batch_size=3 if users else 9, steps=6, l2_norm_clip=0.5,
      noise_multiplier=1.0, target_delta=1e-3, seed=3, unit='user' if users else 'example')
  with scope():
    keras.utils.set_random_seed(1)
    model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(8, 'tanh'),
                               keras.layers.Dense(1)])
    model.compile(tfdp.DPAdam(0.1, plan=plan, seed=5, **kwargs), loss='mse', metrics=['mae'])
  own = dict(users=user_of, examples_per_user=3) if users else {}
  folder = os.path.join(sys.argv[1], 'backups')
  history = model.fit(
      plan.batches((x, y), **own), steps_per_epoch=2, epochs=3, verbose=0,
      validation_data=(x[:8], y[:8]),
      callbacks=[tfdp.callbacks.PrivacyReport(), tfdp.callbacks.BackupAndRestore(folder)]).history
  return model, history

for kwargs in ({}, dict(users=True)):
  model, history = train(strategy.scope, **kwargs)
  alone, expected = train(contextlib.nullcontext, **kwargs) if not worker else (None, {})
  if alone:
    for a, b in zip(model.get_weights(), alone.get_weights()):
      np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert set(history) == set(expected)
    for name in expected:
      np.testing.assert_allclose(history[name], expected[name], rtol=2e-5, err_msg=name)
    assert model.ledger == alone.ledger and len(model.ledger.entries) == 1
  assert model.optimizer.steps_done == 6 and model.ledger.epsilon(1e-3) == history['epsilon'][-1]

# A loop of one's own on what every worker has drawn for itself.
plan = tfdp.PrivacyPlan(population_size=32, batch_size=9, steps=6, l2_norm_clip=0.5,
                        noise_multiplier=1.0, target_delta=1e-3)
with strategy.scope():
  model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
  model.compile(tfdp.DPSGD(0.1, plan=plan), loss='mse')
tfdp.validate_model(model)
step = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)))
try:
  for batch in strategy.experimental_distribute_dataset(plan.batches((x, y), pad_to=20)):
    step(batch)
except Exception as error:
  assert 'of other coins' in str(error), error
else:
  raise AssertionError('workers took steps on coins of their own')

# Without a plan: the same noise everywhere, drawn once, and not again in another run.
noises, WIDTH = [], 2000
for own in ({}, {}, dict(seed=10 + worker)):
  with strategy.scope():
    model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(WIDTH)])
    model.compile(tfdp.DPSGD(1.0, l2_norm_clip=0.5, noise_multiplier=2.0, batch_size=8, **own),
                  loss='mse')
  start = model.get_weights()
  zeros = tf.data.Dataset.from_tensors((0 * x[:8], np.zeros((8, WIDTH), 'float32')))
  model.fit(zeros, verbose=0)
  assert model.optimizer.steps_done == 1
  noises.append(model.get_weights()[0] - start[0])
np.save(os.path.join(sys.argv[1], f'noise{worker}'), noises)
'''


# Each worker has a disk of its own. The seed of the chief draws all batches.
_OPENED = '''
import pathlib
from tfdp_adaptive.batches import sampling_seed
from tfdp_adaptive.report import replay

whole = pathlib.Path(sys.argv[1])
own = whole / f'own{worker}'
own.mkdir()
plan = tfdp.PrivacyPlan(population_size=32, batch_size=9, steps=6, l2_norm_clip=0.5,
                        noise_multiplier=1.0, target_delta=1e-4)
with strategy.scope():
  model = tfdp.DPSequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
  model.compile(tfdp.DPSGD(0.1, plan=plan), loss='mse')
model.fit(plan.batches((x, y), coins=own / 'coins', digests_to=own / 'digests'), verbose=0)
coins, digests = whole / 'own0/coins', whole / 'own0/digests'
sentence = sampling_seed.COMMITTED.format(
    sampling_seed.digest(sampling_seed.opened(coins)['key']))
said = [note for note in model.ledger.entries[0].notes if 'sampling seed' in note]
assert said == [sentence], (worker, said)
found = replay.check(model.privacy_card(), coins, digests)
assert [one.kind for one in found] == ['verified'], found
assert [path.name for path in sorted(own.iterdir())] == [[], ['coins', 'digests']][not worker]
'''


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  """Of one run of two workers, in which all that can be compared there was compared."""
  folder = tmp_path_factory.mktemp('workers')
  cluster.run(_COINS + _FIT + _OPENED, folder, folder)
  return folder


@pytest.mark.thorough
def test_noise_is_drawn_once_for_all_workers(folder):
  first, second = (np.load(folder / f'noise{worker}.npy') for worker in (0, 1))
  np.testing.assert_array_equal(first, second)
  assert abs(np.std(first) / (2.0 * 0.5 / 8) - 1) < 0.05  # Drawn once: not sqrt(2) of it.
  assert np.abs(first[0] - first[1]).max() > 0.1
