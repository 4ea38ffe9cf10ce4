# SPDX-License-Identifier: Apache-2.0
"""Formulas as MathML, which browsers draw without scripts, fonts or a network.

Pages write `$...$` within a line and `$$...$$` on a line of their own, as repositories' sites do.
`make docs` installs latex2mathml, which translates them. Without it they stay as they are written.
"""

import importlib.util
import logging
from xml.etree import ElementTree

import markdown
from markdown import inlinepatterns
from markdown import util

_INLINE = r'(?<![\\$\w])\$([^$`\s](?:[^$`\n]*[^$`\s])?)\$(?![\w$])'
_DISPLAY = r'\$\$([^$`]+)\$\$'
_NAMESPACE = '{http://www.w3.org/1998/Math/MathML}'


class Formulas(markdown.Extension):
  """Python-Markdown's extension."""

  def extendMarkdown(self, md):
    # After code (190), and before backslashes (180) and emphasis lose their meaning.
    md.inlinePatterns.register(_Formula(_DISPLAY, md, 'block'), 'formula-display', 186)
    md.inlinePatterns.register(_Formula(_INLINE, md, 'inline'), 'formula', 185)


class _Formula(inlinepatterns.InlineProcessor):
  """Turns TeX into an element, whose text Markdown does not read again."""

  def __init__(self, pattern, md, display):
    super().__init__(pattern, md)
    self._display = display

  def handleMatch(self, m, data):
    del data
    from latex2mathml import converter  # pylint: disable=g-import-not-at-top
    tex = ' '.join(m.group(1).split())
    math = ElementTree.fromstring(converter.convert(tex, display=self._display))
    for element in math.iter():
      element.tag = element.tag.replace(_NAMESPACE, '')
      element.text = element.text and util.AtomicString(element.text)
    math.set('alttext', tex)  # For screen readers and the search.
    return math, m.start(0), m.end(0)


def on_config(config):
  """MkDocs' hook."""
  if importlib.util.find_spec('latex2mathml'):
    config.markdown_extensions.append(Formulas())
  else:
    logging.getLogger('mkdocs').info('Formulas stay TeX: latex2mathml is not installed.')
  return config
