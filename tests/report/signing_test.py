# SPDX-License-Identifier: Apache-2.0
"""A changed byte, another key or a missing signature is wrong; a key that is none is an error.

`make test-sign` installs model-signing into build/sign. Its packages follow those of the stack.
"""

import pathlib
import shutil
import subprocess
import sys

import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive import compat
from tfdp_adaptive.cli import main
from tfdp_adaptive.report import card_json
from tfdp_adaptive.report import signing

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = sorted(ROOT.glob('build/sign/lib/python%d.%d/site-packages' % sys.version_info[:2]))
needs_library = pytest.mark.usefixtures('library')


@pytest.fixture(scope='module', name='library')
def find_library():
  if shutil.which('openssl') is None:
    pytest.skip('needs the openssl command')
  sys.path.extend(map(str, PACKAGES))
  try:
    signing._library()
  except ImportError as error:
    if PACKAGES and compat.KERAS_3:
      raise
    pytest.skip(f'needs packages of build/sign (`make test-sign`) that fit this stack: {error}')
  yield
  del sys.path[len(sys.path) - len(PACKAGES):]


def new_key(folder, name):
  private, public = folder / f'{name}.pem', folder / f'{name}.pub'
  run = {'check': True, 'stdin': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
  subprocess.run(['openssl', 'ecparam', '-name', 'prime256v1', '-genkey', '-noout', '-out',
                  private], **run)
  subprocess.run(['openssl', 'ec', '-in', private, '-pubout', '-out', public], **run)
  return private, public


@pytest.fixture(scope='module', name='folder')
def make_folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('signed')
  plan = tfdp.PrivacyPlan(population_size=1000, batch_size=50, steps=4, l2_norm_clip=2.0,
                          noise_multiplier=1.5, target_delta=1e-5)
  card = tfdp.Ledger().begin(plan, 'dp_adam').done(4).card(plots=False)
  (folder / 'card.json').write_text(card_json.to_json(card))
  return folder


@pytest.fixture(scope='module', name='signed')
def make_signed(folder, tmp_path_factory):
  out = tmp_path_factory.mktemp('out')
  (out / 'model.weights.h5').write_bytes(b'weights')
  private, _ = new_key(folder, 'mine')
  new_key(folder, 'other')
  assert main.main(['card', str(folder), '--out', str(out), '--sign', str(private)]) == 0
  return out


def verify(card_folder, key):
  return main.main(['verify', str(card_folder / 'card.json'), '--public-key', str(key)])


@needs_library
def test_a_signed_folder_is_verified(folder, signed, capsys):
  assert verify(signed, folder / 'mine.pub') == 0
  said = capsys.readouterr().out
  assert 'signed these files' in said and 'model.weights.h5' in said


def flip(path):
  content = bytearray(path.read_bytes())
  content[-1] ^= 1
  path.write_bytes(bytes(content))


@needs_library
@pytest.mark.parametrize('change, key, said', [
    (lambda out: flip(out / 'model.weights.h5'), 'mine', 'does not fit'),
    (lambda out: flip(out / 'card.html'), 'mine', 'does not fit'),
    (lambda out: (out / 'more').write_text(''), 'mine', 'does not fit'),
    (lambda out: (out / 'card.md').unlink(), 'mine', 'does not fit'),
    (lambda out: (out / signing.NAME).write_text('{}'), 'mine', 'does not fit'),
    (lambda out: flip(out / signing.NAME), 'mine', 'does not fit'),
    (lambda out: (out / signing.NAME).unlink(), 'mine', 'There is no signature'),
    (lambda out: None, 'other', 'another key')])
def test_what_was_not_signed_is_wrong(folder, signed, tmp_path, capsys, change, key, said):
  out = tmp_path / 'copy'
  shutil.copytree(signed, out)
  change(out)
  assert verify(out, folder / f'{key}.pub') == 3
  assert said in capsys.readouterr().out


def make_wrong_key(folder, kind, private):
  """A key of another kind, with a password, or none at all."""
  path = folder / 'wrong.pem'
  call = lambda *command: subprocess.run(
      ['openssl', *map(str, command)], check=True, stdin=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL)
  if kind == 'rsa':
    call('genrsa', '-out', path, '2048')
  elif kind == 'password':
    call('ec', '-in', private, '-aes256', '-passout', 'pass:x', '-out', path)
  elif kind == 'folder':
    path.mkdir()
  elif kind != 'missing':
    path.write_bytes(kind.encode())
  return path


@needs_library
@pytest.mark.parametrize('kind', ['rsa', 'password', 'folder', 'missing', '', 'text'])
def test_a_wrong_key_is_an_error_in_one_line(folder, signed, tmp_path, capsys, kind):
  key = make_wrong_key(tmp_path, kind, folder / 'mine.pem')
  assert main.main(['card', str(folder), '--out', str(tmp_path / 'out'), '--sign', str(key)]) == 2
  assert capsys.readouterr().err.count('\n') == 1
  assert not (tmp_path / 'out').exists()
  assert verify(signed, key) == 2 and capsys.readouterr().err.count('\n') == 1


@needs_library
def test_a_key_that_is_none_is_an_error(folder, signed, tmp_path, capsys):
  assert verify(signed, folder / 'card.json') == 2
  assert 'must be a public elliptic-curve key' in capsys.readouterr().err
  arguments = ['card', str(folder), '--out', str(tmp_path), '--sign', str(folder / 'card.json')]
  assert main.main(arguments) == 2
  said = capsys.readouterr().err
  assert 'must be a private elliptic-curve key' in said and said.count('\n') == 1


def test_without_the_library_the_error_names_the_extra(folder, tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, 'model_signing', None)
  assert main.main(['card', str(folder), '--out', str(tmp_path), '--sign', 'key.pem']) == 2
  said = capsys.readouterr().err
  assert "tfdp-adaptive[sign]" in said and said.count('\n') == 1 and not any(tmp_path.iterdir())


def test_a_signature_needs_a_folder(folder, capsys):
  assert main.main(['card', str(folder), '--sign', 'key.pem']) == 2
  assert '--sign needs --out' in capsys.readouterr().err
