# SPDX-License-Identifier: Apache-2.0
"""Rows of results in a JSON file, one per line, so that what is done is kept."""

import json
import os
from typing import Any, Dict, List


def read(path: str) -> List[Dict[str, Any]]:
  if not os.path.exists(path):
    return []
  with open(path, encoding='utf-8') as stream:
    return list(json.load(stream))


def write(path: str, rows: List[Dict[str, Any]]) -> None:
  with open(path + '.new', 'w', encoding='utf-8') as stream:
    stream.write('[\n' + ',\n'.join(json.dumps(row) for row in rows) + '\n]\n')
  os.replace(path + '.new', path)
