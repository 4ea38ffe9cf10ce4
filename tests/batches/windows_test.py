# SPDX-License-Identifier: Apache-2.0
"""Overlapping windows of a series are recognized, and other data are not taken for them."""

import warnings

import numpy as np
import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.batches import checked_source

RNG = np.random.default_rng(0)
SERIES = np.cumsum(RNG.normal(size=104)).astype(np.float32)


def plan(**more):
  return tfdp.PrivacyPlan(batch_size=8, steps=2, l2_norm_clip=1.0, noise_multiplier=1.0,
                          target_delta=1e-4, **{**dict(population_size=100), **more})


def cut(step, length=5, series=SERIES):
  return np.stack([series[i:i + length] for i in range(0, len(series) - length + 1, step)])


@pytest.mark.pitfall(
    'Overlapping windows of one series are treated as independent examples.',
    severity='high',
    stops='a warning and a sentence in the statement; protect whole series by `unit="user"`')
def test_windows_are_warned_of_and_the_statement_says_it():
  x = cut(1)
  with pytest.warns(tfdp.Caution, match='overlapping windows'):
    batches = plan().batches((x[:, :4, np.newaxis], x[:, 4]))
  assert any('overlapping windows' in note for note in batches.notes())


def test_windows_of_keras_are_recognized():
  data = compat.keras.utils.timeseries_dataset_from_array(SERIES, SERIES[4:], 4, batch_size=None)
  with pytest.warns(tfdp.Caution, match='overlapping windows'):
    plan(population_size=None, sampling=tfdp.sampling.Poisson(sampling_probability=.08)).batches(
        data)


@pytest.mark.parametrize('size, step', [(300, 1), (20_000, 3)])
def test_in_any_order(size, step):
  x = RNG.permutation(cut(step, 24, RNG.normal(size=size)))
  with pytest.warns(tfdp.Caution, match='overlapping windows'):
    plan(population_size=len(x)).batches((x, x[:, 0]))


@pytest.mark.parametrize('x', [
    RNG.normal(size=(3_000, 24)), RNG.integers(0, 2, (3_000, 12)), RNG.integers(0, 2, (3_000, 24)),
    RNG.integers(0, 2, (64, 12)), RNG.integers(0, 9, (3_000, 6)) / 1.0,
    RNG.random((3_000, 30)) < .02], ids=lambda x: f'{x.shape} {x.dtype}')
def test_chance_is_no_window(x):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    plan(population_size=len(x)).batches((x, np.arange(len(x))))


@pytest.mark.parametrize('step, found', [(1, True), (2, True), (3, True), (5, False), (6, False)])
def test_by_steps(step, found):
  assert checked_source.overlapping([cut(step)]) == found


@pytest.mark.parametrize('array', [
    RNG.normal(size=(20, 6)), np.zeros([20, 6]), np.ones([20, 4, 4, 1]),
    RNG.integers(0, 2, (20, 8)), np.arange(20), np.tile(RNG.normal(size=(1, 1)), (20, 6)),
    np.array([['a', 'b']] * 9)], ids=lambda array: f'{array.shape} {array.dtype}')
def test_other_data_are_no_windows(array):
  assert not checked_source.overlapping([array])


def test_windows_of_users_are_what_is_advised():
  x = cut(1)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    plan(population_size=10, unit='user').batches(
        (x[:, :4], x[:, 4:]), users=np.arange(100) // 10, examples_per_user=3)
