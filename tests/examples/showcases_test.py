# SPDX-License-Identifier: Apache-2.0
"""The two showcases of the demo: their data, their privacy and what they show."""

import numpy as np
import pytest

from tfdp_adaptive.examples import report as report_lib
from tfdp_adaptive.examples import showcases


def test_inputs_of_every_scale_tell_equally_much():
  x, y = showcases.make_scales(100_000, 5)
  assert x.std(0)[0] == pytest.approx(3, rel=.01) and x.std(0)[-1] == pytest.approx(.003, rel=.01)
  correlations = np.abs(np.corrcoef(np.concatenate([x, y], 1).T)[-1, :-1])
  assert correlations.min() > .8 * correlations.max() > .05
  again, other = showcases.make_scales(10, 5), showcases.make_scales(10, 6)
  np.testing.assert_array_equal(again[0], showcases.make_scales(10, 5)[0])
  assert not np.array_equal(again[0], other[0])


def test_class_k_comes_one_kth_as_often():
  _, y = showcases.make_classes(200_000, 5)
  counts = np.bincount(y, minlength=100)
  np.testing.assert_allclose(counts[:5] / counts[0], 1 / np.arange(1, 6), rtol=.05)


@pytest.mark.parametrize('case', [showcases.SCALES, showcases.NOISE], ids=lambda case: case.part)
def test_every_method_has_a_grid_of_one_size_that_holds_its_settings(case):
  sizes = {int(np.prod([len(values) for values in method.grid.values()]))
           for method in case.methods.values()}
  assert sizes == {12}
  for method in case.methods.values():
    for name, values in method.grid.items():
      assert method.settings[name] in values, (method.label, name)


@pytest.mark.thorough
@pytest.mark.parametrize('case, names', [
    (showcases.SCALES, ['adam', 'dp_adam_stp']), (showcases.NOISE, ['independent', 'banded'])],
                         ids=['scales', 'noise'])
def test_what_is_reported_is_within_epsilon(case, names, tmp_path):
  few = case._replace(steps=40, methods={name: case.methods[name] for name in names})
  with report_lib.Report(tmp_path / 'out', {}, as_json=False) as report:
    showcases.run(few, report)
    report.finish()
  rows = report._rows
  assert [row.method for row in rows] == [few.methods[name].label for name in names]
  for row, name in zip(rows, names):
    if few.methods[name].optimizer:
      assert .98 * case.epsilon <= row.epsilon <= case.epsilon and row.unit == 'example'
    else:
      assert row.epsilon is None
    assert row.curve[-1][0] == 40 and row.accuracy > row.curve[0][2] + .05
  assert (tmp_path / 'out' / 'curves.png').exists()


def test_table_and_picture_rank_by_what_is_drawn():
  row = lambda name, loss, accuracy, part, epsilon=1.0: report_lib.Row(
      name, part, loss, accuracy, epsilon, unit='example', curve=((0, 9., 0.), (1, loss, accuracy)))
  rows = [row('DP-SGD', .5, .7, 'scales'), row('DP-AdamSTP', .6, .85, 'scales'),
          row('DP-SGD, independent noise', .2, .9, 'noise'),
          row('DP-SGD, banded noise', .1, .9, 'noise')]
  report = report_lib.Report.__new__(report_lib.Report)
  report._rows = rows
  assert [line.split('  ')[0] for line in report.table().split('\n')[1:] if line[0] != '-'] == [
      'DP-AdamSTP', 'DP-SGD', 'DP-SGD, banded noise', 'DP-SGD, independent noise']
  found = lambda part, ends, other=0.0: report_lib._found(
      report_lib._PANELS[part], [r for r in rows if r.part == part], ends, other)
  assert found('scales', {'DP-SGD': .3, 'DP-AdamSTP': .15}) == (
      'DP-AdamSTP: 50% fewer errors than DP-SGD, epsilon 1 per example')
  assert found('noise', {r.method: r.loss for r in rows[2:]}) == (
      'banded noise: 50% less loss than independent noise, epsilon 1 per example')
  assert report_lib._found(report_lib._PANELS['centralized'], rows, {'a': .1, 'b': .2}, .4) == (
      'b gains 0.2 of 0.4 without privacy, epsilon 1 per example')
  assert found('noise', {}) == '' and found('scales', {'DP-SGD': .3}) == 'epsilon 1 per example'


@pytest.mark.slow
def test_they_show_what_they_should():
  for case, better, worse in [(showcases.SCALES, 'dp_adam_stp', 'dp_sgd'),
                              (showcases.NOISE, 'banded', 'independent')]:
    train, test = case.make(case.population_size, 1), case.make(5000, 3)
    results = [case.measure(showcases.fit(
        case, case.methods[name], train, case.methods[name].settings, test)[0])
               for name in (better, worse)]
    assert results[0] < .85 * results[1], case.part
