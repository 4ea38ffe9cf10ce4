# SPDX-License-Identifier: Apache-2.0
"""The two plots of a card as inline SVG, drawn by hand: colors come from the page."""

from __future__ import annotations

import math
from typing import Callable, List, Sequence, Tuple, TYPE_CHECKING

from tfdp_adaptive.accounting import meaning

if TYPE_CHECKING:
  from tfdp_adaptive.privacy import card as card_lib

_WIDTH, _HEIGHT = 360, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 26, 40
_MANY = 60
Curve = Sequence[Tuple[float, float]]


def epsilon_over_steps(card: card_lib.Card) -> str:
  """Plots epsilon at the card's delta over the steps of all runs, dashed for planned steps."""
  curve = sorted({(0, 0.0), *card.curve})
  done = [point for point in curve if point[0] <= card.done]
  planned = [point for point in curve if point[0] >= card.done]
  place, axes = _axes(max(1, curve[-1][0]), max([1e-9, *(value for _, value in curve)]),
                      'steps', 'epsilon')
  parts = [_line(done, place, 'curve')]
  if len(planned) > 1:
    parts.append(_line(planned, place, 'curve dashed'))
  parts += [_dot(done[-1], place)]
  return _svg('Epsilon over the steps of all runs', axes + parts)


def attackers_rates(card: card_lib.Card) -> str:
  """Plots the most true positives at each rate of false ones. The diagonal is guessing."""
  place, axes = _axes(1.0, 1.0, 'false positives', 'true positives')
  rates = [i / _MANY for i in range(1, _MANY)]
  bound = [(x, min(1.0, card.true_positive_rate(x))) for x in rates]
  parts = [_line([(0, 0), (1, 1)], place, 'guess'), _line([*bound, (1, 1)], place, 'curve')]
  if card.mu:
    parts.append(_line([(0, 0), *((x, meaning.gaussian_true_positive_rate(card.mu, x))
                                  for x in rates), (1, 1)], place, 'curve dashed'))
  return _svg('Most true positives of any attacker, over false positives',
              axes + parts + [_dot((0.01, card.rate), place)])


def _axes(
    most_x: float, most_y: float, name_x: str, name_y: str
    ) -> Tuple[Callable[[float, float], Tuple[float, float]], List[str]]:
  """Returns a function from points to positions, and two axes with ticks."""
  step_x, step_y = _step(most_x), _step(most_y)
  top_y = step_y * math.ceil(most_y / step_y - 1e-9)
  width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
  place = lambda x, y: (_LEFT + x / most_x * width, _TOP + (1 - y / top_y) * height)
  parts = []
  for i in range(int(most_x / step_x + 1e-9) + 1):
    x, y = place(i * step_x, 0)
    parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">'
                 f'{i * step_x:g}</text>')
  for i in range(int(top_y / step_y + 1e-9) + 1):
    x, y = place(0, i * step_y)
    parts += [f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>',
              f'<text class="tick" x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">'
              f'{i * step_y:g}</text>']
  parts += [f'<text class="axis" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{name_x}'
            '</text>', f'<text class="axis" x="4" y="10">{name_y}</text>']
  return place, parts


def _step(most: float) -> float:
  """Returns a round distance of about four ticks."""
  power = 10.0 ** math.floor(math.log10(most / 4))
  return power * next(f for f in (1, 2, 2.5, 5, 10) if most / (f * power) <= 5)


def _line(points: Curve, place: Callable[..., Tuple[float, float]], kind: str) -> str:
  drawn = ' '.join('{:.1f},{:.1f}'.format(*place(*point)) for point in points)
  return f'<polyline class="{kind}" points="{drawn}"/>'


def _dot(point: Tuple[float, float], place: Callable[..., Tuple[float, float]]) -> str:
  x, y = place(*point)
  return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _svg(title: str, parts: Sequence[str]) -> str:
  return (f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">'
          f'<title>{title}</title>{"".join(parts)}</svg>')
