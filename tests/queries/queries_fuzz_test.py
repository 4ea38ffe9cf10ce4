# SPDX-License-Identifier: Apache-2.0
"""Whatever a person passes to a query works, or is refused in our own words."""

import os

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

import tfdp_adaptive as tfdp
from tfdp_adaptive import mechanisms
from tfdp_adaptive import queries

EXAMPLES = int(os.environ.get('TFDP_FUZZ', 25))  # Examples per test; `TFDP_FUZZ=1000` runs more.
SPECS = [tf.TensorSpec([3], tf.float32)]
ODD = st.one_of(
    st.sampled_from([
        None, True, False, 0, -1, 1, 2, 1.5, 0.5, -0.5, 1e-30, 1e30, float('nan'), float('inf'),
        '', '1', 'replace', b'1', (), [], {}, [1], {'a': 1}, object(), object, 1j, np.int64(3),
        np.float32(.5), np.array([1., 2.]), np.float64('nan'), 2**70, 10**400, '\udcff',
        tf.TensorSpec([2]), tf.TensorSpec([None]), tf.TensorSpec([2], tf.int32), {'a': SPECS[0]},
        tf.constant(1.0), tfdp.rules.dp_adam(), mechanisms.IndependentGaussian()]),
    st.integers(-3, 5), st.floats())
BASIC = dict(l2_norm_clip=1.0, noise_multiplier=1.0, adjacency='zero_out', clipping=None,
             seed=None)
KINDS = {
    'RuleQuery': (queries.RuleQuery, dict(
        BASIC, rule=tfdp.rules.dp_adam(), specs=SPECS, plan=None, batch_size=10, mechanism=None,
        steps=None, allow_non_private=False,
        max_participations=None)),
    'MechanismSumQuery': (queries.MechanismSumQuery, dict(
        BASIC, record_specs=SPECS, mechanism=mechanisms.IndependentGaussian(), cumulative=False)),
}


@pytest.mark.parametrize('name', sorted(KINDS))
def test_queries(name):
  kind, right = KINDS[name]
  kind(**right)

  @hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
  @hypothesis.given(st.data())
  def run(data):
    names = data.draw(st.lists(st.sampled_from(sorted(right)), min_size=1, max_size=2))
    wrong = {name: data.draw(ODD) for name in names}
    try:
      kind(**{**right, **wrong}).initial_global_state()
    except (ValueError, TypeError, tfdp.PrivacyError) as error:
      assert 'Received' in str(error), (wrong, repr(error))

  run()
