# SPDX-License-Identifier: Apache-2.0
"""Streams: C^-1 z to rounding, everywhere; fresh noise whatever happens to the state."""

import types

import noise_oracle as oracle
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import mechanisms
from tfdp_adaptive import noise
from tfdp_adaptive import trees
from tfdp_adaptive.noise import keys
from tfdp_adaptive.noise import streams

STEPS, SEED = oracle.STEPS, 17
SPECS = {
    'kernel': tf.TensorSpec([3, 2]),
    'pair': (tf.TensorSpec([]), tf.TensorSpec([5], tf.float64)),
    'empty': tf.TensorSpec([0, 4]),
}
DOUBLE = [tf.TensorSpec([2, 3], tf.float64), tf.TensorSpec([], tf.float64)]
each_mechanism = pytest.mark.parametrize('name', oracle.MECHANISMS)


def make(name, seed=SEED):
  return noise.stream(oracle.MECHANISMS[name], lambda: keys.from_seed(seed))


def run(stream, specs, count, state=None, wrap=lambda f: f):
  """[count, n] rows, [count] variances and the last state."""
  state = stream.init(specs) if state is None else state
  step = wrap(lambda state: stream.next(state, specs))
  rows, variances = [], []
  for _ in range(count):
    row, variance, state = step(state)
    rows.append(oracle.flat(row))
    variances.append(float(variance))
  return np.stack(rows), np.array(variances), state


def plain(function):
  return tf.function(function, autograph=False)


def compiled(function):
  return tf.function(function, jit_compile=True, autograph=False)


def signature(tree):
  return tf.nest.map_structure(lambda t: (t.dtype, t.shape), tree)


@pytest.mark.thorough(but=[
    'eager-*', 'passes-*', 'graph-independent', 'xla-blt', 'xla-banded_inverse'])
@each_mechanism
@pytest.mark.parametrize('how', ['eager', 'graph', 'passes', 'xla'])
def test_rows_are_the_noising_matrix_times_z(name, how, monkeypatch):
  if how == 'passes':  # As in a graph with many parameters: parts of it compiled.
    monkeypatch.setattr(trees, 'WORTH_COMPILING', 0)
  wrap = {'eager': lambda f: f, 'graph': tf.function, 'passes': plain, 'xla': compiled}[how]
  rows, variances, _ = run(make(name), SPECS, STEPS, wrap=wrap)
  expected = oracle.rows(oracle.MECHANISMS[name], oracle.row_keys(SEED, STEPS), SPECS)
  np.testing.assert_allclose(rows, expected, atol=1e-5 if how in ('passes', 'xla') else 3e-6)
  # The variance reported to the rules is the squared norm of the row.
  matrix = np.stack([np.ravel(row) for row in _noising(oracle.MECHANISMS[name])])
  np.testing.assert_allclose(variances, np.sum(matrix**2, axis=1), rtol=1e-6)


def _noising(mechanism):
  mechanism = mechanism.rounded('float32')
  if isinstance(mechanism, mechanisms.Tree):
    return mechanism.noising(STEPS)
  return mechanism.materialize_inverse(STEPS)


@each_mechanism
def test_tree_of_tensors_and_state_keep_their_types(name):
  stream = make(name)
  state = stream.init(SPECS)
  row, variance, after = stream.next(state, SPECS)
  tf.nest.assert_same_structure(row, SPECS)
  assert signature(row) == tf.nest.map_structure(lambda s: (s.dtype, s.shape), SPECS)
  assert variance.shape == () and variance.dtype == tf.float32
  assert signature(after) == signature(state) == signature(
      stream.init(SPECS, after.key))
  again, _, _ = stream.next(state, SPECS)  # Pure: the same state, the same row.
  np.testing.assert_array_equal(oracle.flat(again), oracle.flat(row))


@each_mechanism
def test_a_state_holds_the_rows_the_mechanism_says(name):
  history = make(name).init(tf.TensorSpec([52])).history
  kept = [t for t in tf.nest.flatten(history) if t.dtype.is_floating]  # Keys are none.
  assert sum(int(tf.size(t)) for t in kept) == 52 * oracle.MECHANISMS[name].memory()


def z_score(rows, covariance):
  """Largest deviation of the empirical covariance over columns, in standard errors."""
  k, n = covariance, rows.shape[1]
  error = np.sqrt((np.outer(np.diag(k), np.diag(k)) + k**2) / n)
  return np.max(np.abs(rows @ rows.T / n - k) / error)


@each_mechanism
def test_empirical_covariance_is_that_of_the_noising_matrix_and_no_other(name):
  steps, mechanism = 8, oracle.MECHANISMS[name]
  matrix = _noising(mechanism)[:steps]  # [steps, rows of Z].
  rows, _, _ = run(make(name), tf.TensorSpec([40_000]), steps)
  assert z_score(rows, matrix @ matrix.T) < 5
  wrong = {'scale': 1.1 * matrix}
  if name not in ('independent', 'one_band'):
    wrong['uncorrelated'] = np.diag(np.linalg.norm(matrix, axis=1))
    # A strategy with a unit diagonal rather than unit columns.
    wrong['unnormalised'] = matrix / matrix[0, np.argmax(np.abs(matrix[0]))]
    if matrix.shape[1] == STEPS and name not in ('tree', 'tree_naive', 'tree_restarted'):
      wrong['transposed'] = matrix[:, :steps].T
  for what, other in wrong.items():
    assert z_score(rows, other @ other.T) > 5, what


@pytest.mark.thorough(but=['tree*', 'blt', 'toeplitz', 'independent', 'column_normalized'])
@each_mechanism
def test_a_restored_state_with_a_fresh_key_continues_with_new_noise(name):
  stream = make(name)
  _, _, saved = run(stream, DOUBLE, 5)
  first, _, _ = run(stream, DOUBLE, 5, saved)
  second, _, _ = run(stream, DOUBLE, 5, saved._replace(key=keys.from_seed(99)))
  old, new = oracle.row_keys(SEED, 5), oracle.row_keys(99, 5)
  np.testing.assert_allclose(
      second, oracle.rows(oracle.MECHANISMS[name], old + new, DOUBLE)[5:], atol=1e-12)
  assert len(np.unique(np.abs([first, second]))) == first.size + second.size
  # The same key again is the same noise: what re-keying is for.
  np.testing.assert_array_equal(first, run(stream, DOUBLE, 5, saved)[0])


@pytest.mark.thorough(but=['tree', 'blt', 'toeplitz', 'independent', 'banded_inverse'])
@each_mechanism
def test_a_checkpoint_resumes_bit_for_bit(name, tmp_path):
  stream = make(name)
  whole, _, _ = run(stream, SPECS, STEPS)
  half, _, state = run(stream, SPECS, 5)
  flat = lambda state: tf.nest.map_structure(tf.Variable, tf.nest.flatten(state))
  path = tf.train.Checkpoint(state=flat(state)).save(str(tmp_path / 'noise'))
  fresh = flat(make(name, SEED + 1).init(SPECS))  # In another process, say, with another key.
  tf.train.Checkpoint(state=fresh).restore(path).assert_consumed()
  restored = tf.nest.pack_sequence_as(state, [v.read_value() for v in fresh])
  rest, variances, _ = run(make(name, SEED + 1), SPECS, STEPS - 5, restored)
  np.testing.assert_array_equal(np.concatenate([half, rest]), whole)
  np.testing.assert_array_equal(variances, run(stream, SPECS, STEPS)[1][5:])


@each_mechanism
def test_a_restart_is_another_run_with_new_noise(name):
  stream = make(name)
  before, _, state = run(stream, DOUBLE, 5)
  after, variances, _ = run(stream, DOUBLE, 5, stream.init(DOUBLE, state.key))
  expected = oracle.rows(oracle.MECHANISMS[name], oracle.row_keys(SEED, 10)[5:], DOUBLE)
  np.testing.assert_allclose(after, expected, atol=1e-12)
  np.testing.assert_array_equal(variances, run(stream, DOUBLE, 5)[1])
  assert len(np.unique(np.abs([before, after]))) == before.size + after.size


@pytest.mark.thorough(but=['tree', 'blt', 'toeplitz', 'independent', 'column_normalized'])
@each_mechanism
def test_no_noise_value_occurs_twice(name):
  """Over elements, leaves, steps (past the last designed one, too) and runs."""
  specs = [tf.TensorSpec([5], tf.float64), tf.TensorSpec([5], tf.float64)]
  values = [run(make(name, seed), specs, 2 * STEPS + 3)[0] for seed in (1, 2)]
  values += [run(noise.stream(oracle.MECHANISMS[name]), specs, 3)[0] for _ in range(2)]
  values = np.abs(np.concatenate(values))
  assert np.all(np.isfinite(values)) and len(np.unique(values)) == values.size


def test_one_band_and_no_buffer_are_independent_noise_bit_for_bit():
  made = [make('independent'), make('one_band'),
          noise.stream(mechanisms.BandedInverse(1, STEPS), lambda: keys.from_seed(SEED)),
          noise.stream(mechanisms.BLT(0, STEPS), lambda: keys.from_seed(SEED))]
  rows = [run(stream, SPECS, STEPS)[0] for stream in made]
  for other in rows[1:]:
    np.testing.assert_array_equal(other, rows[0])


@pytest.mark.parametrize('name', ['toeplitz', 'column_normalized', 'banded_inverse', 'blt',
                                  'dense', 'tree'])
def test_coefficients_are_float32_whatever_the_tensors_are(name, monkeypatch):
  mechanism = oracle.MECHANISMS[name]
  rows, _, _ = run(make(name), DOUBLE, STEPS)
  # The oracle rounds the coefficients too; unrounded ones are further off.
  np.testing.assert_allclose(
      rows, oracle.rows(mechanism, oracle.row_keys(SEED, STEPS), DOUBLE), atol=1e-12)
  unrounded = types.SimpleNamespace(
      dtype='float32', steps=STEPS, levels=getattr(mechanism, 'levels', 0),
      block=getattr(mechanism, 'block', 0), variant=getattr(mechanism, 'variant', ''),
      row_norms=mechanism.row_norms, **mechanism.arrays)
  monkeypatch.setattr(streams, 'recursion', streams.recursion.dispatch(type(mechanism)))
  exact, _, _ = run(
      streams.stream(unrounded, lambda: keys.from_seed(SEED)), DOUBLE, STEPS)
  assert 1e-10 < np.abs(exact - rows).max() < 1e-5


@pytest.mark.thorough(rows=['tree'])
@pytest.mark.parametrize('name', ['banded_inverse', 'tree_full', 'tree'])
def test_noise_cancels_across_the_border_of_xla(name):
  """Rows drawn eagerly and drawn again under XLA are the same rows."""
  stream = make(name)
  first, _, state = run(stream, SPECS, 5)
  second, _, _ = run(stream, SPECS, STEPS - 5, state, compiled)
  expected = oracle.rows(oracle.MECHANISMS[name], oracle.row_keys(SEED, STEPS), SPECS)
  np.testing.assert_allclose(np.concatenate([first, second]), expected, atol=1e-5)


@pytest.mark.parametrize('rows, open_', [(0, True), (4, True), (5, False), (6, False)])
def test_within_raises_after_the_last_step_and_is_false_under_xla(rows, open_):
  row = tf.constant(rows, tf.int64)
  assert bool(tf.function(noise.within, jit_compile=True)(row, 5)) == open_
  assert noise.within(row, None)
  for within in (noise.within, tf.function(noise.within)):
    if open_:
      assert within(row, 5)
    else:
      with pytest.raises(tf.errors.InvalidArgumentError, match='cover 5 steps'):
        within(row, 5)


def test_a_mechanism_without_a_stream_is_refused():
  with pytest.raises(TypeError, match='No noise stream is registered for str'):
    noise.stream('gaussian')


@pytest.mark.parametrize('spec, what', [
    (tf.TensorSpec([2], tf.bfloat16), 'float32 or float64'),
    (tf.TensorSpec([2], tf.float16), 'float32 or float64'),
    (tf.TensorSpec([None]), 'fully defined')])
def test_specs_that_cannot_be_noised_are_refused(spec, what):
  with pytest.raises(ValueError, match=what):
    make('blt').init([spec])
