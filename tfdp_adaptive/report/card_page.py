# SPDX-License-Identifier: Apache-2.0
"""A card for people: Markdown for a model's README, and one HTML page that needs no network."""

import html as html_lib
import math
import pathlib
import re
from typing import Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

from tfdp_adaptive import runfolder
from tfdp_adaptive.accounting import gaussian
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import entry as entry_lib
from tfdp_adaptive.privacy import statement
from tfdp_adaptive.privacy import weight_digests
from tfdp_adaptive.report import card_json

FORMULA = 'Pr[M(D) in S] <= e^epsilon Pr[M(D\') in S] + delta'
_FORMULA = ('Pr[<i>M</i>(<i>D</i>) ∈ <i>S</i>] ≤ e<sup>ε</sup> Pr[<i>M</i>(<i>D</i>′) ∈ <i>S</i>]'
            ' + δ')
_FOR_ALL = 'for all neighbouring data sets D, D\' and all sets S of what may be released'
_STYLE = pathlib.Path(__file__).with_name('card.css')
Row = Tuple[str, str, str]
# Who stands for a row.
CHECKED, WORD, UNKNOWN = 'checked by tfdp verify', "the trainer's word", 'not on this card'


def markdown(card: card_lib.Card) -> str:
  """Returns the card for a README. Texts of the card are escaped."""
  lines = ['## Privacy', '', escaped_markdown(statement.guarantee(card)), '',
           f'`{FORMULA}`, {_FOR_ALL}.', '']
  for title, rows in tables(card):
    lines += [f'### {title}', '', '| | | |', '|---|---|---|']
    lines += [f'| {" | ".join(map(escaped_markdown, row))} |' for row in rows] + ['']
  return '\n'.join(lines + [_HOW])


def files(card: card_lib.Card, stem: str = 'card') -> Dict[str, str]:
  """Returns the texts of card.json, card.md and card.html by these names."""
  return {f'{stem}.json': card_json.to_json(card), f'{stem}.md': markdown(card),
          f'{stem}.html': html(card)}


def write(texts: Mapping[str, str], folder: pathlib.Path) -> List[pathlib.Path]:
  """Writes files into a folder, which it makes, by their names, and returns their paths."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in texts.items():
    runfolder.replace(folder / name, text.encode(), 0o666)
  return [folder / name for name in texts]


def html(card: card_lib.Card) -> str:
  """Returns the whole page, with style and plots, and without a script."""
  tables_of = ''.join(_table(*table) for table in tables(card))
  style = _STYLE.read_text(encoding='utf-8')
  return (
      '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
      '<meta name="viewport" content="width=device-width,initial-scale=1">'
      '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
      'style-src \'unsafe-inline\'">'
      f'<title>Privacy card</title><style>\n{style}</style></head><body><main><h1>Privacy card</h1>'
      f'<p class="lead">{_escaped(statement.guarantee(card))}</p>{_numbers(card)}{tables_of}'
      f'<p class="soft">{_escaped(_HOW.replace("`", ""))}</p></main></body></html>\n')


def tables(card: card_lib.Card) -> Iterator[Tuple[str, Sequence[Row]]]:
  """Yields titles, and rows of a name, a text, and who stands for it, in the order of the page."""
  yield 'What NIST SP 800-226 asks an evaluator to look at', [*points(card)]
  for number, run in enumerate(card.runs, 1):
    yield f'Run {number} of {len(card.runs)}', list(_run(run, card.beside(number)))
  yield 'What is not checked', [
      *(('Not covered', text, '') for text in statement.not_covered(card)),
      *((f'In the words of whoever trained the model, on {own.about}', own.text,
         WORD) for own in card.words),
      *(('Noted by the library', note, '') for note in card.notes)]
  digest = weight_digests.short(card.weights) if card.weights else 'none on this card'
  yield 'What it was made with', [
      ('Weights', f'{len(card.weights)} arrays, digest {digest}',
       CHECKED if card.weights else UNKNOWN),
      ('Parts that were used', ', '.join(f'{name} ({state})' for name, state in card.parts), ''),
      ('Versions', ', '.join(f'{name} {number}' for name, number in card.versions), ''),
      *((f'Audit: {audit.name}', audit.text, WORD) for audit in card.audits)]


_HOW = ('Check it: `tfdp verify card.json --weights FILE` computes epsilon again, by another '
        'accountant, from the terms above.\n')


def _run(run: entry_lib.Entry, others: Sequence[entry_lib.Entry]) -> Iterator[Row]:
  plan = run.plan
  if plan is None:
    yield 'Steps', f'{run.steps} without a plan: their cost is not known.', WORD
    return
  min_sep, participations = run.participation
  yield 'Steps', f'{run.steps} done of {plan.steps} planned', WORD
  added = statement.added_up(run, others)
  yield 'Amplification', (
      f'Claimed{" of the run alone" if added else ""}, with probability '
      f'{plan.sampling.probability(plan):.6g}. {added}'.strip() if run.amplified else
      f'None. A record takes part at most {participations} times, at least {min_sep} '
      'steps apart.'), CHECKED
  yield 'Sensitivity', f'{run.sensitivity:.6g} clip norms', CHECKED
  for name, text in statement.described(run).items():
    yield name, text, WORD


def _numbers(card: card_lib.Card) -> str:
  """Returns formula, four numbers and two plots, or nothing without a guarantee."""
  if card.epsilon is None:
    return ''
  tiles: List[Tuple[str, str]] = [
      (statement.rounded_up(card.epsilon), f'epsilon after {card.done} steps'),
      (f'{card.delta:g}', 'delta'), (card.unit, 'unit of privacy')]
  if card.profile:
    tiles.append((f'{statement.percent(card.rate):.4g}%', 'found at most, at 1% false positives'))
  shown = ''.join(f'<div class="tile"><b>{_escaped(value)}</b><span>{_escaped(name)}</span></div>'
                  for value, name in tiles)
  plots = [(epsilon_over_steps(card), f'Epsilon over steps, at delta {card.delta:g}.')]
  if card.profile:
    plots.append((attackers_rates(card), 'No attacker finds more participants than the '
                  'line. Dashed: one Gaussian mechanism of the same epsilon. Thin: guessing.'))
  figures = ''.join(f'<figure>{svg}<figcaption>{_escaped(text)}</figcaption></figure>'
                    for svg, text in plots)
  return (f'<p class="formula">{_FORMULA}</p><p class="soft">{_escaped(_FOR_ALL)}.</p>'
          f'<div class="tiles">{shown}</div><div class="plots">{figures}</div>')


def _table(title: str, rows: Sequence[Row]) -> str:
  lines = ''.join(f'<tr><th scope="row">{_escaped(name)}</th><td>{_escaped(text)}</td>'
                  f'<td class="who">{_escaped(who)}</td></tr>' for name, text, who in rows)
  return f'<h2>{_escaped(title)}</h2><table>{lines}</table>'


def _escaped(text: str) -> str:
  return html_lib.escape(text)


def escaped_markdown(text: str) -> str:
  """Returns a text that Markdown and HTML show as it is."""
  return re.sub(r'([\\`*_\[\]#!|~$])', r'\\\1', html_lib.escape(text, quote=False))


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
    parts.append(_line([(0, 0), *((x, gaussian.true_positive_rate(card.mu, x))
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


def points(card: card_lib.Card) -> Iterator[Row]:
  """Yields a point of NIST SP 800-226, the card's answer, and who stands for it, in its order.

  The points are those of its differential privacy pyramid, from the top (section 2, the
  guarantee) over algorithms (section 3) to deployment (section 4); "Guidelines for Evaluating
  Differential Privacy Guarantees", March 2025, doi 10.6028/NIST.SP.800-226.
  """
  yield '2. Guarantee: Privacy parameters', (
      'No guarantee: epsilon is infinite.' if card.epsilon is None else
      'Approximate differential privacy: epsilon '
      f'{statement.rounded_up(card.epsilon)}, delta {card.delta:g}, after {card.done} steps.'
  ), CHECKED
  yield '2. Guarantee: Variants, and comparison of guarantees', (
      'No guarantee to compare.' if card.mu is None or not card.epsilon else
      f'Gaussian differential privacy with mu = {statement.rounded_up(card.mu)} has this epsilon '
      'at this delta. Any other variant can be computed from the terms of the runs below.'), CHECKED
  yield '2. Guarantee: Unit of privacy', (
      f'{statement.UNITS[card.unit].capitalize()}. Whether one person is one unit depends on the '
      'data.'), WORD
  yield '2. Guarantee: Bounded or unbounded', {
      'add_remove': 'Unbounded: add or remove one unit; the number of units is protected.',
      'zero_out': 'Zero-out: one unit becomes empty; the number of units is public.',
      'replace': 'Bounded: one unit is replaced; the number of units is public.',
  }[card.adjacency], CHECKED
  yield '2. Guarantee: Other releases of the same data', (
      f'{len(card.runs)} run(s) are counted. What is not covered is listed below.'), WORD
  yield '2. Guarantee: Audits', '; '.join(
      f'{audit.name}: {audit.text}' for audit in card.audits) or 'None was put on this card.', WORD
  yield '3. Algorithms: Algorithms and correctness', ' '.join(
      ['Clipped sums with Gaussian noise.', *(
          f'Run {number}: sensitivity {run.sensitivity:.6g} clip norms, noise multiplier '
          f'{run.plan.noise_multiplier:.6g}.' for number, run in enumerate(card.runs, 1)
          if run.plan is not None)]), CHECKED
  yield '3. Algorithms: Utility', (
      'Accuracy is an exact number of the data. Report it only on public data, or as a private '
      'statistic.'), UNKNOWN
  yield '3. Algorithms: Bias', (
      'Clipping and noise cost small groups more. Measure it by group, on data that are public or '
      'held out for it.'), UNKNOWN
  yield '4. Deployment: Query model', (
      'Data release: the number of steps was fixed before training; the weights of all steps may '
      'be released.'), WORD
  yield '4. Deployment: Trust model', {
      'central': 'Central: the curator has the records, the random keys and the noise state.',
      'federated': 'Central: the server sees the update of every user. There is no local noise and '
                   'no secure aggregation.',
      'silo': 'Local to a silo, which has its records, random keys and noise state. The server '
              'sees noisy weights.'}[card.trust], WORD
  caveats = statement.caveats(card)
  yield '4. Deployment: Side channels', (
      f'{caveats[0].upper()}{caveats[1:]} Times of steps are not protected.'), UNKNOWN
  yield '4. Deployment: Hyperparameters', (
      'Chosen by a private search, which is part of the guarantee.' if any(
          plan.search is not None for plan in card.plans) else
      'Covered only if no other settings were tried on the same data.'), WORD
  yield '4. Deployment: Data security and access control', (
      'Records, checkpoints that resume a run, and logs of training are not released and must be '
      'kept safe.'), WORD
  yield '4. Deployment: Data collection exposure', (
      'No guarantee covers the records while they are collected and stored.'), UNKNOWN
