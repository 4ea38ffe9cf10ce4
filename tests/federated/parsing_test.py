# SPDX-License-Identifier: Apache-2.0
"""Examples of small users, parsed by protobuf, are those of TensorFlow's own parser."""

import pickle

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive.federated import sources

FLOATS = st.floats(width=32)
VALUES = {tf.float32: FLOATS, tf.int64: st.integers(-2**63, 2**63 - 1),
          tf.string: st.sampled_from([b'', b'\0', b'a\0']) | st.binary(max_size=5)}
SHAPES = ([], [1], [3], [2, 2], [0])
NAMES = ('a', 'b', 'ö')


LISTS = {tf.float32: ('float_list', tf.train.FloatList),
         tf.int64: ('int64_list', tf.train.Int64List),
         tf.string: ('bytes_list', tf.train.BytesList)}


def feature(kind, values):
  if kind is None:
    return tf.train.Feature()
  name, made = LISTS[kind]
  return tf.train.Feature(**{name: made(value=values)})


def row(features):
  return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


@st.composite
def specs(draw):
  """Features with and without defaults."""
  made = {}
  for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True)):
    kind, shape = draw(st.sampled_from([*VALUES])), draw(st.sampled_from(SHAPES))
    size = int(np.prod(shape, dtype=int))
    default = draw(st.none() | st.lists(VALUES[kind], min_size=size, max_size=size))
    if default is not None:
      default = np.array(default, kind.as_numpy_dtype).reshape(shape).tolist()
    made[name] = tf.io.FixedLenFeature(shape, kind, default)
  return made


@st.composite
def examples(draw, features, odd):
  """A row of these features; if odd, some are missing, empty, or of another type or length."""
  made = {'other': feature(tf.int64, [1])} if draw(st.booleans()) else {}
  for name, spec in features.items():
    kind, size = spec.dtype, int(np.prod(spec.shape, dtype=int))
    change = draw(st.sampled_from(['', '', '', *odd]))
    if change == 'type':
      kind = draw(st.sampled_from([*VALUES]))
    if change == 'length':
      size = draw(st.integers(0, 4))
    if change == 'none':
      kind = None
    values = [] if kind is None else draw(
        st.lists(VALUES[kind], min_size=size, max_size=size))
    if change != 'missing':
      made[name] = feature(kind, values)
  return row(made)


@st.composite
def bytes_like(draw, one):
  """Bytes near those of an example: changed, cut off, or two examples in one."""
  cut, end = sorted(draw(st.integers(0, len(one))) for _ in range(2))
  between = draw(st.binary(max_size=3) | st.just(one) | st.just(one[cut:end]))
  return one[:cut] + between + one[end:]


def outcome(parse, rows):
  """Columns as lists and their types, or the kind of error and what it says."""
  try:
    columns = parse(rows)
  except (tf.errors.InvalidArgumentError, UnicodeDecodeError):  # TensorFlow decodes its message.
    return 'refused'
  return {name: (np.asarray(value).dtype, np.asarray(value).shape, np.asarray(value).tobytes()
                 if value.dtype != object else np.asarray(value).tolist())
          for name, value in columns.items()}


def eager(features):
  return lambda rows: {name: value.numpy() for name, value in tf.io.parse_example(
      tf.constant(rows, tf.string), features).items()}


def parser(features):
  """A parser that asks TensorFlow without tracing, which takes long."""
  made = sources.Protos(features)
  made.__dict__['_parse'] = lambda rows: tf.io.parse_example(rows, features)
  return made


ODD = ('missing', 'type', 'length', 'none')


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=150, deadline=None)
def test_what_is_parsed_and_refused_is_what_tensorflow_does(data):
  features = data.draw(specs())
  rows = data.draw(st.lists(examples(features, ODD), min_size=1, max_size=3))
  assert outcome(parser(features), rows) == outcome(eager(features), rows)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=150, deadline=None)
def test_bytes_that_no_writer_makes_are_what_tensorflow_makes_of_them(data):
  features = data.draw(specs())
  rows = [data.draw(bytes_like(data.draw(examples(features, ODD))))]
  assert outcome(parser(features), rows) == outcome(eager(features), rows)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=50, deadline=None)
def test_usual_rows_need_no_call_of_tensorflow(data):
  features = data.draw(specs().filter(
      lambda made: all(0 not in one.shape for one in made.values())))
  rows = data.draw(st.lists(examples(features, ()), min_size=1, max_size=3))
  made = sources.Protos(features)
  assert outcome(made, rows) == outcome(eager(features), rows)
  assert '_parse' not in vars(made)


def test_long_rows_and_other_features_are_parsed_by_tensorflow(monkeypatch):
  features = {'a': tf.io.FixedLenFeature([2], tf.float32)}
  rows = [row({'a': feature(tf.float32, [i, 0.1])}) for i in range(40)]
  made = pickle.loads(pickle.dumps(sources.Protos(features)))
  small = made(rows)
  assert '_parse' not in vars(made)  # Nothing was traced.
  monkeypatch.setattr(sources, '_FEW_BYTES', len(rows[0]) * 40 - 1)
  np.testing.assert_array_equal(made(rows)['a'], small['a'])
  assert '_parse' in vars(made)
  for other in (
      tf.io.FixedLenSequenceFeature([], tf.float32, allow_missing=True),
      tf.io.FixedLenFeature(2, tf.float32), tf.io.RaggedFeature(tf.float32)):
    np.testing.assert_array_equal(sources.Protos({'a': other})(rows[:3])['a'], small['a'][:3])


def test_another_type_is_refused_in_words():
  parse = sources.Protos({'a': tf.io.FixedLenFeature([], tf.int64)})
  with pytest.raises(tf.errors.InvalidArgumentError, match='(?s)a.*[Dd]ata types don.t match'):
    parse([row({'a': feature(tf.float32, [1.0])})])
  with pytest.raises(tf.errors.InvalidArgumentError, match='(?s)a.*required but could not'):
    parse([row({})])
