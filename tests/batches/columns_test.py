# SPDX-License-Identifier: Apache-2.0
"""Rows that are dicts: the batches are those of the arrays of the chosen columns."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_adaptive import compat
from tfdp_adaptive.batches import sources
from tfdp_adaptive.privacy import plan as plan_lib

N = 20
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
Y = np.arange(N)
TEXT = np.array([f'text {i}' for i in range(N)])


class Rows:
  """Rows as grain gives them; a column that is never chosen cannot be read as an array."""

  def __len__(self):
    return N

  def __getitem__(self, number):
    return {'image': X[number], 'label': int(Y[number]), 'text': str(TEXT[number]),
            'answers': None}


class Several(Rows):
  """Rows as Hugging Face data sets give them."""

  def __getitems__(self, numbers):
    return [self[number] for number in numbers]


def batches(data, columns=None):
  plan = plan_lib.PrivacyPlan(
      population_size=N, batch_size=5, steps=4, l2_norm_clip=1.0, noise_multiplier=1.0,
      target_delta=1e-3, seed=3)
  return list(plan.batches(data, columns=columns))


DATA = {
    'rows': Rows, 'several': Several,
    'dict': lambda: {'image': X, 'label': Y, 'text': TEXT},
    'data set': lambda: tf.data.Dataset.from_tensor_slices({'image': X, 'label': Y, 'text': TEXT}),
}


@pytest.mark.parametrize('kind', DATA)
@pytest.mark.parametrize('columns, expected', [
    (('image', 'label'), (X, Y)), (('image', 'label', 'label'), (X, Y, Y)), ('image', X),
    ((('image', 'text'), 'label'), ((X, TEXT), Y)),
    (({'a': 'text'}, 'label'), ({'a': TEXT}, Y))], ids=['pair', 'weighted', 'x', 'two', 'named'])
def test_batches_are_those_of_arrays(kind, columns, expected):
  for one, other in zip(batches(DATA[kind](), columns), batches(expected)):
    tf.nest.assert_same_structure(one, other)
    for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other)):
      np.testing.assert_array_equal(a, b)


class Sequence(compat.keras.utils.Sequence):

  def __len__(self):
    return 1

  def __getitem__(self, number):
    return {'image': X}


@pytest.mark.parametrize('data, columns, words', [
    (Rows(), ('image', 'labels'), "of ['answers', 'image', 'label', 'text']"),
    ({'image': X}, ('label',), "of ['image']"),
    (tf.data.Dataset.from_tensor_slices({'image': X}), ('label',), "of ['image']"),
    (tf.data.Dataset.from_tensor_slices(X), ('label',), 'rows that are dicts'),
    ((X, Y), ('image', 'label'), 'data whose rows are dicts'),
    (Sequence(), ('image',), 'data whose rows are dicts'),
    (X, ('image', 'label'), 'rows that are dicts'), (7, ('image',), 'rows are dicts'),
    (Rows(), (0, 1), '`columns` must be names')])
def test_wrong_columns_are_refused(data, columns, words):
  with pytest.raises(ValueError) as error:
    batches(data, columns)
  assert words in str(error.value)
  assert 'text 3' not in str(error.value)  # A value of a record.


def test_columns_that_are_not_chosen_are_not_converted():
  assert sources.columns_of(Rows(), 'text')[3] == 'text 3'
