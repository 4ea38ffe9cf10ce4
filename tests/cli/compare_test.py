# SPDX-License-Identifier: Apache-2.0
"""`tfdp compare` on a small text: what it prints, writes, claims and refuses."""

import json
import os

import dp_accounting
from dp_accounting import pld
import numpy as np
import pytest

from tfdp_adaptive.cli import main
from tfdp_adaptive.examples import corpus
from tfdp_adaptive.examples import report as report_lib
from tfdp_adaptive.examples import settings
from tfdp_adaptive.examples import tasks

WORDS = ('the', 'cat', 'dog', 'sees', 'hears', 'and', 'runs', 'away')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A text of 400 sentences by 40 clients, and its public vocabulary."""
  path = tmp_path_factory.mktemp('data')
  rng = np.random.default_rng(0)
  with open(path / 'text.jsonl', 'w', encoding='utf-8') as stream:
    for i in range(400):
      subject, verb = rng.choice(WORDS[1:3]), rng.choice(WORDS[3:5])
      stream.write(json.dumps({
          'client': i % 40, 'text': f'The {subject} {verb} the unknown and runs away.'}) + '\n')
  (path / 'words.txt').write_text('\n'.join(WORDS), encoding='utf-8')
  return path


def arguments(folder, *more):
  return ['compare', '--data', str(folder / 'text.jsonl'), '--vocabulary',
          str(folder / 'words.txt'), '--batch-size', '32', *more]


@pytest.fixture(scope='module')
def finished(folder):
  """The folder of one short run of every method."""
  assert main.main(arguments(folder, '--steps', '4', '--out', str(folder / 'run'))) == 0
  return folder / 'run'


def rows(path):
  return json.loads((path / 'results.json').read_text(encoding='utf-8'))['rows']


@pytest.mark.thorough
def test_every_method_is_in_the_table(finished):
  by_method = {row['method']: row for row in rows(finished)}
  private = {m.label for m in settings.CENTRALIZED.values() if m.optimizer}
  assert {'DP-SGD', 'DP-Adam', 'DP-AdamBC', 'DP-AdamIME', 'DP-AdamSTP'} == private
  assert set(by_method) == private | {'Adam, not private', 'public word frequencies'}
  for label, row in by_method.items():
    assert np.isfinite(row['loss']) and 0 <= row['accuracy'] <= 1
    if label in private:
      assert row['unit'] == 'sentence' and row['settings']['l2_norm_clip'] > 0
    else:
      assert row['epsilon'] is None
    if label != 'public word frequencies':
      assert [point[0] for point in row['curve']] == [0, 1, 2, 3, 4]
      assert row['seconds_per_step'] > 0 and row['curve'][-1][1] == row['loss']


@pytest.mark.thorough
def test_epsilon_is_what_the_noise_gives(finished):
  size = json.loads((finished / 'results.json').read_text(encoding='utf-8'))['training_sentences']
  statement = (finished / 'privacy.txt').read_text(encoding='utf-8')
  sigma = float(statement.split('noise multiplier ')[1].split(',')[0])
  event = dp_accounting.PoissonSampledDpEvent(
      32 / size, dp_accounting.GaussianDpEvent(sigma))
  expected = pld.PLDAccountant().compose(event, 4).get_epsilon(1e-3)
  private = [row for row in rows(finished) if row['epsilon'] is not None]
  assert len(private) == 5
  for row in private:
    assert row['delta'] == 1e-3 and .99 * 4 <= row['epsilon'] <= 4
    assert row['epsilon'] == pytest.approx(expected, rel=1e-3)
  together = pld.PLDAccountant().compose(event, 5 * 4).get_epsilon(1e-3)
  claimed = float(statement.split('on the same records: (')[1].split(',')[0])
  assert claimed == pytest.approx(together, rel=1e-3)


@pytest.mark.thorough
def test_files_and_their_paths(finished, capsys, folder):
  assert (finished / 'curves.png').read_bytes()[:4] == b'\x89PNG'
  statement = (finished / 'privacy.txt').read_text(encoding='utf-8')
  assert '8 words from the file words.txt, taken to be public' in statement
  assert 'Losses, accuracies and curves are exact numbers' in statement
  assert 'This text is public' not in statement
  out = folder / 'again'
  assert main.main(arguments(
      folder, '--steps', '1', '--methods', 'adam', '--out', str(out))) == 0
  results = json.loads((out / 'results.json').read_text(encoding='utf-8'))
  assert {'tfdp-adaptive', 'Python', 'tensorflow', 'keras', 'dp-accounting', 'numpy'} <= set(
      results['versions'])
  lines = capsys.readouterr().out.split('\n')
  assert [line for line in lines if line.startswith(str(out))] == [
      str(out / name) for name in ('results.json', 'privacy.txt', 'curves.png')]
  assert any(line.startswith('Adam, not private') and ' none ' in line for line in lines)


@pytest.mark.thorough
def test_json_goes_to_standard_output_alone(folder, capsys):
  assert main.main(arguments(
      folder, '--steps', '1', '--methods', 'adam', '--json', '--out', str(folder / 'json'))) == 0
  captured = capsys.readouterr()
  assert [row['method'] for row in json.loads(captured.out)['rows']][1:] == ['Adam, not private']
  assert str(folder / 'json' / 'results.json') in captured.err


@pytest.mark.thorough
def test_results_are_never_overwritten(folder, finished, capsys):
  before = (finished / 'results.json').read_bytes()
  assert main.main(arguments(folder, '--steps', '1', '--out', str(finished))) == 2
  assert 'exists and would be overwritten; give another --out' in capsys.readouterr().err
  assert (finished / 'results.json').read_bytes() == before


@pytest.mark.thorough
def test_tuning_takes_the_least_validation_loss_and_counts_its_runs(folder, monkeypatch, capsys):
  method = settings.Method('DP-SGD', 'DPSGD', dict(learning_rate=1., l2_norm_clip=1.),
                           dict(learning_rate=(1e-6, 1.)))
  monkeypatch.setattr(settings, 'CENTRALIZED', {'dp_sgd': method})
  out = folder / 'tuned'
  assert main.main(arguments(
      folder, '--steps', '12', '--epsilon', '50', '--tune', '--out', str(out))) == 0
  assert rows(out)[1]['settings']['learning_rate'] == 1.
  assert capsys.readouterr().err.count('validation loss') == 2
  assert 'All 3 private models of the centralized part' in (out / 'privacy.txt').read_text()


@pytest.mark.parametrize('name, content, message', [
    ('missing.jsonl', None, 'missing.jsonl: cannot be read: No such file'),
    ('empty.jsonl', '', 'empty.jsonl: the file is empty'),
    ('bad.jsonl', '{"text": "one two three"}\n{"text": ', 'bad.jsonl: a line is not valid JSON'),
    ('few.txt', 'One short sentence.', 'few.txt: there are too few sentences'),
])
def test_unusable_data_ends_before_anything_is_written(
    tmp_path, folder, name, content, message, capsys):
  if content is not None:
    (tmp_path / name).write_text(content, encoding='utf-8')
  status = main.main([
      'compare', '--data', str(tmp_path / name), '--out', str(tmp_path / 'out'),
      '--vocabulary', str(folder / 'words.txt')])
  captured = capsys.readouterr()
  assert status == 2 and message in captured.err and 'Traceback' not in captured.err
  assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('more, message', [
    (['--batch-size', '4000'], '--batch-size must be at most the number of training sentences'),
    (['--out', 'words.txt'], '--out must be a folder'),
    (['--out', 'words.txt/below'], '--out must be a folder'),
    (['--out', '/proc/nowhere'], 'files can be written to. Received: /proc/nowhere'),
])
def test_wrong_arguments(folder, more, message, capsys, monkeypatch):
  monkeypatch.chdir(folder)
  assert main.main(arguments(folder, *more)) == 2
  assert message in capsys.readouterr().err


def test_unknown_methods_are_refused_with_the_known_ones(folder, capsys):
  with pytest.raises(SystemExit) as error:
    main.main(arguments(folder, '--methods', 'adamw'))
  assert error.value.code == 2
  assert '--methods: must name one of adam, dp_sgd' in capsys.readouterr().err


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'), MemoryError('of 9 TB')])
def test_a_full_disk_or_memory_ends_in_one_line_and_takes_no_results(
    error, tmp_path, folder, monkeypatch, capsys):
  with report_lib.Report(tmp_path / 'out', {}, as_json=False) as report:
    row = report_lib.Row('first', 'centralized', 1.0, 0.5)
    report.add(row)
    before = report.path('results.json').read_text(encoding='utf-8')

    def full(_):
      raise error

    with monkeypatch.context() as patch:
      patch.setattr(os, 'fsync', full)
      with pytest.raises(type(error)):
        report.add(row)
      assert main.main(arguments(folder, '--out', str(tmp_path / 'full'))) == 2
    assert report.path('results.json').read_text(encoding='utf-8') == before
    assert not report.path('results.json.new').exists()
  printed = capsys.readouterr().err
  assert str(error.args[-1]) in printed and printed.count('\n') == 1


def test_the_vocabulary_of_private_text_is_never_used(folder):
  task = tasks.load(tasks.Text(folder / 'text.jsonl', vocabulary_size=50))
  assert task.num_ids == 52
  assert 'from ' + corpus.standard_library().name in ' '.join(task.notes)


def test_default_folder_is_named_after_the_time(folder, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  assert main.main(arguments(folder, '--steps', '1', '--methods', 'adam')) == 0
  (run,) = (tmp_path / 'runs').iterdir()
  assert (run / 'results.json').exists() and run.name[:2] == '20'


def test_help_does_not_wait_for_tensorflow(capsys):
  with pytest.raises(SystemExit) as status:
    main.main(['--help'])
  assert status.value.code == 0
  assert 'federated' in capsys.readouterr().out
