# SPDX-License-Identifier: Apache-2.0
"""A data set of Python iterators gives what `from_generator` gives, without its operation."""

import gc
import itertools
import signal
import subprocess
import sys
import time
import weakref

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import federated
from tfdp_adaptive.batches import passes

NUMBERS = tf.TensorSpec([], tf.int64)
TYPES = ('float32', 'float64', 'int32', 'int64', 'bool', 'str')


def counted(n):
  return passes.dataset(lambda: map(np.int64, range(n)), NUMBERS)


@strategies.composite
def signatures(draw):
  """A nest of specs, some axes open, and what `np.random` makes of it."""
  leaf = strategies.builds(
      lambda dtype, shape: tf.TensorSpec(shape, tf.string if dtype == 'str' else dtype),
      strategies.sampled_from(TYPES), strategies.lists(strategies.sampled_from(
          [None, 0, 1, 3]), max_size=3))
  kinds = [leaf, strategies.tuples(leaf, leaf), strategies.fixed_dictionaries(
      {'b': leaf, 'a': strategies.tuples(leaf)})]
  return draw(strategies.one_of(*kinds))


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(signature=signatures(), count=strategies.integers(0, 3))
def test_elements_are_those_of_from_generator(signature, count):

  def element(seed):
    rng = np.random.default_rng(seed)
    return tf.nest.map_structure(lambda spec: rng.integers(0, 2, size=[
        rng.integers(0, 3) if size is None else size for size in spec.shape]).astype(
            object if spec.dtype == tf.string else spec.dtype.as_numpy_dtype), signature)

  def text(value):
    return value.astype(str).astype(object) if value.dtype == object else value

  elements = [tf.nest.map_structure(text, element(seed)) for seed in range(count)]
  ours = passes.dataset(lambda: iter(elements), signature)
  theirs = tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=signature)
  assert ours.element_spec == theirs.element_spec
  for _ in range(2):  # Every pass has all of them.
    mine, others = list(ours.as_numpy_iterator()), list(theirs.as_numpy_iterator())
    assert len(mine) == len(others) == count
    for one, other in zip(mine, others):
      tf.nest.assert_same_structure(one, other)
      for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other)):
        np.testing.assert_array_equal(a, b)
        assert np.asarray(a).dtype == np.asarray(b).dtype


@pytest.mark.parametrize('element, signature', [
    (np.zeros([2]), tf.TensorSpec([3], tf.float64)),
    ({'x': 1, 'z': 2}, {'x': NUMBERS, 'y': NUMBERS}),
    ({'a': 1, 'b': 2}, (NUMBERS, NUMBERS)),
    ((1,), NUMBERS)], ids=str)
def test_what_does_not_fit_the_signature_is_refused(element, signature):
  with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.UnknownError)):
    list(passes.dataset(lambda: iter([element]), signature))


def test_every_pass_is_a_new_iterator():
  begun = itertools.count()
  data = passes.dataset(
      lambda: map(np.int64, range(start := 10 * next(begun), start + 3)), NUMBERS)
  first, second = iter(data), iter(data)
  assert next(begun) == 0  # None begins before somebody asks for its first element.
  assert [int(next(first)), int(next(second)), int(next(first))] == [10, 20, 11]
  assert [int(one) for one in first] == [12] and [int(one) for one in second] == [21, 22]
  assert next(first, None) is None  # A pass that has ended does not begin again.
  assert next(begun) == 3


@pytest.mark.parametrize('before', [0, 1, 5])
def test_an_error_is_told_and_ends_the_pass(before):
  begun = []

  def iterate():
    begun.append(1)
    yield from range(before)
    raise ValueError('the third page is torn')

  one = iter(passes.dataset(iterate, NUMBERS))
  assert [int(next(one)) for _ in range(before)] == list(range(before))
  with pytest.raises(tf.errors.InvalidArgumentError, match='the third page is torn'):
    next(one)
  assert next(one, None) is None and len(begun) == 1


def test_passes_given_up_are_forgotten():
  class Numbers:
    def __iter__(self):
      return self

    def __next__(self):
      return np.int64(1)

  made = weakref.WeakSet()

  def iterate():
    one = Numbers()
    made.add(one)
    return one

  data = passes.dataset(iterate, NUMBERS)
  oldest = iter(data)
  next(oldest)
  kept = [iter(data) for _ in range(passes.OPEN - 1)]
  for one in [*kept, oldest]:
    next(one)  # As many as may be.
  for _ in range(20):
    next(iter(data))
  gc.collect()
  assert len(made) <= passes.OPEN
  with pytest.raises(tf.errors.UnknownError, match='Finish a pass before the next'):
    for _ in range(10):  # TensorFlow has fetched some already.
      next(oldest)


def test_a_pass_in_use_is_kept_whatever_else_begins():
  data, counts = counted(100), []
  used = iter(data)
  for _ in range(20):
    counts += [int(next(used)) for _ in range(5)]
    next(iter(data))
  assert counts == list(range(100))


def test_no_more_is_asked_for_than_a_prefetch_holds():
  given = []

  def iterate():
    for i in range(100):
      given.append(i)
      yield i

  for _, _ in zip(passes.dataset(iterate, NUMBERS).prefetch(2), range(10)):
    time.sleep(0.02)
  assert len(given) <= 10 + 4


@pytest.mark.thorough
def test_what_asks_when_python_ends_is_told():
  program = '''
import atexit
atexit.register(lambda: list(data))  # Runs after those that were registered later.
import tensorflow as tf
from tfdp_adaptive.batches import passes
data = passes.dataset(lambda: iter([1, 2]), tf.TensorSpec([], tf.int64))
assert len(list(data)) == 2
'''
  done = subprocess.run([sys.executable, '-c', program], stderr=subprocess.PIPE, text=True,
                        check=False, timeout=120)
  assert 'Python is about to end' in done.stderr


@pytest.mark.thorough
def test_a_fork_ends_though_an_element_is_under_way():
  program = '''
import os, time
from tfdp_adaptive.batches import passes

with passes._CALLS:
  child = os.fork()
  if not child:
    passes._CALLS.finish()
    os._exit(0)
  for _ in range(300):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
      os._exit(status)
    time.sleep(0.01)
  os.kill(child, 9)
  os._exit(1)
'''
  assert subprocess.run([sys.executable, '-c', program], check=False, timeout=120).returncode == 0


def _operations(data):
  graph = tf.raw_ops.DatasetToGraphV2(input_dataset=data._variant_tensor, external_state_policy=1)
  definition = tf.compat.v1.GraphDef.FromString(graph.numpy())
  return {node.op for f in definition.library.function for node in f.node_def} | {
      node.op for node in definition.node}


def test_no_data_set_of_the_library_has_the_operation_of_from_generator():
  assert 'GeneratorDataset' in _operations(
      tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=NUMBERS))
  plan = tfdp.PrivacyPlan(population_size=8, batch_size=2, steps=3, l2_norm_clip=1.0,
                          noise_multiplier=1.0, target_delta=1e-5)
  x = np.ones([8, 2], np.float32)
  users = federated.Users({'ann': {'x': x}, 'bob': {'x': x}}, batch_size=2)
  for data in (counted(3), plan.batches(x), plan.batches((x, x), start_step=lambda: 1),
               users.all_examples()):
    assert not any('Generator' in op for op in _operations(data))
    assert len(list(data)) > 0


@pytest.mark.thorough(but=['ValueError'])
@pytest.mark.parametrize('error', ['KeyboardInterrupt', 'ValueError'])
def test_a_program_that_fails_while_records_are_read_ends(error):
  """TensorFlow's thread is in Python then. With `from_generator` the program hangs."""
  program = f'''
import itertools, time
import tensorflow as tf
from tfdp_adaptive.batches import passes

def numbers():
  for number in itertools.count():
    time.sleep(0.2)
    yield number

def train():
  batches = iter(passes.dataset(numbers, tf.TensorSpec([], tf.int64)).prefetch(2))
  next(batches)
  raise {error}

train()
'''
  done = subprocess.run([sys.executable, '-c', program], stderr=subprocess.PIPE, text=True,
                        check=False, timeout=120)
  assert done.stderr.strip().splitlines()[-1] == error
  assert done.returncode in (1, -signal.SIGINT)


def test_a_lazy_data_set_is_made_once_when_tensorflow_needs_it():
  made = []

  class Numbers(passes.Lazy):

    def make(self):
      made.append(self)
      return tf.data.Dataset.range(3)

  numbers = Numbers()
  assert isinstance(numbers, tf.data.Dataset) and not hasattr(numbers, '__next__') and not made
  with pytest.raises(AttributeError, match="'Numbers' object has no attribute 'nothing'"):
    numbers.nothing  # pylint: disable=pointless-statement
  assert [int(i) for i in numbers] == [int(i) for i in numbers.take(5)] == [0, 1, 2]
  assert [list(map(int, batch)) for batch in numbers.batch(2)] == [[0, 1], [2]]
  assert int(numbers.cardinality()) == 3 and numbers.element_spec.dtype == tf.int64
  assert made == [numbers]
