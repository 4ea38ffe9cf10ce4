# SPDX-License-Identifier: Apache-2.0
"""The stated epsilon is never below that of a reference ledger, whatever is done with weights.

The reference knows the steps that every variable went through, each step by a number of its own,
and has its epsilon from dp_accounting alone. Some sequences take steps by `fit`, others on paper:
nothing else here depends on gradients.
"""

import copy
import functools
import itertools
import pickle
import tempfile

import dp_accounting
from dp_accounting import pld
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import weight_ledger

keras, layers = compat.keras, compat.keras.layers
DELTA, SAMPLED, STEPS = 1e-3, 8 / 64, 5
PLANS = [tfdp.PrivacyPlan(
    batch_size=8, steps=STEPS, l2_norm_clip=1.0, noise_multiplier=noise, target_delta=DELTA,
    population_size=64) for noise in (1.0, 1.5)]
X = np.random.default_rng(0).normal(size=(64, 2)).astype('float32')
DATA = X, X[:, :1]


class Reference:
  """The ledger in twenty lines: which steps each variable went through."""

  def __init__(self):
    self._now, self._ever, self._models, self._number = {}, {}, [], itertools.count()

  def values(self, model):
    """Of each variable, the steps that its values went through."""
    return [self._now.get(id(compat.raw_variable(v)), frozenset()) for v in model.weights]

  def put(self, model, steps):
    """Other values take the place of those of a model; steps that were taken here remain."""
    self._models.append(model)  # No other variable gets its id.
    self._now.update(zip((id(compat.raw_variable(v)) for v in model.weights), steps))

  def step(self, model, noise):
    new = self.total(model) | {(noise, next(self._number))}  # A step reads frozen weights, too.
    self._models.append(model)
    for key in (id(compat.raw_variable(v)) for v in model.trainable_variables):
      self._now[key], self._ever[key] = new, self._ever.get(key, frozenset()) | new

  def total(self, model):
    ever = [self._ever.get(id(compat.raw_variable(v)), frozenset()) for v in model.weights]
    return frozenset().union(*self.values(model), *ever)

  def epsilon(self, model):
    noises = [noise for noise, _ in self.total(model)]
    return composed(tuple((plan.noise_multiplier, noises.count(plan.noise_multiplier))
                          for plan in PLANS))


@functools.lru_cache(maxsize=None)
def composed(counts):
  """Epsilon of so many steps of each noise multiplier."""
  accountant = pld.PLDAccountant()
  for noise, count in counts:
    if count:
      accountant.compose(dp_accounting.PoissonSampledDpEvent(
          SAMPLED, dp_accounting.GaussianDpEvent(noise)), count)
  return accountant.get_epsilon(DELTA) if any(count for _, count in counts) else 0.0


def base():
  return keras.Sequential([layers.Input([2]), layers.Dense(2), layers.Dense(1)])


class World:
  """Models, each a `base` of its own or made of parts of others, and files of them."""

  def __init__(self, folder):
    self.models, self.reference, self.refused = [base()], Reference(), []
    self._folder, self._names, self._files = folder, itertools.count(), []

  def add(self, model, steps=None):
    if steps is not None:
      self.reference.put(model, steps)
    self.models = self.models[-3:] + [model]

  def path(self, suffix=''):
    return f'{self._folder}/{next(self._names)}{suffix}'

  def make_private(self, model):
    self.add(tfdp.make_private(model))

  def compile(self, model, plan=PLANS[0]):
    if isinstance(model, tfdp.DPModel):
      model.compile(tfdp.DPSGD(0.1, plan=plan), 'mse', run_eagerly=True)

  def compile_other(self, model):
    self.compile(model, PLANS[1])

  def compile_shared(self, model):
    """By an optimizer of another model."""
    optimizer = getattr(self.models[0], 'optimizer', None)
    if isinstance(model, tfdp.DPModel) and optimizer is not None:
      model.compile(optimizer, 'mse', run_eagerly=True)

  def assign(self, model):
    if getattr(model, 'optimizer', None) is not None:
      model.optimizer = tfdp.DPSGD(0.1, plan=PLANS[1])

  def freeze(self, model):
    model.layers[0].trainable = not model.layers[0].trainable

  def fit(self, model):
    """As many steps as are left, at most two, on paper."""
    optimizer = getattr(model, 'optimizer', None)
    if optimizer is None or not model.trainable_variables:
      return
    optimizer.run.of(model)
    optimizer.check_variables(model.trainable_variables)
    optimizer.build(model.trainable_variables)
    for _ in range(min(2, STEPS - optimizer.steps_done)):
      row = optimizer.run.state[1].noise.row
      row.assign(row + 1)
      optimizer.run.step_counts.record(tf.convert_to_tensor(row))
      self.reference.step(model, optimizer.plan.noise_multiplier)

  def train(self, model):
    """The same, but one step of Keras' own."""
    optimizer = getattr(model, 'optimizer', None)
    if optimizer is not None and model.trainable_variables and optimizer.steps_done < STEPS:
      done = optimizer.steps_done
      model.fit(optimizer.plan.batches(DATA), steps_per_epoch=1, verbose=0)
      assert optimizer.steps_done == done + 1
      self.reference.step(model, optimizer.plan.noise_multiplier)

  def save(self, model, suffix='.keras'):
    path = self.path(suffix)
    (model.save if suffix == '.keras' else model.save_weights)(path)
    self._files.append((path, self.reference.values(model), len(model.layers)))

  def save_weights(self, model):
    self.save(model, '.weights.h5')

  def load(self, model):
    """The last file, as a model or into one; a plain model reads weights, too."""
    for path, steps, size in self._files[-1:]:
      if path.endswith('.keras'):
        self.add(keras.models.load_model(path), steps)
      elif size == len(model.layers):
        model.load_weights(path)
        self.reference.put(model, steps)

  def read(self, model):
    for path, steps, size in self._files[-1:]:
      if size == 2 and path.endswith('.h5'):
        fresh = base()
        fresh.load_weights(path)
        self.add(fresh, steps)

  def checkpoint(self, model):
    if len(model.layers) == 2:
      path, fresh = tf.train.Checkpoint(model=model).write(self.path()), base()
      tf.train.Checkpoint(model=fresh).read(path).expect_partial()
      self.add(tfdp.make_private(fresh), self.reference.values(model))

  def undo(self, model):
    """Steps that are taken, and taken back by a checkpoint of model and optimizer."""
    if getattr(model, 'optimizer', None) is not None and model.optimizer.steps_done:
      whole, before = tf.train.Checkpoint(
          model=model, optimizer=model.optimizer), self.reference.values(model)
      path = whole.write(self.path())
      self.fit(model)
      whole.read(path).expect_partial()
      self.reference.put(model, before)

  def clone(self, model):
    if not isinstance(model, tfdp.DPModel):
      self.add(keras.models.clone_model(model))

  def deepcopy(self, model):
    self.add(copy.deepcopy(model), self.reference.values(model))

  def pickle(self, model):
    self.add(pickle.loads(pickle.dumps(model)), self.reference.values(model))

  def wrap(self, model):
    self.add(keras.Sequential([layers.Input([2]), *model.layers[:1], layers.Dense(1)]))

  def tail(self, model):
    """What was trained on top of something, without it."""
    self.add(keras.Sequential([layers.Input([2]), model.layers[-1]]))

  def twin(self, model):
    self.add(keras.Sequential([layers.Input([2]), *model.layers]))

  def nest(self, model):
    inputs = keras.Input([2])
    self.add(keras.Model(inputs, model(inputs)))

  def mix(self, model):
    """Parts of two models."""
    part = lambda one: keras.Sequential([layers.Input([2]), one.layers[0]])  # Equal names.
    self.add(keras.Sequential([layers.Input([2]), part(self.models[0]), part(model)]))

  def do(self, action, place):
    try:
      getattr(self, action)(self.models[place % len(self.models)])
    except tfdp.PrivacyError as error:
      self.refused.append(error)
    for model in self.models:
      true = self.reference.epsilon(model) * (1 - 1e-6)
      for name, epsilon in stated(model).items():
        assert epsilon >= true, (name, epsilon, true, weight_ledger.Ledger.of(model).ledger())


def stated(model):
  """Every epsilon that is said of the weights as they are."""
  found = {'ledger': weight_ledger.Ledger.of(model).ledger().epsilon(DELTA)}
  optimizer = getattr(model, 'optimizer', None)
  if optimizer is not None:
    done = optimizer.steps_done
    found.update({
        'model': model.ledger.epsilon(DELTA), 'optimizer': optimizer.ledger.epsilon(DELTA),
        'after': optimizer.ledger_after(done).epsilon(DELTA), 'steps': optimizer.epsilon(done),
        'planned': optimizer.epsilon()})
  return found


ACTIONS = sorted(name for name in vars(World) if name[0] != '_' and name not in (
    'add', 'do', 'path', 'train'))
BEGIN = 'make_private compile fit'


def play(actions):
  with tempfile.TemporaryDirectory() as folder:
    world = World(folder)
    for action, place in actions:
      world.do(action, place)
    return world


def named(text):
  return [(action, -1) for action in text.split()]


def check_random(count, step='fit'):
  @hypothesis.settings(max_examples=count, derandomize=True, deadline=None, database=None,
                       phases=[hypothesis.Phase.generate],  # Sequences are short as they are.
                       suppress_health_check=list(hypothesis.HealthCheck))
  @hypothesis.given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)),
                             min_size=3, max_size=12))
  def any_sequence(actions):
    play([(step if name == 'fit' else name, place) for name, place in named(BEGIN) + actions])

  any_sequence()


@pytest.mark.thorough
def test_no_way_around_the_ledger():
  check_random(18)


def test_no_way_around_the_ledger_by_steps_of_keras():
  check_random(6, 'train')


@pytest.mark.slow
@pytest.mark.parametrize('count, step', [(1000, 'fit'), (100, 'train')])
def test_no_way_around_the_ledger_in_many_sequences(count, step):
  check_random(count, step)


# Sequences that random ones may miss. The last model's epsilon is as large as the reference's.
SEQUENCES = {
    'frozen base': f'{BEGIN} freeze wrap make_private compile_other fit',
    'two optimizers': f'{BEGIN} compile_other train compile fit',
    'an optimizer that is assigned': f'{BEGIN} freeze wrap make_private compile assign fit',
    'weights in a file': f'{BEGIN} save_weights read make_private compile_other fit',
    'a file of a file': f'{BEGIN} save_weights read save_weights read make_private',
    'a run that goes on': f'{BEGIN} save load fit save load train',
    'a file of another run': f'{BEGIN} save_weights fit load compile fit',
    'a copy': f'{BEGIN} deepcopy twin deepcopy make_private compile fit',
    'a pickle': f'{BEGIN} pickle fit twin pickle make_private compile fit',
    'checkpoints': f'{BEGIN} checkpoint compile fit checkpoint compile_other train',
    'a head without its base': f'{BEGIN} freeze wrap make_private compile_other fit tail',
    'a plain model around it': f'{BEGIN} freeze nest make_private compile fit save_weights load',
}


@pytest.mark.thorough(rows=[
    'a file of another run', 'a run that goes on', 'checkpoints', 'two optimizers'])
@pytest.mark.parametrize('name', list(SEQUENCES))
def test_exactly_what_was_spent_is_stated(name):
  world = play(named(SEQUENCES[name]))
  assert not world.refused
  model = world.models[-1]
  assert world.reference.epsilon(model) == pytest.approx(
      weight_ledger.Ledger.of(model).ledger().epsilon(DELTA), rel=1e-3)
  text = weight_ledger.card_of_model(model).epsilon
  assert text == pytest.approx(weight_ledger.Ledger.of(model).ledger().epsilon(DELTA))


def test_undone_and_forked_runs_are_counted():
  """Layers of two branches of one run went through more steps than either branch."""
  undone = play(named(f'{BEGIN} undo fit'))
  assert undone.reference.epsilon(undone.models[-1]) == composed(((1.0, 6), (1.5, 0)))
  forked = play(named(f'{BEGIN} save fit load fit mix'))
  assert len(forked.reference.total(forked.models[-1])) == 6
