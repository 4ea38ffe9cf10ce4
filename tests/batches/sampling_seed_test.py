# SPDX-License-Identifier: Apache-2.0
"""Coins that hold for a run: kept in a secret file, read by it alone."""

import dataclasses
import stat

import numpy as np
import pytest

from tfdp_adaptive import runfolder
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.batches import tags
from tfdp_adaptive.privacy import plan as plan_lib

SCHEMES = [sampling.MinSeparation(4, draws=9), sampling.BallsInBins(10, draws=9)]


def make_plan(scheme=SCHEMES[0], **changes):
  return plan_lib.PrivacyPlan(**{**dict(
      population_size=200, batch_size=20, steps=30, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-3, sampling=scheme), **changes})


def alike(a, b):
  return len(a) == len(b) and all(map(np.array_equal, a, b))


@pytest.mark.parametrize('scheme, adjacency', [
    *((scheme, 'zero_out') for scheme in SCHEMES), (sampling.BallsInBins(10), 'add_remove'),
    (sampling.RandomAllocation(10), 'zero_out'),
    (sampling.CyclicPoisson(4), 'add_remove')], ids=str)
def test_a_run_that_goes_on_has_the_coins_it_began_with(scheme, adjacency, tmp_path):
  plan = make_plan(scheme, adjacency=adjacency, population_is_public=True)
  path = tmp_path / 'coins'
  whole = list(plan.index_batches(coins=path))
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  for start in (1, 7, 29):
    rest = list(plan.index_batches(start_step=start, coins=str(path)))
    if scheme.drawn_each_step or isinstance(scheme, sampling.CyclicPoisson):  # Its groups only.
      assert all(len(np.intersect1d(a, b)) == 0
                 for a, b in zip(whole[start + 1:], rest) if len(a) and len(b))
    else:
      assert alike(whole[start:], rest)
  other = list(plan.index_batches(coins=tmp_path / 'more'))
  assert not alike(whole, other)


def test_two_runs_never_share_their_coins(tmp_path):
  plan, path = make_plan(), tmp_path / 'coins'
  next(plan.index_batches(coins=path))
  with pytest.raises(ValueError, match='coins of two runs must differ'):
    next(plan.index_batches(coins=path))
  with pytest.raises(ValueError, match='another plan'):
    next(make_plan(batch_size=10).index_batches(start_step=3, coins=path))
  next(make_plan(noise_multiplier=2.).index_batches(start_step=3, coins=path))  # The same batches.


def test_without_a_file_there_is_no_going_on():
  with pytest.raises(ValueError, match='cannot resume.*coins=PATH.*start_step=3'):
    next(make_plan().index_batches(start_step=3))
  with pytest.raises(ValueError, match='path of a file'):
    make_plan().index_batches(coins=3)


def test_every_broken_file_is_refused(tmp_path):
  plan, path = make_plan(), tmp_path / 'coins'
  next(plan.index_batches(coins=path))
  good = path.read_bytes()
  flip = lambda i: good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1:]
  broken = [cut for i in range(len(good)) for cut in (good[:i], flip(i))] + [
      b'', b'[]', b'{}', b'\xff', b'[' * 10**5, good.replace(b'"key": ', b'"kez": '),
      good.replace(b'coins', b'plans')]
  for text in broken:
    path.write_bytes(text)
    with pytest.raises(ValueError, match='must be the file it began with.*Received'):
      next(plan.index_batches(start_step=3, coins=path))
  path.write_bytes(good)
  _, saved = runfolder.load(path)
  for others in ({**saved, 'format': 'tfdp_adaptive.coins 1'}, {'format': 'tfdp_adaptive.tune 1'}):
    runfolder.save(path, (), others)
    with pytest.raises(ValueError, match='must be the file it began with.*Received'):
      next(plan.index_batches(start_step=3, coins=path))
  path.unlink()
  with pytest.raises(ValueError, match='must be the file it began with'):
    next(plan.index_batches(start_step=3, coins=path))


def test_data_sets_share_the_coins_of_their_run(tmp_path):
  plan = make_plan()
  x = np.arange(200)
  first = plan.batches((x, x), coins=tmp_path / 'coins')
  seen = [set(b[0][b[2] != 0].tolist()) for b in first.as_numpy_iterator()]
  again = [set(b[0][b[2] != 0].tolist()) for b in first.as_numpy_iterator()]
  rest = [set(b[0][b[2] != 0].tolist()) for b in dataclasses.replace(
      first, start_step=20).as_numpy_iterator()]
  other = plan.batches((x, x), coins=tmp_path / 'coins', start_step=20)
  assert seen == again and seen[20:] == rest
  assert rest == [set(b[0][b[2] != 0].tolist()) for b in other.as_numpy_iterator()]


@pytest.mark.pitfall(
    'A run is resumed with other examples or in another order, so some take part sooner than '
    'was accounted for.',
    severity='critical',
    stops='an error if the run has a file of `coins`, which identifies some examples of the '
          'order')
@pytest.mark.parametrize('scheme', [
    SCHEMES[0], SCHEMES[1], sampling.FixedOrder(), sampling.CyclicPoisson(4)], ids=str)
def test_a_run_goes_on_with_its_records_in_their_order(scheme, tmp_path):
  plan, path, x = make_plan(scheme), tmp_path / 'coins', np.arange(200)
  batches = lambda x, start=7, **more: next(iter(
      plan.batches((x, x), coins=path, start_step=start, **more)))
  batches(x, 0)
  batches(x)
  batches(x.tolist())  # The same, in another container.
  for other in (x[::-1], np.roll(x, 1), x.astype(np.float32), np.array([f'{i}' for i in x])):
    with pytest.raises(Exception, match='other records, or in another order'):
      batches(other)


def test_users_go_on_by_their_ids(tmp_path):
  plan = make_plan(sampling.FixedOrder(), unit='user', population_size=100, batch_size=10)
  x, ids = np.arange(300), np.arange(300) % 100
  batches = lambda x, ids, start: next(iter(plan.batches(
      (x, x), coins=tmp_path / 'coins', start_step=start, users=ids, examples_per_user=2)))
  batches(x, ids, 0)
  batches(x[::-1], ids[::-1], 7)  # Users are in the order of their ids.
  with pytest.raises(Exception, match='other records, or in another order'):
    batches(x, ids + 1, 7)


@pytest.mark.pitfall(
    'A custom loop skips batches of the plan, so examples take part in other steps than were '
    'drawn.',
    severity='critical',
    stops='a step accepts only the batch of its own number, and skipped batches are drawn again '
          'from the same seed')
@pytest.mark.parametrize('scheme, adjacency', [
    (SCHEMES[0], 'zero_out'), (SCHEMES[1], 'zero_out'), (sampling.BallsInBins(10), 'add_remove'),
    (sampling.RandomAllocation(10), 'zero_out'),
    (sampling.CyclicPoisson(4), 'add_remove')], ids=str)
def test_batches_that_are_skipped_by_hand(scheme, adjacency, tmp_path):
  """What trains has the gaps that the scheme claims, however passes are broken off."""
  plan = make_plan(scheme, adjacency=adjacency, population_is_public=True)
  records, rng, done, last = np.arange(1, 201), np.random.default_rng(0), 0, np.full(201, -99)
  min_sep, _ = plan.sampling.participation(plan, plan.steps)
  while done < plan.steps:
    drawn = plan.batches((records, records), coins=tmp_path / 'coins', start_step=done)
    skipped = rng.integers(3, 12)
    for place, (x, _, weight) in enumerate(drawn.as_numpy_iterator()):
      step = done
      expected = tags.tag(plan, step, np.flatnonzero(weight))
      read = tags.read(weight.view(np.int64)[weight != 0])
      if place == skipped:
        continue
      if place > skipped:  # A step would see the tag of another step.
        assert not len(read) or np.all(read != expected)
        break
      assert np.all(read == expected)
      taken = x[weight != 0]
      assert np.all(step - last[taken] >= min_sep)
      last[taken] = step
      done += 1
    if skipped >= plan.steps - done:
      break


def test_every_step_expects_the_batch_size_and_gaps_are_kept():
  plan = make_plan(steps=12)
  sizes, gaps = np.zeros(12), []
  for _ in range(300):
    last = np.full(200, -99)
    for step, batch in enumerate(plan.index_batches()):
      sizes[step] += len(batch)
      gaps += [g for g in (step - last[batch]).tolist() if g < 90]
      last[batch] = step
  assert min(gaps) == 4
  # Binomial at every step, the first ones too: it begins as if it had always run.
  z = (sizes - 300 * 20) / np.sqrt(300 * 200 * .1 * .9)
  assert np.abs(z).max() < 5
  assert plan.sampling.free_probability(plan) == pytest.approx(.1 / (1 - .3))
