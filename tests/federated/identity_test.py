# SPDX-License-Identifier: Apache-2.0
"""A saved run goes on with its own clients, plan, rule and optimizer, and says what differs."""

import functools
import itertools
import json
import pathlib
import re
import subprocess
import sys

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
import regression
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import rules
from tfdp_adaptive.federated import identity
from tfdp_adaptive.federated import run as run_lib
from tfdp_adaptive.federated import storage

schedules = tf.keras.optimizers.schedules
RATES = {
    'number': lambda: 0.5,
    'numpy': lambda: np.float32(0.5),
    'piecewise': lambda: schedules.PiecewiseConstantDecay([2, 4], [0.3, 0.2, 0.1]),
    'cosine': lambda: schedules.CosineDecay(0.3, 10, alpha=0.1),
    'restarts': lambda: schedules.CosineDecayRestarts(0.3, 10),
    'exponential': lambda: schedules.ExponentialDecay(0.3, 10, 0.9),
    'inverse': lambda: schedules.InverseTimeDecay(0.3, 10, 0.9),
    'polynomial': lambda: schedules.PolynomialDecay(0.3, 10),
    'function': lambda: named_rate,
    'closure': lambda: rate_of(0.25),
    'partial': lambda: functools.partial(named_rate, top=0.25),
    'tf.function': lambda: tf.function(named_rate),
}
RULES = {
    'sgd': rules.dp_sgd, 'momentum': lambda: rules.dp_sgd(momentum=0.9),
    'adam': rules.dp_adam, 'adam beta': lambda: rules.dp_adam(beta_1=0.8),
    'adam epsilon': lambda: rules.dp_adam(epsilon=1e-3), 'yogi': rules.dp_yogi,
    'scale': lambda: rules.scale_then_privatize(scale_epsilon=0.2),
    'scale epsilon': lambda: rules.scale_then_privatize(scale_epsilon=0.3),
    'dp2': lambda: rules.dp2_rmsprop(sgd_steps=2, adaptive_steps=1, epsilon=0.2),
    'dp2 steps': lambda: rules.dp2_rmsprop(sgd_steps=3, adaptive_steps=1, epsilon=0.2),
    'bias corrected': lambda: rules.dp_adam_bc(), 'ime': rules.dp_adam_ime,
    'shampoo': rules.dp_shampoo, 'soap': rules.dp_soap, 'muon': rules.dp_muon,
    'soap refresh': lambda: rules.dp_soap(refresh_every=3),
    'muon names': lambda: rules.dp_muon(exclude=['last']),
    'clipped': lambda: rules.dp_sgd()._replace(asks=(rules.Ask('euclidean'),)),
}
OPTIMIZERS = {
    'sgd': lambda: tf.keras.optimizers.SGD(0.1),
    'rate': lambda: tf.keras.optimizers.SGD(0.2),
    'momentum': lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    'adam': lambda: tf.keras.optimizers.Adam(0.1),
    'scheduled': lambda: tf.keras.optimizers.SGD(
        tf.keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)),
}


def named_rate(step, top=0.5):
  return top / (1.0 + tf.cast(step, tf.float32))


def rate_of(top):
  def rate(step):
    return top / (1.0 + tf.cast(step, tf.float32))
  return rate


def descriptions():
  return {f'{kind} {name}': identity.describe(make(), kind)
          for kind, table in (('rate', RATES), ('rule', RULES), ('optimizer', OPTIMIZERS))
          for name, make in table.items()}


@pytest.mark.thorough
def test_descriptions_differ_and_are_the_same_in_another_process():
  """None holds an address, whatever the callable."""
  mine = descriptions()
  assert len(mine) == len(RATES) + len(RULES) + len(OPTIMIZERS)
  same = {frozenset(('rate number', 'rate numpy')),
          frozenset(('rate function', 'rate tf.function'))}
  for a, b in itertools.combinations(mine, 2):
    assert (mine[a] == mine[b]) == (frozenset((a, b)) in same), (a, b)
  assert not re.search(r'0x[0-9a-f]{6,}', json.dumps(mine))
  here = pathlib.Path(__file__).parent
  other = subprocess.run(
      [sys.executable, '-c', 'import json, sys; import tfdp_adaptive; '
       'from tfdp_adaptive import gate; tfdp_adaptive.experimental(*gate.PARTS); '
       'import identity_test; '
       'print(json.dumps(identity_test.descriptions()))'],
      cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
  assert other.returncode == 0, other.stderr
  theirs = json.loads(other.stdout.splitlines()[-1])
  assert theirs == {name.replace('identity_test.', ''): value for name, value in
                    json.loads(json.dumps(mine)).items()}


@pytest.mark.parametrize('value', [
    lambda step: 0.1, tf.function(lambda step: 0.1), object(), [1, {'a': lambda: 0}],
    functools.partial(lambda step, rate: rate, rate=1), iter([1])])
def test_what_another_process_would_not_know_again_is_refused(value):
  with pytest.raises(identity.NotDescribableError, match='(?s)`rate` must be .* leave `out` out'):
    identity.describe(value, 'rate')


@hypothesis.given(strategies.lists(
    strategies.one_of(strategies.text(max_size=3), strategies.integers(-9, 9),
                      strategies.binary(max_size=2)), max_size=6, unique=True),
                  strategies.randoms())
def test_clients_are_known_by_place(ids, random):
  """'1' is not 1, ('ab', 'c') not ('a', 'bc'), and order counts."""
  moved = random.sample(ids, len(ids))
  left, right = identity.of_clients(ids), identity.of_clients(moved)
  assert left['count'] == len(ids) and left['who'] == right['who']
  assert (left['order'] == right['order']) == (ids == moved)
  if ids:
    other = identity.of_clients([f'{x}' if not isinstance(x, str) else f'{x}-' for x in ids])
    assert other['who'] != left['who']


def make(rule=rules.dp_adam, rate=0.5, optimizer='sgd', plan=None, **kwargs):
  return tfdp.federated.build_private_fed_avg(
      server_rule=rule(), plan=plan or regression.make_plan(steps=6), server_learning_rate=rate,
      client_optimizer_fn=OPTIMIZERS[optimizer], seed=1, **regression.of_engine('in_process'),
      **kwargs)


def users(batch_size=4, names=None, add=0.0, **kwargs):
  examples = regression.make_users()
  examples['user3']['y'] = examples['user3']['y'] + add
  return tfdp.federated.Users({name: examples[name] for name in names or examples},
                              batch_size=batch_size, **kwargs)


def go_on(path, process, data):
  with storage.RunFolder(path) as folder:
    return run_lib.Run(process, folder, data, list(data.client_ids))


@pytest.mark.pitfall(
    'A run resumes with another rule, client optimizer or data format.',
    severity='critical', stops='an error that names the difference')
def test_a_run_goes_on_with_what_it_began_with_and_says_what_differs(tmp_path):
  rate = RATES['cosine']
  run = go_on(tmp_path, make(rate=rate()), users())
  run.advance(run.state._replace(round=tf.constant(1, tf.int64)), {}, [])
  assert go_on(tmp_path, make(rate=rate()), users()).done == 1
  reordered = [f'user{i}' for i in (1, 0, 2, 3, 4, 5)]
  for named, process, data in (
      (r"\['client_ids'\]. Received: \{'client_ids': \{'order'", make(rate=rate()),
       users(names=reordered)),
      (r"\['data'\].*'batch_size': 5", make(rate=rate()), users(batch_size=5)),
      (r"\['data'\]. Received: \{'data': \{'sample': '", make(rate=rate()), users(add=0.01)),
      (r"\['data'\].*'max_examples': 5", make(rate=rate()), users(max_examples=5)),
      (r"\['server_rule'\].*'first': \{'update': \{'beta': 0.8\}",
       make(rate=rate(), rule=RULES['adam beta']), users()),
      (r"\['client_optimizer'\].*'learning_rate': 0.2",
       make(rate=rate(), optimizer='rate'), users()),
      (r"\['server_learning_rate'\].*PiecewiseConstantDecay", make(rate=RATES['piecewise']()),
       users()),
      (r"\['plan'\].*'batch_size': 2", make(
          rate=rate(), plan=regression.make_plan(steps=6, batch_size=2)), users())):
    with pytest.raises(tfdp.federated.SavedRunError, match=f'other settings, in {named}'):
      go_on(tmp_path, process, data)
  with pytest.raises(identity.NotDescribableError, match='`server_learning_rate` must be'):
    go_on(tmp_path, make(rate=lambda step: 0.1), users())


@pytest.mark.pitfall(
    'A run resumes with its clients in another order, so the groups change.',
    severity='critical',
    stops='an error, because a fingerprint of the clients and their order is saved')
def test_groups_would_break_for_clients_in_another_order(tmp_path):
  """The defect itself: separated groups go by position, and the run refuses."""
  plan = regression.make_plan(steps=6, batch_size=2, sampling=tfdp.sampling.BallsInBins(cycle=3),
                              mechanism=tfdp.mechanisms.BandedToeplitz(bands=2, steps=6))
  simulate = functools.partial(
      tfdp.federated.simulate, make(plan=plan), out=tmp_path, progress=False)
  simulate(users(), rounds=1)
  with pytest.raises(tfdp.federated.SavedRunError, match='client_ids'):
    simulate(users(names=[f'user{i}' for i in range(5, -1, -1)]))
  assert simulate(users(), rounds=2).rounds == 2


@pytest.mark.pitfall(
    'A client is listed twice, so one user has a larger sensitivity.',
    severity='critical', stops='ValueError')
def test_a_client_that_is_named_twice_is_refused():
  class Twice:
    client_ids = ['user0', 'user1', 'user0', 'user2', 'user3', 'user4']

  with pytest.raises(ValueError, match='(?s)every client once.*some more often'):
    tfdp.federated.simulate(make(), Twice())
