# SPDX-License-Identifier: Apache-2.0
"""Notebooks as pages, with what they showed when they were run."""

import base64
import json
import pathlib
import re
import textwrap

from tfdp_adaptive import version


def pages(folder):
  """`{path in the site: text or bytes}`: a page, its pictures and the notebook itself, of each."""
  files = {}
  for path in sorted(pathlib.Path(folder).glob('*.ipynb')):
    files.update(_page(path))
  return files


def _page(path):
  content = path.read_bytes()
  parts, pictures = [], {}
  said = ''
  for number, cell in enumerate(json.loads(content)['cells']):
    source = ''.join(cell['source']).rstrip()
    if cell['cell_type'] == 'markdown':
      parts.append(source)
      said = _last_sentence(source)
      continue
    parts.append(f'```python\n{source}\n```')
    for output in cell['outputs']:
      if output['output_type'] == 'stream':
        parts.append(f'```text\n{_wrapped("".join(output["text"]))}\n```')
      elif 'image/png' in output['data']:
        name = f'{path.stem}_{number}.png'
        pictures[f'notebooks/{name}'] = base64.b64decode(output['data']['image/png'])
        parts.append(f'![{said}]({name})')
  title, _, rest = '\n\n'.join(parts).partition('\n')
  link = f'[Open the notebook]({path.name}){{ .md-button download="{path.name}" }}'
  link += _colab(path.name)
  return {f'notebooks/{path.stem}.md': f'{title}\n\n{link}\n{rest}\n',
          f'notebooks/{path.name}': content, **pictures}


def _colab(name):
  """Returns a link that opens a notebook in Colab, once the repository has an address."""
  owner = re.fullmatch(r'https://[\w.-]+/([\w.-]+/[\w.-]+)', version.REPOSITORY)
  return '' if owner is None else (
      f' [Open in Colab](https://colab.research.google.com/github/{owner[1]}/blob/main/colabs/'
      f'{name}){{ .md-button }}')


def _last_sentence(text):
  """What a picture's alternative text says: the words before the cell that draws it."""
  paragraph = text.rsplit('\n\n', 1)[-1]
  return re.sub(r'[\[\]()*`#]', '', ' '.join(paragraph.split()))


def _wrapped(printed):
  """Returns what a cell printed, without lines that are wider than a page, such as statements."""
  return '\n'.join('\n'.join(textwrap.wrap(line, 80)) if len(line) > 90 else line
                   for line in printed.rstrip().splitlines())
