# SPDX-License-Identifier: Apache-2.0
"""Every planted bug is a line of the code as it is now, and has tests that should notice."""

import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parent))
import bugs  # noqa: E402
import plant  # noqa: E402


def test_there_are_many_each_with_a_name_and_a_reason():
  assert len(bugs.MUTANTS) >= 80
  assert len({mutant.name for mutant in bugs.MUTANTS}) == len(bugs.MUTANTS)
  assert all(mutant.why.endswith('.') and mutant.old != mutant.new for mutant in bugs.MUTANTS)


@pytest.mark.parametrize('mutant', bugs.MUTANTS, ids=lambda mutant: mutant.name)
def test_it_can_be_planted(mutant):
  text = (plant.ROOT / mutant.file).read_text(encoding='utf-8')
  compile(plant.planted(text, mutant), mutant.file, 'exec')
  for name in mutant.tests.split():
    assert (plant.ROOT / 'tests' / name).exists()


def test_a_line_that_is_gone_is_said():
  mutant = bugs.MUTANTS[0]
  for text in ('', 2 * (mutant.old + '\n')):
    with pytest.raises(ValueError, match='Write the line as it is now'):
      plant.planted(text, mutant)


def test_words_choose():
  assert plant.chosen([], False) + plant.chosen([], True)
  assert [mutant.name for mutant in plant.chosen(['replace counts once'], False)] == [
      'replace counts once']
  assert all(mutant.file.startswith(('federated/', 'tfdp_adaptive/queries/'))
             for mutant in plant.chosen([], True))
