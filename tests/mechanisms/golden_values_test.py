"""Errors of the designs against published and independently computed values."""

import numpy as np
import pytest

from tfdp_adaptive import mechanisms
from tfdp_adaptive.mechanisms import toeplitz
from tfdp_adaptive.privacy import accounting

Toeplitz, BLT, Tree = mechanisms.BandedToeplitz, mechanisms.BLT, mechanisms.Tree

# Root mean square error of prefix sums, one participation.
SINGLE = [
    (mechanisms.Dense(16), 1.689404), (mechanisms.Dense(64), 2.099856),
    (mechanisms.Dense(256), 2.524414),
    (Toeplitz(16, 16), 1.750428), (Toeplitz(64, 64), 2.179043), (Toeplitz(1000, 1000), 3.049049),
    (mechanisms.SquareRoot(16), 1.796814), (mechanisms.SquareRoot(1000), 3.102239),
    (mechanisms.SquareRoot(4096), 3.551293),
    (Toeplitz(1, 2000), 31.63068), (Toeplitz(4, 16), 1.93753), (Toeplitz(4, 4096), 22.82174),
    (Toeplitz(16, 64), 2.35005), (Toeplitz(16, 1000), 6.27816), (Toeplitz(64, 256), 2.78307),
    (Toeplitz(64, 2000), 5.12521), (Toeplitz(128, 1024), 3.52306), (Toeplitz(128, 4096), 5.38746),
    (BLT(2, 16), 1.75095), (BLT(3, 256), 2.61724), (BLT(4, 64), 2.17973), (BLT(2, 256), 2.62211),
    (BLT(3, 1000), 3.05108), (BLT(4, 1024), 3.05737), (BLT(2, 2000), 3.318282),
    (BLT(3, 2000), 3.273663), (BLT(4, 2000), 3.270377), (BLT(4, 4096), 3.49885),
    (Tree(16, 'naive'), 3.2113), (Tree(1000, 'naive'), 7.0271), (Tree(4096, 'naive'), 8.8319),
    (Tree(16), 2.6627), (Tree(1000), 5.3573), (Tree(4096), 6.6500),
    (Tree(16, 'full'), 1.9382), (Tree(256, 'full'), 3.1022), (Tree(1000, 'full'), 3.8946),
    (mechanisms.Banded(4, 16), 1.923545), (mechanisms.Banded(64, 256), 2.757277),
    (mechanisms.Banded(128, 2000), 4.242317),
    (mechanisms.Banded(4, 16, method='optimal'), 1.902896),
    (mechanisms.Banded(16, 64, method='optimal'), 2.292618),
    (mechanisms.Banded(16, 256, method='optimal'), 3.586968),
    (mechanisms.BandedInverse(2, 2000), 5.667), (mechanisms.BandedInverse(4, 2000), 4.615),
    (mechanisms.BandedInverse(16, 2000), 3.742),
]


def digits(value):
  """Half a unit of the last printed digit."""
  return .5 * 10.0 ** -len(repr(value).split('.')[1]) * 1.02


@pytest.mark.parametrize('mechanism,expected', SINGLE, ids=lambda x: repr(x)[:60])
def test_error_of_one_participation(mechanism, expected):
  assert mechanism.sensitivity() == pytest.approx(1, abs=1e-9)
  assert mechanism.rmse() == pytest.approx(expected, abs=max(digits(expected), 1e-6))


# steps, min_sep, k: Toeplitz of min_sep bands, BLT of three buffers, square root,
# truncated square root, lambda-CGD, independent.
MANY = [
    (256, 64, 4, 5.5661, 5.789, 6.632, 5.599, 6.887, 22.67),
    (256, 32, 8, 8.7308, 9.219, 11.637, 8.984, 10.082, 32.06),
    (1024, 128, 8, 9.9647, 10.463, 13.024, 10.294, 13.639, 64.03),
    (2000, 400, 5, 7.8491, 8.1466, 9.422, 7.950, 12.673, 70.73),
    (2000, 485, 3, 5.9652, 6.1319, 6.777, 6.009, 9.816, 54.79),
    (2000, 100, 20, 20.2067, 21.374, 30.597, 22.190, 26.102, 141.5),
    (4096, 256, 16, 18.0150, 18.982, 26.083, 19.552, 27.137, 181.0),
]


@pytest.mark.parametrize('steps,min_sep,k,banded,blt,root,truncated,inverse,independent', MANY)
def test_error_of_many_participations(
    steps, min_sep, k, banded, blt, root, truncated, inverse, independent):
  pattern = dict(min_sep=min_sep, max_participations=k)
  for mechanism, expected in [
      (Toeplitz(min_sep, steps), banded),
      (BLT(3, steps, **pattern), blt),
      (mechanisms.SquareRoot(steps), root),
      (Toeplitz(min_sep, steps, method='square_root'), truncated),
      (mechanisms.BandedInverse(2, steps, **pattern), inverse),
      (mechanisms.IndependentGaussian(), independent)]:
    assert mechanism.rmse(steps, **pattern) == pytest.approx(expected, abs=digits(expected))


@pytest.mark.parametrize('steps,min_sep,k,bands,most', [
    (256, 64, 4, 4, 6.268), (256, 64, 4, 16, 5.787), (256, 32, 8, 4, 9.467),
    (256, 32, 8, 16, 10.204), (2000, 400, 5, 4, 10.854), (2000, 400, 5, 16, 8.975),
    (4096, 256, 16, 16, 20.078)])
def test_banded_inverse_is_no_worse_than_one_designed_for_equal_spacing(
    steps, min_sep, k, bands, most):
  pattern = dict(min_sep=min_sep, max_participations=k)
  found = mechanisms.BandedInverse(bands, steps, **pattern).rmse(**pattern)
  assert .85 * most < found < most


@pytest.mark.parametrize('mechanism,expected', [
    (Toeplitz(16, 256), [.5728215430, .3394619361, .2821080757, .2529898724, .2341351896,
                         .2202698872, .2092305942, .1999426564, .1917964663, .1844064536]),
    (Toeplitz(128, 2000), [.4928313753, .2571889662, .1993835375, .1708970540, .1532994482,
                           .1410985979, .1320203672, .1249343576, .1192082587, .1144577090])],
    ids=repr)
def test_toeplitz_coefficients(mechanism, expected):
  np.testing.assert_allclose(mechanism.coefficients[:10], expected, atol=2e-7)


@pytest.mark.parametrize('mechanism,decays,weights', [
    (BLT(2, 2000), [.9978775020, .9041387587], [.0702486486, .3216413341]),
    (BLT(3, 2000), [.9984621010, .9742766855, .7221336803],
     [.0525781698, .1258150148, .3031825625]),
    (BLT(2, 100_000, objective='max'), [.9999528892, .9857068667], [.0122853238, .1878393665])],
    ids=repr)
def test_blt_numbers(mechanism, decays, weights):
  np.testing.assert_allclose(mechanism.decays, decays, atol=3e-8)
  np.testing.assert_allclose(mechanism.weights, weights, atol=1e-7)


def test_published_table():
  """Ganesh, McMahan, Thakurta 2025 (arXiv:2507.01129), Figure 3: T = 2000, b = 128, k <= 3."""
  mechanism = Toeplitz(128, 2000)
  independent = mechanisms.IndependentGaussian()
  assert 4.2532 <= mechanism.rmse() <= 4.2533
  ratio = independent.rmse(2000) / mechanism.rmse()
  assert ratio == pytest.approx(7.4368, abs=1e-4)
  size = mechanism.sensitivity(min_sep=485, max_participations=3)
  assert size == pytest.approx(np.sqrt(3), rel=1e-12)
  assert accounting.gaussian_epsilon(1 / size, 1e-7) == pytest.approx(10.045, abs=5e-4)
  sigma = 1 / ratio  # The same error as with noise multiplier one and correlated noise.
  assert sigma == pytest.approx(.134466, abs=1e-6)
  assert accounting.gaussian_epsilon(sigma / size, 1e-7) == pytest.approx(149.09, abs=5e-3)


def test_epsilon_of_a_tree():
  """2000 steps in one tree, node noise 2: eleven nodes hold a record."""
  tree = Tree(2000)
  epsilon = accounting.gaussian_epsilon(2 / tree.node_scale / tree.sensitivity(), 1e-7)
  assert epsilon == pytest.approx(9.546, abs=5e-4)


@pytest.mark.parametrize('bands', [1, 4, 16])
def test_error_grows_smoothly_to_many_steps(bands):
  # b bands forget after b steps: for T >> b the error is a random walk's.
  errors = [Toeplitz(bands, steps).rmse() for steps in (10**6, 10**8)]
  assert errors[1] / errors[0] == pytest.approx(10, rel=.01)


def test_square_root_of_two_steps_by_hand():
  c = toeplitz.square_root(mechanisms.Workload(), 4)
  np.testing.assert_allclose(c, [1, 1 / 2, 3 / 8, 5 / 16])
