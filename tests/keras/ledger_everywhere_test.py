# SPDX-License-Identifier: Apache-2.0
"""The stated epsilon is never below that of a reference ledger, whatever is done with weights.

The reference knows, for each variable, the steps that its values went through: each step ever
taken has a number of its own. All plans are alike and sampled at every step, so epsilon depends on
the number of steps alone.
"""

import copy
import itertools
import tempfile

import hypothesis
from hypothesis import strategies as st
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.keras import lines

keras, layers = compat.keras, compat.keras.layers
PLAN = tfdp.PrivacyPlan(
    batch_size=8, steps=6, l2_norm_clip=1.0, noise_multiplier=1.0, target_delta=1e-3,
    population_size=64)


class Reference:
  """Which steps the values of each variable went through."""

  def __init__(self):
    self.steps, self._numbers, self._kept = {}, itertools.count(), []

  def of(self, model):
    return [self.steps.get(id(compat.raw_variable(v)), frozenset()) for v in model.weights]

  def load(self, model, steps):
    self._kept.append(model)  # No other variable gets its id.
    self.steps.update(zip((id(compat.raw_variable(v)) for v in model.weights), steps))

  def step(self, model):
    new = frozenset([next(self._numbers)])
    inside = frozenset().union(*self.of(model))  # A step looks at frozen weights, too.
    self._kept.append(model)
    for v in model.trainable_variables:
      self.steps[id(compat.raw_variable(v))] = inside | new

  def total(self, model):
    return len(frozenset().union(*self.of(model)))


def base():
  return keras.Sequential([layers.Input([2]), layers.Dense(2), layers.Dense(1)])


class World:
  """Models, each a `base` of its own or made of parts of others, and files of them."""

  def __init__(self, folder):
    self.models, self.files, self.reference = [base()], [], Reference()
    self._folder, self._names = folder, itertools.count()

  def add(self, model, steps=None):
    if steps is not None:
      self.reference.load(model, steps)
    self.models = self.models[-3:] + [model]

  def make_private(self, model):
    self.add(tfdp.make_private(model))

  def compile(self, model):
    if isinstance(model, tfdp.DPModel):
      model.compile(tfdp.DPSGD(0.1, plan=PLAN), 'mse')

  def freeze(self, model):
    model.layers[0].trainable = not model.layers[0].trainable

  def fit(self, model):
    """As many steps as are left, at most two, on paper: nothing here depends on gradients."""
    optimizer = getattr(model, 'optimizer', None)
    if optimizer is None or not model.trainable_variables:
      return
    if optimizer.run.moved and [id(compat.raw_variable(v)) for v in optimizer.run.moved] != [
        id(compat.raw_variable(v)) for v in model.trainable_variables]:
      return self.compile(model)  # What `fit` asks for.
    optimizer.build(model.trainable_variables)
    for _ in range(min(2, PLAN.steps - optimizer.steps_done)):
      row = optimizer.run.state[1].noise.row
      row.assign(row + 1)
      optimizer.run.watch(tf.convert_to_tensor(row))
      self.reference.step(model)

  def save(self, model, whole):
    path = f'{self._folder}/{next(self._names)}' + ('.keras' if whole else '.weights.h5')
    (model.save if whole else model.save_weights)(path)
    self.files.append((path, self.reference.of(model), len(model.layers)))

  def load(self, model):
    for path, steps, size in self.files[-1:]:
      if path.endswith('.keras'):
        self.add(keras.models.load_model(path), steps)
      elif size == len(model.layers):
        model.load_weights(path)
        self.reference.load(model, steps)

  def read(self, model):
    """A plain model of the same kind reads the file; what holds `base` does."""
    fresh = base() if len(model.layers) == 2 else None
    for path, steps, size in self.files[-1:]:
      if fresh is not None and size == 2 and path.endswith('.h5'):
        fresh.load_weights(path)
        self.add(fresh, steps)

  def checkpoint(self, model):
    if len(model.layers) == 2:
      path = tf.train.Checkpoint(model=model).write(f'{self._folder}/{next(self._names)}')
      fresh = base()
      tf.train.Checkpoint(model=fresh).read(path).expect_partial()
      self.add(tfdp.make_private(fresh), self.reference.of(model))

  def clone(self, model):
    if not isinstance(model, tfdp.DPModel):
      self.add(keras.models.clone_model(model))

  def copy(self, model):
    self.add(copy.deepcopy(model), self.reference.of(model))

  def wrap(self, model):
    self.add(keras.Sequential([layers.Input([2]), *model.layers[:1], layers.Dense(1)]))

  def twin(self, model):
    self.add(keras.Sequential([layers.Input([2]), *model.layers]))

  def check(self):
    for model in self.models:
      wanted = self.reference.total(model)
      stated = [lines.ledger(model)]
      run = getattr(getattr(model, 'optimizer', None), 'run', None)
      if run is not None:
        stated += [model.ledger, model.optimizer.ledger,
                   model.optimizer.ledger_after(model.optimizer.steps_done)]
      for ledger in stated:
        assert sum(entry.steps for entry in ledger.entries) >= wanted, (ledger, wanted)


ACTIONS = ['make_private', 'compile', 'freeze', 'fit', 'save whole', 'save weights', 'load', 'read',
           'checkpoint', 'clone', 'copy', 'wrap', 'twin']


def play(actions):
  with tempfile.TemporaryDirectory() as folder:
    world = World(folder)
    for action, place in actions:
      name, *kind = action.split()
      model = world.models[place % len(world.models)]
      getattr(world, name)(model, *([kind[0] == 'whole'] if kind else []))
      world.check()
    return world


@hypothesis.settings(max_examples=12, derandomize=True, deadline=None, database=None,
                     suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)),
                           min_size=3, max_size=10))
def test_no_way_around_the_ledger(actions):
  play([('make_private', 0), ('compile', -1), ('fit', -1)] + [
      (action, place) for action, place in actions])


def test_the_reference_counts():
  """Two runs, of which one trains a head on the frozen base of the other."""
  world = play([('make_private', 0), ('compile', -1), ('fit', -1), ('wrap', -1), ('freeze', -1),
                ('make_private', -1), ('compile', -1), ('fit', -1)])
  assert world.reference.total(world.models[-1]) == 4
  assert [entry.steps for entry in world.models[-1].ledger.entries] == [2, 2]
