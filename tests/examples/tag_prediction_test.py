# SPDX-License-Identifier: Apache-2.0
"""Bags of words and tags by hand, and errors that name the line."""

import json
import pathlib

import numpy as np
import pytest

from tfdp_adaptive.examples import corpus
from tfdp_adaptive.examples import tag_prediction

POSTS = pathlib.Path(__file__).parents[2] / '..' / 'shared' / 'data' / 'stackexchange'


def test_examples_by_hand(tmp_path):
  path = tmp_path / 'posts.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in (
      {'client': 3, 'title': 'Why is the sky blue', 'text': 'The sky is blue, is it?',
       'tags': ['sky', 'optics']},
      {'client': 3, 'text': 'An answer has no tags.'},
      {'client': 'b', 'text': 'The moon is bright.', 'tags': ['moon']})), encoding='utf-8')
  questions = tag_prediction.read(path)
  assert [(q.client, q.tags) for q in questions] == [('3', ('sky', 'optics')), ('b', ('moon',))]
  assert len(questions[0].words) == 11
  words = corpus.most_frequent((q.words for q in questions), 3)
  assert words == ('is', 'the', 'blue')
  x, y = tag_prediction.examples(questions, words, ('moon', 'sky'))
  np.testing.assert_allclose(x, [[3 / 11, 2 / 11, 2 / 11], [1 / 4, 1 / 4, 0]], rtol=1e-6)
  np.testing.assert_array_equal(y, [[0, 1], [1, 0]])


@pytest.mark.parametrize('line, match', [
    ('{"client": 4711', 'a line is not valid JSON'),
    ('{"client": 4711, "tags": "a", "text": "b"}', 'every line with `tags` must have'),
    ('{"client": 4711, "text": "b"}', 'no line has `tags`')])
def test_errors_do_not_show_the_line(tmp_path, line, match):
  path = tmp_path / 'posts.jsonl'
  path.write_text(line, encoding='utf-8')
  with pytest.raises(corpus.DataError, match=match) as caught:
    tag_prediction.read(path)
  assert '4711' not in str(caught.value)


@pytest.mark.skipif(not POSTS.exists(), reason='the shared data sets are not here')
def test_real_questions():
  questions = tag_prediction.read(POSTS / 'posts.jsonl.xz')
  assert len(questions) == 5_086 and len({q.client for q in questions}) > 2_000
  assert corpus.most_frequent((q.tags for q in questions), 1) == ('discussion',)
