# SPDX-License-Identifier: Apache-2.0
"""Every query refuses records, and sums, that are not like its specs, before they are clipped."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import mechanisms
from tfdp_adaptive import queries
from tfdp_adaptive import rules

SPECS = {'kernel': tf.TensorSpec([2, 3]), 'bias': tf.TensorSpec([2])}
GAUSSIAN = mechanisms.IndependentGaussian()
NUMBERS = dict(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4)
QUERIES = {
    'rule': lambda: queries.RuleQuery(rules.dp_sgd(), SPECS, **NUMBERS),
    'rule that scales': lambda: queries.RuleQuery(
        rules.scale_then_privatize(scale_epsilon=.1), SPECS, **NUMBERS),
    'rule of groups': lambda: queries.RuleQuery(rules.grouped(rules.dp_sgd(), (0, 1)), SPECS,
                                                **NUMBERS),
    'rule of squares': lambda: queries.RuleQuery(
        rules.dp_adam_jme(), SPECS, adjacency='replace', **NUMBERS),
    'mechanism': lambda: queries.MechanismSumQuery(SPECS, GAUSSIAN, 1.0, 1.0)}


def right(dtype=tf.float32):
  return {name: tf.ones(spec.shape, dtype) for name, spec in SPECS.items()}


WRONG = {
    'a number for a vector': right() | {'bias': tf.ones([])},
    'a vector of one': right() | {'bias': tf.ones([1])},
    'an axis more': right() | {'bias': tf.ones([1, 2])},
    'transposed': right() | {'kernel': tf.ones([3, 2])},
    'a leaf less': {'kernel': tf.ones([2, 3])},
    'a leaf more': right() | {'other': tf.ones([2])},
    'another name': {'kernel': tf.ones([2, 3]), 'offset': tf.ones([2])},
    'a list': [tf.ones([2]), tf.ones([2, 3])],
    'a number': tf.ones([]), 'nothing': (), 'none': None, 'text': 'record',
    'integers': right(tf.int32), 'half precision': right(tf.float16),
    'double precision': right(tf.float64), 'complex': right(tf.complex64),
    'one leaf of another dtype': right() | {'bias': tf.ones([2], tf.float64)},
    'leaves of text': right() | {'bias': tf.constant(['a', 'b'])}}


@pytest.fixture(scope='module', params=sorted(QUERIES))
def query(request):
  return QUERIES[request.param]()


def test_records_like_the_specs_are_taken(query):
  params = query.derive_sample_params(query.initial_global_state())
  query.preprocess_record(params, right())
  query.preprocess_record(params, {name: np.ones(s.shape, np.float32) for name, s in SPECS.items()})


@pytest.mark.parametrize('wrong', sorted(WRONG))
def test_records_that_are_not_are_refused(query, wrong):
  params = query.derive_sample_params(query.initial_global_state())
  with pytest.raises((ValueError, TypeError), match='`record` must have the.*Received') as error:
    query.preprocess_record(params, WRONG[wrong])
  assert str(error.value).count('\n') < 6


def test_shapes_that_are_known_late_are_compared_late(query):
  """In a graph that was traced without them, as of a federated computation."""
  params = query.derive_sample_params(query.initial_global_state())
  spec = {name: tf.TensorSpec(None) for name in SPECS}
  late = tf.function(lambda record: query.preprocess_record(params, record),
                     input_signature=[spec])
  late(right())
  with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
    late(WRONG['a number for a vector'])


def test_sums_of_another_shape_are_refused(query):
  state = query.initial_global_state()
  sums = query.initial_sample_state()
  query.get_noised_result(sums, state)
  leaves = tf.nest.flatten(sums)
  for i, leaf in enumerate(leaves):
    if leaf.shape.rank == 0:
      continue
    for wrong in (tf.zeros([]), tf.zeros([1, *leaf.shape]), tf.zeros([5, *leaf.shape])):
      others = tf.nest.pack_sequence_as(sums, [*leaves[:i], wrong, *leaves[i + 1:]])
      with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        query.get_noised_result(others, state)
