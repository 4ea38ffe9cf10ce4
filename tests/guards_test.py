# SPDX-License-Identifier: Apache-2.0
"""What guards the checkout and the network from tests does raise."""

import os
import pathlib
import socket
import subprocess
import sys

import guards
import pytest

HERE = guards.ROOT / 'tests' / 'a_file_that_no_test_may_write'


@pytest.mark.parametrize('write', [
    lambda: HERE.write_text('', encoding='utf-8'), HERE.touch, HERE.mkdir, lambda: os.mkdir(HERE),
    lambda: HERE.symlink_to('elsewhere'),
    lambda: pathlib.Path(os.path.relpath(HERE)).write_bytes(b''),
], ids=['text', 'touch', 'Path.mkdir', 'os.mkdir', 'symlink', 'relative'])
def test_the_checkout_is_not_written(write):
  with pytest.raises(guards.NotHere, match='Write into `tmp_path`'):
    write()
  assert not HERE.exists()


def test_nothing_is_moved_into_the_checkout(tmp_path):
  (tmp_path / 'made').touch()
  with pytest.raises(guards.NotHere):
    (tmp_path / 'made').rename(HERE)


def test_the_checkout_is_read(tmp_path):
  text = pathlib.Path(__file__).read_text(encoding='utf-8')
  (tmp_path / 'copy').write_text(text, encoding='utf-8')


@pytest.mark.parametrize('family, host', [
    (socket.AF_INET, '192.0.2.1'), (socket.AF_INET6, '2001:db8::1')])
def test_no_other_machine_is_reached(family, host):
  with socket.socket(family) as one:
    one.settimeout(1)
    with pytest.raises(guards.NotHere, match='without the network'):
      one.connect((host, 80))


@pytest.mark.parametrize('host', ['192.0.2.1', 'example.invalid'])
def test_no_name_is_asked_for(host):
  with pytest.raises(guards.NotHere):
    socket.getaddrinfo(host, 80)


def test_this_machine_is_reached():
  with socket.create_server(('127.0.0.1', 0)) as server:
    with socket.create_connection(server.getsockname()):
      pass


def test_it_is_there_in_every_run_of_tests(tmp_path):
  (tmp_path / 'one_test.py').write_text(
      f'def test_it():\n  open({str(HERE)!r}, "w")\n', encoding='utf-8')
  done = subprocess.run(
      [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-p', 'guards', tmp_path],
      cwd=tmp_path, capture_output=True, text=True, check=False,
      env={**os.environ, 'PYTHONPATH': str(guards.ROOT / 'tests')})
  assert 'NotHere' in done.stdout and '1 failed' in done.stdout
