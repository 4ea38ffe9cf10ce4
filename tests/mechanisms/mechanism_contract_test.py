# SPDX-License-Identifier: Apache-2.0
"""What every mechanism keeps to, on one table: its answers against dense matrices."""

import numpy as np
import pytest

from tfdp_adaptive import mechanisms

STEPS = 24
Workload = mechanisms.Workload
SCHEDULE = Workload(.8, tuple(np.linspace(1, .1, STEPS)))
MECHANISMS = [
    mechanisms.IndependentGaussian(),
    mechanisms.IndependentGaussian(workload=SCHEDULE),
    mechanisms.BandedToeplitz(1, STEPS),
    mechanisms.BandedToeplitz(5, STEPS),
    mechanisms.BandedToeplitz(STEPS, STEPS, objective='max'),
    mechanisms.BandedToeplitz(5, STEPS, method='square_root', workload=Workload(.9)),
    mechanisms.BandedToeplitz(3, STEPS, coefficients=[2., -.5, .6]),
    mechanisms.BandedToeplitz(5, STEPS, workload=SCHEDULE),
    mechanisms.Banded(5, STEPS),
    mechanisms.Banded(STEPS, STEPS, workload=Workload(.9), objective='last'),
    mechanisms.Banded(5, STEPS, workload=SCHEDULE),
    mechanisms.Banded(5, STEPS, method='optimal', workload=SCHEDULE),
    mechanisms.BLT(0, STEPS),
    mechanisms.BLT(2, STEPS),
    mechanisms.BLT(2, STEPS, min_sep=6, max_participations=4, workload=Workload(.9)),
    mechanisms.BLT(2, STEPS, workload=SCHEDULE, objective='max'),
    mechanisms.BLT(2, STEPS, weights=[.9, .4], decays=[.8, .1]),
    mechanisms.BandedInverse(1, STEPS),
    mechanisms.BandedInverse(3, STEPS),
    mechanisms.BandedInverse(3, STEPS, method='power', workload=Workload(.9)),
    mechanisms.BandedInverse(3, STEPS, min_sep=6, max_participations=4, workload=SCHEDULE),
    mechanisms.SquareRoot(STEPS),
    mechanisms.SquareRoot(STEPS, workload=Workload(.9)),
    mechanisms.Dense(STEPS),
    mechanisms.Dense(STEPS, workload=SCHEDULE, objective='max'),
    mechanisms.Dense(2, strategy=[[2., 0.], [-1., 1.]]),
    mechanisms.Tree(STEPS),
    mechanisms.Tree(STEPS, 'naive', restart_every=7),
    mechanisms.Tree(STEPS, 'full', restart_every=9, workload=SCHEDULE),
    mechanisms.Tree(STEPS, restart_every=1),
]
every = pytest.mark.parametrize('mechanism', MECHANISMS, ids=lambda m: repr(m)[:90])


def rows(mechanism):
  return mechanism.steps or STEPS


@every
def test_inverse(mechanism):
  n = rows(mechanism)
  product = mechanism.materialize_inverse(n) @ mechanism.materialize(n)
  np.testing.assert_allclose(product, np.eye(n), atol=1e-9)


@every
def test_columns_have_norm_one_at_most(mechanism):
  norms = np.linalg.norm(mechanism.materialize(rows(mechanism)), axis=0)
  assert norms.max() == pytest.approx(1, abs=1e-12)
  assert mechanism.sensitivity() == pytest.approx(norms.max(), rel=1e-12)
  if isinstance(mechanism, mechanisms.Banded):
    np.testing.assert_allclose(norms, 1, atol=1e-12)


@every
def test_noise_of_a_step_does_not_need_later_ones(mechanism):
  n = rows(mechanism)
  noise = mechanism.materialize_inverse(n)
  if not isinstance(mechanism, mechanisms.Tree) or mechanism.variant == 'full':
    assert not np.any(np.triu(noise, 1))
    assert not np.any(np.triu(mechanism.materialize(n), 1))
  for m in {1, 2, n // 2, n} - {0}:
    np.testing.assert_allclose(mechanism.materialize_inverse(m), noise[:m, :][
        :, :mechanism.materialize_inverse(m).shape[1]], atol=1e-12)


@every
@pytest.mark.parametrize('dtype', ['float64', 'float32'])
def test_row_norms_and_errors(mechanism, dtype):
  mechanism = mechanism.rounded(dtype)
  n = rows(mechanism)
  noise = mechanism.materialize_inverse(n)
  close = 1e-9 if dtype == 'float64' else 1e-6
  np.testing.assert_allclose(mechanism.row_norms(n), np.linalg.norm(noise, axis=1), rtol=close)
  answers = np.sum((mechanism.workload.materialize(n) @ noise)**2, axis=1)
  np.testing.assert_allclose(mechanism.squared_errors(n), answers, rtol=close)
  pattern = dict(min_sep=3, max_participations=3)
  for size in {1, max(1, n // 2), n}:
    for error, expected in [
        (mechanism.rmse, np.sqrt(answers[:size].mean())),
        (mechanism.max_error, np.sqrt(answers[:size].max())),
        (mechanism.last_error, np.sqrt(answers[size - 1]))]:
      assert error(size) == pytest.approx(mechanism.sensitivity() * expected, rel=close)
      assert error(size, **pattern) == pytest.approx(
          mechanism.sensitivity(**pattern) * expected, rel=close)


@every
def test_bands(mechanism):
  n = rows(mechanism)
  c = mechanism.materialize(n)
  if mechanism.bands is None:
    return
  assert not np.any(np.tril(c, -mechanism.bands))
  assert mechanism.bands == 1 or np.any(np.diagonal(c, 1 - mechanism.bands))


@every
def test_no_factorization_beats_the_lower_bound(mechanism):
  """`||A||_* / T` for mean errors: `||A||_* <= ||B||_F ||C||_F`."""
  n = rows(mechanism)
  bound = np.linalg.svd(mechanism.workload.materialize(n), compute_uv=False).sum() / n
  assert mechanism.rmse(n) > bound * (1 - 1e-9)
  for min_sep in [b for b in (1, 2, 6) if n % b == 0]:
    k = n // min_sep
    assert (mechanism.rmse(n, min_sep=min_sep, max_participations=k)
            > np.sqrt(k) * bound * (1 - 1e-9))


@every
def test_steps_beyond_the_design_are_refused(mechanism):
  if mechanism.steps is None:
    with pytest.raises(ValueError, match='no fixed number'):
      mechanism.rmse()
    return
  for answer in (mechanism.row_norms, mechanism.squared_errors, mechanism.rmse,
                 mechanism.strategy, mechanism.noising, mechanism.materialize):
    with pytest.raises(ValueError, match='must be at most'):
      answer(mechanism.steps + 1)
    with pytest.raises(ValueError, match='positive integer'):
      answer(0)


@every
def test_json_restores_every_bit(mechanism):
  for original in (mechanism, mechanism.rounded('float32')):
    restored = mechanisms.from_json(original.to_json())
    assert restored == original and hash(restored) == hash(original)
    assert restored.arrays.keys() == original.arrays.keys()
    for name, value in original.arrays.items():
      np.testing.assert_array_equal(restored.arrays[name], value)
    assert restored.sensitivity() == original.sensitivity()


@every
def test_config_designs_the_same(mechanism):
  again = mechanisms.from_config(mechanisms.to_config(mechanism))
  assert again == mechanism and again is not mechanism
  for name, value in mechanism.arrays.items():
    np.testing.assert_array_equal(again.arrays[name], value)


@every
def test_rounding_leaves_numbers_of_the_type(mechanism):
  rounded = mechanism.rounded('float32')
  assert rounded.dtype == 'float32' and rounded.rounded('float64') == mechanism
  assert rounded.rounded('float32') == rounded
  for name, value in rounded.arrays.items():
    np.testing.assert_array_equal(value.astype(np.float32), value)
    np.testing.assert_allclose(value, mechanism.arrays[name], rtol=1e-7)
    assert value.dtype == np.float64 and not value.flags.writeable


@every
def test_the_table_is_a_set_of_different_configs(mechanism):
  assert sum(other == mechanism for other in MECHANISMS) == 1
  assert len({mechanism, mechanisms.from_config(mechanisms.to_config(mechanism)),
              mechanism.rounded('float32')}) == 2


def test_one_band_and_no_buffer_are_independent_noise():
  for mechanism in (mechanisms.BandedToeplitz(1, 9), mechanisms.Banded(1, 9), mechanisms.BLT(0, 9),
                    mechanisms.BandedInverse(1, 9), mechanisms.Tree(9, restart_every=1)):
    np.testing.assert_allclose(mechanism.materialize(9), np.eye(9), atol=1e-15)
    np.testing.assert_allclose(mechanism.materialize_inverse(9), np.eye(9), atol=1e-15)
    assert mechanism.sensitivity(min_sep=1, max_participations=5) == pytest.approx(np.sqrt(5))


def test_attributes_say_what_a_stream_does():
  """The recursions of README.md, against the matrices."""
  n, rng = 12, np.random.default_rng(0)
  z = rng.normal(size=n)

  toeplitz = mechanisms.BandedToeplitz(4, n)
  c, x = toeplitz.coefficients, np.zeros(n)
  for t in range(n):
    x[t] = (z[t] - sum(c[j] * x[t - j] for j in range(1, min(4, t + 1)))) / c[0]
  np.testing.assert_allclose(x, toeplitz.materialize_inverse() @ z, rtol=1e-9)

  for method in ('normalized', 'optimal'):
    banded = mechanisms.Banded(4, n, method=method)
    x = np.zeros(n)
    for t in range(n):
      row = banded.rows[max(0, t - (n - len(banded.rows)))]
      x[t] = (z[t] - sum(row[j] * x[t - j] for j in range(1, min(4, t + 1)))) / row[0]
    np.testing.assert_allclose(x, banded.materialize_inverse() @ z, rtol=1e-9)

  blt = mechanisms.BLT(2, n)
  s, x = np.zeros(2), np.zeros(n)
  for t in range(n):
    x[t] = z[t] / blt.output_scale - blt.weights @ s
    s = blt.decays * s + x[t]
  np.testing.assert_allclose(x, blt.materialize_inverse() @ z, rtol=1e-9)

  for mechanism in (mechanisms.BandedInverse(3, n), mechanisms.SquareRoot(n)):
    d = mechanism.inverse_coefficients
    x = [sum(d[k] * z[t - k] for k in range(min(len(d), t + 1))) for t in range(n)]
    np.testing.assert_allclose(x, mechanism.materialize_inverse() @ z, rtol=1e-9)

  full = mechanisms.Tree(n, 'full', restart_every=5)
  rows_of = full.inverse_rows
  x = np.concatenate([rows_of @ z[:5], rows_of @ z[5:10], rows_of[:2, :2] @ z[10:]])
  np.testing.assert_allclose(x, full.materialize_inverse() @ z, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('make', [
    lambda: mechanisms.BandedToeplitz(5, 4), lambda: mechanisms.BandedToeplitz(0, 4),
    lambda: mechanisms.BandedToeplitz(2, 4.5), lambda: mechanisms.BandedToeplitz(2, None),
    lambda: mechanisms.BandedToeplitz(2, 4, coefficients=[1.]),
    lambda: mechanisms.BandedToeplitz(2, 4, coefficients=[0., 1.]),
    lambda: mechanisms.BandedToeplitz(2, 4, method='best'),
    lambda: mechanisms.BandedToeplitz(2, 4, objective='median'),
    lambda: mechanisms.BandedToeplitz(2, 4, workload='momentum'),
    lambda: mechanisms.BandedToeplitz(2, 4, workload=Workload(0., (1., 1.))),
    lambda: mechanisms.Banded(2, 4, method='optimal', objective='max'),
    lambda: mechanisms.Banded(2, 10_000, method='optimal'),
    lambda: mechanisms.BLT(-1, 4), lambda: mechanisms.BLT(1, 4, weights=[.1], decays=[1.]),
    lambda: mechanisms.BLT(1, 4, weights=[-.1], decays=[.5]),
    lambda: mechanisms.BLT(2, 4, weights=[.1], decays=[.5]),
    lambda: mechanisms.BLT(1, 4, max_participations=2),
    lambda: mechanisms.BandedInverse(5, 4),
    lambda: mechanisms.SquareRoot(4, workload=Workload(0., (1.,) * 4)),
    lambda: mechanisms.Dense(4, objective='last'), lambda: mechanisms.Dense(10_000),
    lambda: mechanisms.Dense(2, strategy=[[1., 1.], [0., 1.]]),
    lambda: mechanisms.Tree(4, 'offline'), lambda: mechanisms.Tree(4, restart_every=0),
    lambda: mechanisms.BandedToeplitz(2, 4).rounded('int32'),
    lambda: mechanisms.BLT(2, 5 * 10**6),
    lambda: mechanisms.BLT(1, 10**6).rounded('float16').sensitivity(),
    lambda: Workload(1.), lambda: Workload(0., (-1.,)), lambda: Workload(0., (0., 0.)),
    lambda: Workload(0., (float('nan'),))])
def test_errors_name_the_argument(make):
  with pytest.raises(ValueError, match='`.*Received'):
    make()
