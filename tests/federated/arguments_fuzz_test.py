# SPDX-License-Identifier: Apache-2.0
"""Whatever a person passes to the federated part works, or is refused in our own words."""

import os

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import regression

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.federated import in_process
from tfdp_adaptive.federated import run

federated = tfdp.federated
EXAMPLES = int(os.environ.get('TFDP_FUZZ', 40))  # Examples per test; `TFDP_FUZZ=1000` runs more.
ODD = st.one_of(
    st.sampled_from([
        None, True, False, 0, -1, 1, 2, 1.5, 0.5, -0.5, 1e-30, 1e30, float('nan'), float('inf'),
        '', '1', 'user', b'1', (), [], {}, [1], (1, 2), {'a': 1}, object(), object, 1j,
        np.int64(3), np.float32(.5), np.array([1., 2.]), 2**70, 10**400, '\udcff',
        rules.dp_adam(), federated.QuantileClip(), federated.PrivateMetrics({'loss': (0., 1.)})]),
    st.integers(-3, 5), st.floats())
PLAN = regression.make_plan(steps=3)
USERS = dict(examples={'a': np.zeros([3, 2])}, batch_size=2, epochs=1, max_examples=None)
BUILD = dict(**regression.of_engine('in_process'), server_rule=rules.dp_adam(), plan=PLAN,
             server_learning_rate=.5, client_optimizer_fn=regression.client_optimizer,
             quantile_clip=None, private_metrics=None, seed=None)
SIMULATE = dict(train_data=federated.Users(regression.make_users(), batch_size=4), plan=None,
                rounds=None, evaluate=None, rounds_per_evaluation=1, out=None,
                dropout=0.0, facts=())


class ReachedError(Exception):
  """Arguments were accepted, and the work would begin."""


def reach(*_, **__):
  raise ReachedError


def fuzz(call, right):
  with pytest.raises(ReachedError):
    call(**right)

  @hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
  @hypothesis.given(st.data())
  def tried(data):
    names = data.draw(st.lists(st.sampled_from(sorted(right)), min_size=1, max_size=2))
    wrong = {name: data.draw(ODD) for name in names}
    try:
      call(**{**right, **wrong})
    except ReachedError:
      pass
    except (ValueError, TypeError, tfdp.PrivacyError) as error:
      assert 'Received' in str(error), (wrong, repr(error))

  tried()


def test_users():
  def use(**arguments):
    users = federated.Users(**arguments)
    assert all(len(batch) <= arguments['batch_size'] for batch in users.batches('a'))
    reach()
  fuzz(use, USERS)


@pytest.mark.parametrize('examples', [
    {}, [1], {'a': 3}, {'a': (np.zeros(3), np.zeros(2))}, {'a': ()}])
def test_examples_that_are_none(examples):
  with pytest.raises(ValueError, match='`examples` must'):
    federated.Users(examples, batch_size=2)


def test_processes(monkeypatch):
  monkeypatch.setattr(in_process.InProcess, '__init__', reach)
  fuzz(federated.build_private_fed_avg, BUILD)


@pytest.mark.parametrize('ranges', [None, 3, {}, {'a': 1}, {'a': (1, 0)}, {3: (0, 1)},
                                    {'a': (0, float('nan'))}, {'a': ('b', 'c')}])
def test_ranges(ranges):
  with pytest.raises(ValueError, match='`ranges` must'):
    federated.build_private_fed_avg(
        **{**BUILD, 'private_metrics': federated.PrivateMetrics(ranges)})


def test_simulations(monkeypatch, tmp_path):
  """Up to the first round."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(run, 'Run', reach)
  process = federated.build_private_fed_avg(**BUILD)
  fuzz(lambda **given: federated.simulate(process, **given), SIMULATE)
  with pytest.raises(ValueError, match='`process` must be'):
    federated.simulate(3, **SIMULATE)
