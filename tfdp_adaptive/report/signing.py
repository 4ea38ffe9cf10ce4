# SPDX-License-Identifier: Apache-2.0
"""Signatures of a folder with a card and weights, by OpenSSF's `model-signing` (extra `sign`).

The signature is an in-toto statement of the digests of all files of the folder, signed by an
elliptic-curve key of your own. Nothing is sent anywhere.
"""

import pathlib
import types
from typing import Any, Callable

from tfdp_adaptive.report import card_checks

NAME = 'model.sig'
Finding = card_checks.Finding


def _library() -> types.ModuleType:
  try:
    import model_signing  # pylint: disable=import-outside-toplevel
    import model_signing.signing  # pylint: disable=import-outside-toplevel
    import model_signing.verifying  # pylint: disable=import-outside-toplevel
  except ImportError as error:
    raise ImportError("Signatures need OpenSSF's model-signing: pip install "
                      f"'tfdp-adaptive[sign]'. Received: {error}.") from error
  return model_signing


def _hashing(library: types.ModuleType) -> Any:
  return library.hashing.Config().set_ignored_paths(paths=[NAME], ignore_git_paths=True)


def _use(configure: Callable[..., Any], **named: pathlib.Path) -> None:
  """Passes on a key, by the name of its kind."""
  ((name, key),) = named.items()
  try:
    configure(**named)
  except (ValueError, TypeError, AttributeError) as error:
    raise ValueError(f'{key} must be a {name.partition("_")[0]} elliptic-curve key in a PEM file, '
                     f'without a password. Received: {str(error)[:80]}.') from error


def signer(key: pathlib.Path) -> Callable[[pathlib.Path], pathlib.Path]:
  """Returns a function that signs all files of a folder and returns the signature's path.

  Args:
    key: The PEM file of a private elliptic-curve key without a password.

  Raises:
    ValueError: If `key` is not a private elliptic-curve key in a PEM file.
  """
  library = _library()
  config = library.signing.Config().set_hashing_config(_hashing(library))
  _use(config.use_elliptic_key_signer, private_key=key)

  def sign(folder: pathlib.Path) -> pathlib.Path:
    config.sign(folder, folder / NAME)
    return folder / NAME

  return sign


def check(folder: pathlib.Path, key: pathlib.Path) -> Finding:
  """Returns whether a folder is, byte for byte, what the owner of a key signed.

  Args:
    folder: A folder with a card and a signature.
    key: The PEM file of the public key.

  Raises:
    ValueError: If `key` is not a public elliptic-curve key in a PEM file.
  """
  library = _library()
  config = library.verifying.Config().set_hashing_config(_hashing(library))
  _use(config.use_elliptic_key_verifier, public_key=key)
  if not (folder / NAME).is_file():
    return Finding(card_checks.WRONG, f'There is no signature: {folder} has no file {NAME}.')
  try:
    config.verify(folder, folder / NAME)
  except Exception as error:  # pylint: disable=broad-except
    # The file is a stranger's: parsers raise whatever they like.
    return Finding(card_checks.WRONG, (
        'The signature does not fit: a file was changed, added or removed after it was signed, '
        f'or another key signed it ({type(error).__name__}: {str(error)[:200]}).'))
  names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob('*')
                 if path.is_file() and path.name != NAME)
  return Finding(card_checks.VERIFIED, 'The owner of the key signed these files, and none was '
                                       f'changed since: {", ".join(names)}.')
