# SPDX-License-Identifier: Apache-2.0
"""Windows, vocabulary and the frequency baseline, by hand."""

import numpy as np
import pytest

from tfdp_adaptive.examples import corpus
from tfdp_adaptive.examples import next_word


def sentences(*texts):
  return [corpus.Sentence(None, tuple(text.split())) for text in texts]


def test_vocabulary_is_by_frequency_then_alphabet():
  assert next_word.build_vocabulary(sentences('b a c', 'c b z', 'c'), 3) == ('c', 'b', 'a')


def test_windows_by_hand():
  x, y = next_word.examples(sentences('a b x a', 'b b b b b b b'), ('a', 'b'), length=5)
  np.testing.assert_array_equal(y, [[2, 3, 1, 2, 0], [3, 3, 3, 3, 3]])
  np.testing.assert_array_equal(
      x[0], [[0, 0, 0], [0, 0, 2], [0, 2, 3], [2, 3, 1], [3, 1, 2]])
  np.testing.assert_array_equal(x[1, -1], [3, 3, 3])
  assert x.dtype == y.dtype == np.int32 and x.flags.c_contiguous


def test_no_window_holds_the_word_to_predict_or_a_later_one():
  words = ' '.join(f'w{i}' for i in range(9))
  x, y = next_word.examples(sentences(words), words.split(), length=9)
  for position in range(9):
    assert x[0, position].max() < y[0, position]


def test_an_example_depends_on_its_own_sentence_only():
  both = next_word.examples(sentences('a b c', 'c a a'), 'abc')
  alone = next_word.examples(sentences('c a a'), 'abc')
  for together, single in zip(both, alone):
    np.testing.assert_array_equal(together[1:], single)


def test_frequency_baseline_by_hand():
  train = np.array([[2, 2, 2, 3, 0]])  # Counts 0, 0, 3, 1, 0, plus one each: .001, 1, 4, 2, 1.
  frequencies = next_word.log_frequencies(train, 5)
  np.testing.assert_allclose(np.exp(frequencies) * 8.001, [.001, 1, 4, 2, 1])
  loss, accuracy = next_word.frequency_baseline(frequencies, np.array([[2, 4, 0]]))
  assert loss == pytest.approx(-np.log(4 / 8.001) / 2 - np.log(1 / 8.001) / 2)
  assert accuracy == .5


def test_read_vocabulary(tmp_path):
  path = tmp_path / 'words.txt'
  path.write_text('The\n\nof \n', encoding='utf-8')
  assert next_word.read_vocabulary(path) == ('the', 'of')
  path.write_text('the\nof\nthe\n', encoding='utf-8')
  with pytest.raises(corpus.DataError, match="line 3: 'the' is already in line 1"):
    next_word.read_vocabulary(path)
  path.write_text('the\nof a\n', encoding='utf-8')
  with pytest.raises(corpus.DataError, match='line 2: must be one word'):
    next_word.read_vocabulary(path)
