# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with a command line is said early, in one line, and leaves nothing behind."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
import warnings

import hypothesis
from hypothesis import strategies as st
import pytest

import tfdp_adaptive
from tfdp_adaptive import errors
from tfdp_adaptive.cli import main
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import text_options

ROOT = pathlib.Path(tfdp_adaptive.__file__).parent.parent
NUMBERS = st.one_of(
    st.integers(-10**25, 10**25).map(str), st.floats().map(repr),
    st.sampled_from(['', ' ', 'nan', 'inf', '-inf', '1e400', '1e-400', '0', '-0.0', '1_0', '\u0663',
                     '0x10', 'true', '1,5', '9' * 6000, '1e-9', '1e9', '1e11', '\udcff']))
PATHS = st.sampled_from(['', '.', '/', '/dev/null', '/dev/zero', '/nonexistent/file', 'folder',
                         'empty', 'binary', 'blank', 'one', 'short.jsonl', 'broken.gz', 'broken.xz',
                         'deep.json', 'no\0ne', '\udcff', 'n' * 300, 'words', 'twice', 'client'])
KINDS = {
    **dict.fromkeys(('steps', 'batch-size', 'vocabulary-size', 'rounds', 'clients-per-round',
                     'canaries', 'confidence'), NUMBERS),
    'epsilon': NUMBERS, 'delta': NUMBERS, 'data': PATHS, 'vocabulary': PATHS, 'out': PATHS,
    'methods': st.text(max_size=8), 'method': st.text(max_size=8), 'set': st.one_of(
        st.text(max_size=8), NUMBERS.map('learning_rate={}'.format))}
USED = {
    'audit': ['epsilon', 'delta', 'data', 'vocabulary', 'method', 'set', 'steps', 'batch-size',
              'canaries', 'confidence'],
    'federated': ['epsilon', 'delta', 'data', 'vocabulary', 'out', 'methods', 'rounds',
                  'clients-per-round'],
    'compare': ['steps', 'batch-size', 'epsilon', 'delta', 'data', 'vocabulary', 'vocabulary-size',
                'out', 'methods']}
EXAMPLES = int(os.environ.get('TFDP_FUZZ', 24))  # Examples per test; `TFDP_FUZZ=1000` runs more.


def environment(**more):
  return {'PATH': os.environ['PATH'], 'PYTHONPATH': str(ROOT), 'TF_CPP_MIN_LOG_LEVEL': '3', **more}


def tfdp(*arguments, **more):
  return subprocess.run(
      [sys.executable, '-m', 'tfdp_adaptive.cli.main', *arguments], env=environment(), timeout=120,
      check=False, **{'capture_output': True, 'text': True, **more})


def check(capsys, arguments):
  """Runs a command that cannot be carried out."""
  try:
    status = main.main(arguments)
  except SystemExit as error:  # argparse's, after its usage.
    status = error.code
  said = capsys.readouterr().err
  assert status == 2, (arguments, said)
  assert 'error' in said.splitlines()[-1] and 'Traceback' not in said, said
  return said


@pytest.fixture(scope='module')
def broken(tmp_path_factory):
  """A folder of files that are no text to train on."""
  path = tmp_path_factory.mktemp('broken')
  (path / 'folder').mkdir()
  for name, content in {
      'empty': b'', 'blank': b' \n \n', 'binary': bytes(range(256)), 'one': b'One short sentence.',
      'short.jsonl': b'{"text": "one two three"}\n{"text"', 'broken.gz': b'\x1f\x8b\x08broken',
      'broken.xz': b'\xfd7zXZ', 'deep.json': b'[' * 100_000, 'words': b'the cat\n',
      'twice': b'the\nthe\n', 'client': b'{"text": "one two three", "client": [1]}'}.items():
    (path / name).write_bytes(content)
  return path


@pytest.mark.pitfall(
    'Wrong arguments give a traceback, or fail only after minutes of work.',
    severity='medium', stops='an error of one line before any work starts')
@pytest.mark.parametrize('command', sorted(USED))
def test_nothing_wrong_is_a_traceback_or_leaves_files(command, broken, monkeypatch):
  """One option at least is wrong: the text to train on never is one."""
  monkeypatch.chdir(broken)
  monkeypatch.setattr(sys, 'stderr', open(os.devnull, 'w', encoding='utf-8'))  # Silences argparse.
  before = sorted(broken.rglob('*'))

  @hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
  @hypothesis.given(st.data())
  def run(data):
    arguments = [command]
    for name in data.draw(st.lists(st.sampled_from(USED[command]), unique=True)):
      arguments += [f'--{name}', data.draw(KINDS[name])]
    if '--data' not in arguments:
      arguments += ['--data', data.draw(PATHS)]
    try:
      status = main.main(arguments)
    except SystemExit as error:
      status = error.code
    assert status == 2, arguments

  run()
  assert sorted(broken.rglob('*')) == before


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.data())
def test_privacy_answers_or_refuses(data):
  """Numbers of any size; what is answered is JSON without NaN."""
  names = ['population-size', 'batch-size', 'steps', data.draw(
      st.sampled_from(['epsilon', 'noise-multiplier']))]
  names += data.draw(st.lists(st.sampled_from(['delta', 'l2-norm-clip'])))
  arguments = ['privacy', '--json', '--accountant', 'rdp', '--sampling', 'fixed-order']
  good = {'population-size': '1000', 'batch-size': '10', 'steps': '10', 'epsilon': '1',
          'noise-multiplier': '1'}
  wrong = data.draw(st.sampled_from(names))
  for name in names:
    arguments += [f'--{name}', good[name] if name in good and name != wrong else
                  data.draw(NUMBERS)]
  try:
    status = main.main(arguments)
  except SystemExit as error:
    status = error.code
  assert status in (0, 2), arguments


@pytest.mark.parametrize('out, message', [
    ('', 'argument --out: must be a path'), ('file', '--out must be a folder'),
    ('file/below', '--out must be a folder'), ('/proc/nowhere', 'that files can be written to'),
    ('/dev/full', '--out must be a folder'), ('n' * 300, 'File name too long')])
@pytest.mark.parametrize('command', [
    'compare', 'federated', 'demo', 'mechanism --steps 99999999999'])
def test_the_folder_is_checked_before_any_work(
    command, out, message, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'file').write_text('')
  assert message in check(capsys, [*command.split(), '--out', out])
  assert [path.name for path in tmp_path.iterdir()] == ['file']


def test_json_has_no_numbers_that_are_none():
  nan, inf = float('nan'), float('inf')
  text = options.to_json({'a': [nan, 1.5, (inf, {'b': -inf})], 'c': None, 'd': 'nan'})
  assert json.loads(text) == {'a': [None, 1.5, [None, {'b': None}]], 'c': None, 'd': 'nan'}


PRIVACY = ['privacy', '--population-size', '1000', '--batch-size', '10', '--steps', '10',
           '--noise-multiplier', '1', '--sampling', 'fixed-order']


@pytest.mark.thorough
def test_output_that_cannot_be_written(tmp_path):
  with open('/dev/full', 'w', encoding='utf-8') as full:
    done = tfdp(*PRIVACY, capture_output=False, stdout=full, stderr=subprocess.PIPE)
  assert done.returncode == 2
  assert done.stderr == 'tfdp privacy: error: [Errno 28] No space left on device\n'
  reader, writer = os.pipe()
  os.close(reader)
  done = tfdp(*PRIVACY, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
  os.close(writer)
  assert (done.returncode, done.stderr) == (141, '')
  shell = subprocess.run(
      ['sh', '-c', f'exec {sys.executable} -m tfdp_adaptive.cli.main {" ".join(PRIVACY)} >&- 2>&-'],
      env=environment(), check=False)
  assert shell.returncode == 0


@pytest.mark.thorough
def test_an_interrupt_at_any_moment_ends_in_one_line(tmp_path):
  """While libraries load, text is read, or noise is found."""
  script = ('import sys; from tfdp_adaptive.cli import main; print("ready", flush=True)\n'
            f'sys.exit(main.main(["compare", "--out", {str(tmp_path / "out")!r}]))')
  for seconds in (.01, .5, 2., 5.):
    victim = subprocess.Popen([sys.executable, '-c', script], env=environment(), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    victim.stdout.readline()
    time.sleep(seconds)
    while victim.poll() is None:  # A library may keep one to itself.
      victim.send_signal(signal.SIGINT)
      try:
        victim.wait(10)
      except subprocess.TimeoutExpired:
        pass
    said = victim.communicate()[1]
    assert victim.returncode == 130 and said.splitlines()[-1].endswith(': interrupted'), said
    assert 'Traceback' not in said


@pytest.mark.thorough
def test_help_and_wrong_arguments_do_not_wait_for_libraries(broken):
  computing = {'mechanism', 'privacy'}  # Their choices are those of the accounting.
  script = ('import sys; from tfdp_adaptive.cli import main\n'
            'def run(*arguments):\n'
            '  try: print(main.main(list(arguments)))\n'
            '  except SystemExit as error: print(error.code)\n'
            '  assert "tensorflow.python" not in sys.modules, arguments\n'
            '  assert arguments[-1] != "--help" or "scipy.linalg" not in sys.modules, arguments\n'
            'run("--help"); assert "numpy" not in sys.modules and "tqdm" not in sys.modules\n'
            f'for name in {sorted(set(main.COMMANDS) - computing)}: run(name, "--help")\n'
            'assert "scipy" not in sys.modules\n'
            f'for name in {computing}: run(name, "--help")\n'
            'run("--version"); run("compare", "--epsilon", "0")\n'
            f'run(*{PRIVACY})\n'
            f'run("compare", "--data", {str(broken / "empty")!r}, "--out", {str(broken)!r})\n'
            'import tensorflow as tf; assert tf.constant(1).numpy() == 1\n')
  done = subprocess.run([sys.executable, '-c', script], env=environment(), check=False, text=True,
                        capture_output=True)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines().count('examples:') == 1 + len(main.COMMANDS)


def test_every_example_of_help_is_one(monkeypatch):
  for name, (_, examples) in main.COMMANDS.items():
    assert examples
    for example in examples:
      words = shlex.split(example)
      assert words[:2] == ['tfdp', name]
      assert main.parser(words[1:]).parse_args(words[1:]).command == name


def test_version(capsys):
  with pytest.raises(SystemExit) as status:
    main.main(['--version'])
  assert status.value.code == 0
  assert capsys.readouterr().out.startswith('tfdp-adaptive 0.')


def test_an_interrupt_that_a_library_turns_into_an_error_of_its_own(monkeypatch, capsys):
  def parser(_):
    try:
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(10)
    except KeyboardInterrupt:
      raise ImportError('it failed') from None

  monkeypatch.setattr(main, 'parser', parser)
  before = signal.getsignal(signal.SIGINT)
  assert main.main(['privacy']) == 130
  assert capsys.readouterr().err == 'tfdp: interrupted\n'
  assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_while_a_library_loads_waits_for_its_end(tmp_path, monkeypatch):
  (tmp_path / 'slow_library.py').write_text(
      'import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(.01)\ndone = 1')
  monkeypatch.syspath_prepend(tmp_path)
  interrupts = main._Interrupts()
  try:
    main._load_when_used('slow_library', interrupts)
    with pytest.raises(KeyboardInterrupt):
      print(sys.modules['slow_library'].done)
    assert sys.modules['slow_library'].__dict__['done'] == 1  # All of it ran.
    with pytest.raises(KeyboardInterrupt):  # At any other time an interrupt is not held.
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(10)
  finally:
    interrupts.close()
    sys.modules.pop('slow_library')


def test_warnings_of_the_library_are_notes(capsys):
  with warnings.catch_warnings():
    warnings.simplefilter('always')
    with main._notes('tfdp compare'):
      warnings.warn('Try less.', errors.Caution, stacklevel=2)
      warnings.warn('Of others.', stacklevel=2)
    warnings.warn('After it.', errors.Caution, stacklevel=2)
  lines = capsys.readouterr().err.splitlines()
  assert lines[0] == 'tfdp compare: note: Try less.' and 'note' not in ''.join(lines[1:])


@pytest.mark.parametrize('command', sorted(main.COMMANDS))
def test_unknown_options_are_named_by_their_command(command, capsys):
  with pytest.raises(SystemExit) as error:
    main.parser([command])._subparsers._group_actions[0].choices[command].parse_args(['--hepl'])
  said, = capsys.readouterr().err.splitlines()
  assert error.value.code == 2 and said.startswith(f'tfdp {command}: error: ')
  assert said.endswith(f'(see tfdp {command} --help)')


def test_a_misspelled_option_names_the_one_that_was_meant(capsys):
  with pytest.raises(SystemExit):
    main.main(['compare', '--epsilonn', '3'])
  assert capsys.readouterr().err == (
      'tfdp compare: error: unrecognized arguments: --epsilonn 3. Did you mean --epsilon? '
      '(see tfdp compare --help)\n')


@pytest.mark.parametrize('name', ['DPAdamSTP', 'dp_adam_stp', 'dp-adam-stp', 'DP_ADAM_STP'])
def test_methods_are_found_however_they_are_spelled(name):
  words = ['compare', '--methods', name]
  assert main.parser(words).parse_args(words).methods == ['dp_adam_stp']
  assert text_options.chosen(name, ['dp_adam', 'dp_adam_stp']) == ['dp_adam_stp']


@pytest.mark.parametrize('words, close', [
    (['comapre'], 'compare'), (['audit', '--method', 'dp_adm_stp'], 'dp_adam_stp'),
    (['compare', '--methods', 'dp_sgd,dp_adma'], 'dp_adam'), (['Mechanisms'], 'mechanism')])
def test_what_was_meant_is_said_in_one_line(words, close, capsys):
  try:
    status = main.main(words)
  except SystemExit as stopped:
    status = stopped.code
  said = capsys.readouterr().err
  assert status == 2 and said.count('\n') == 1
  assert f'Did you mean {close}' in said and 'Received: ' in said
