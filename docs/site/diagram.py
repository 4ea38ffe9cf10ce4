# SPDX-License-Identifier: Apache-2.0
"""Flowcharts as pictures that are part of the page: it shows them without network and scripts.

Repositories' sites draw Mermaid's text by themselves. Here igraph says where boxes and arrows go.
"""

import re

_CHART = re.compile(r'^```mermaid\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_ARROW = re.compile(r'(\w+) --> (\w+)')
_COLUMN, _ROW, _WIDTH, _HEIGHT, _MARGIN = 140, 88, 118, 34, 8
_STYLE = '''\
<style>
.chart { text-align: center }
.chart { overflow-x: auto }
.chart svg { height: auto; max-width: 100%; min-width: 700px }
.chart rect { fill: var(--md-code-bg-color, #f5f5f5); stroke: currentColor }
.chart text { dominant-baseline: central; fill: currentColor; font: 15px sans-serif; \
text-anchor: middle }
.chart path { fill: none; stroke: currentColor; stroke-opacity: .6; stroke-width: 1.3 }
.chart marker path { fill: currentColor; stroke: none }
</style>'''


def draw(markdown):
  """A page with its flowcharts drawn.

  Raises:
    ValueError: If a chart is more than boxes and arrows from top to bottom.
  """
  return _CHART.sub(lambda chart: _picture(chart.group(1)), markdown)


def _picture(text):
  boxes, arrows = _read(text)
  corners, routes = _layout(boxes, arrows)
  width = max(x for x, _ in [*corners, *sum(routes, [])]) + _WIDTH + 2 * _MARGIN
  height = max(y for _, y in corners) + _HEIGHT + 2 * _MARGIN
  lines = [
      '<div class="chart">', _STYLE,
      f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
      f'aria-label="{_in_words(arrows)}">',
      '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
      'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>']
  lines += [f'<path d="{_curve(points)}" marker-end="url(#arrow)"/>' for points in routes]
  for box, (x, y) in zip(boxes, corners):
    x, y = x + _MARGIN, y + _MARGIN
    lines.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>')
    lines.append(f'<text x="{x + _WIDTH / 2:.0f}" y="{y + _HEIGHT / 2:.0f}">{box}</text>')
  return '\n'.join([*lines, '</svg>', '</div>'])


def _read(text):
  """The names of the boxes, and the arrows as pairs of them."""
  first, *lines = [line.strip() for line in text.strip().splitlines()]
  arrows = [match.groups() for match in map(_ARROW.fullmatch, lines) if match]
  boxes = [line for line in lines if re.fullmatch(r'\w+', line)]
  unknown = [name for arrow in arrows for name in arrow if name not in boxes]
  if first != 'flowchart TD' or len(boxes) + len(arrows) != len(lines) or unknown or not boxes:
    raise ValueError('A chart is "flowchart TD", a line for each box, and lines "one --> other". '
                     f'Received:\n{text}')
  return boxes, arrows


def _layout(boxes, arrows):
  """Upper left corners of the boxes, and for every arrow the corners that it goes through."""
  import igraph  # pylint: disable=g-import-not-at-top
  numbers = {box: i for i, box in enumerate(boxes)}
  graph = igraph.Graph([(numbers[one], numbers[other]) for one, other in arrows],
                       n=len(boxes), directed=True)
  layout = graph.layout_sugiyama()
  left = min(x for x, _ in sum(layout.edge_routing, list(layout.coords)))  # Also of an arrow.
  at = lambda point: ((point[0] - left) * _COLUMN, point[1] * _ROW)
  corners = [at(point) for point in layout.coords]
  routes = []
  for (one, other), between in zip(arrows, layout.edge_routing):
    routes.append([corners[numbers[one]], *map(at, between), corners[numbers[other]]])
  return corners, routes


def _curve(points):
  """From the lower side of the first box to the upper one of the last, upright at every point."""
  middle = _MARGIN + _WIDTH / 2
  x, y = points[0][0] + middle, points[0][1] + _MARGIN + _HEIGHT
  path = f'M{x:.0f} {y:.0f}'
  for i, (next_x, next_y) in enumerate(points[1:], 2):
    inside = 0 if i == len(points) else _HEIGHT
    next_x, next_y = next_x + middle, next_y + _MARGIN
    bend = (next_y - y) / 2
    path += f' C{x:.0f} {y + bend:.0f} {next_x:.0f} {next_y - bend:.0f} {next_x:.0f} {next_y:.0f}'
    if inside:
      path += f' V{next_y + inside:.0f}'
    x, y = next_x, next_y + inside
  return path


def _in_words(arrows):
  return '; '.join(f'{one} uses {other}' for one, other in arrows)
