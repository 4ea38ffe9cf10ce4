# SPDX-License-Identifier: Apache-2.0
"""A card for people: Markdown for a model's README, and one HTML page that needs no network."""

from __future__ import annotations

import html as html_lib
import pathlib
import re
from typing import Iterator, List, NamedTuple, Sequence, Tuple, TYPE_CHECKING

from tfdp_adaptive import runfolder
from tfdp_adaptive.privacy import card_json
from tfdp_adaptive.privacy import card_plots
from tfdp_adaptive.privacy import card_points
from tfdp_adaptive.privacy import statement
from tfdp_adaptive.privacy import weight_digests

if TYPE_CHECKING:
  from tfdp_adaptive.privacy import card as card_lib

FORMULA = 'Pr[M(D) in S] <= e^epsilon Pr[M(D\') in S] + delta'
_FORMULA = ('Pr[<i>M</i>(<i>D</i>) ∈ <i>S</i>] ≤ e<sup>ε</sup> Pr[<i>M</i>(<i>D</i>′) ∈ <i>S</i>]'
            ' + δ')
_FOR_ALL = 'for all neighbouring data sets D, D\' and all sets S of what may be released'
_STYLE = '''
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59636e;--page:#fff;--box:#f5f7f9;
--rule:#d5dae0;--accent:#0b62c4}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa5b1;--page:#14171b;--box:#1d2228;
--rule:#39414a;--accent:#6cb0ff}}*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:60rem;margin:auto;padding:1.5rem 1rem}h1{font-size:1.5rem;margin:0 0 .5rem}
h2{font-size:1.1rem;margin:1.6rem 0 .5rem}p{margin:.5rem 0}.lead{font-size:1.1rem}
.soft{color:var(--soft)}.formula{font-family:Georgia,serif;font-size:1.1rem}
.tiles,.plots{display:grid;gap:.75rem;margin:1rem 0}
.tiles{grid-template-columns:repeat(auto-fit,minmax(9rem,1fr))}
.plots{grid-template-columns:repeat(auto-fit,minmax(17rem,1fr))}
.tile,figure{background:var(--box);border:1px solid var(--rule);border-radius:6px;
padding:.6rem .8rem;margin:0}.tile b{display:block;font-size:1.35rem}
.tile span,figcaption{color:var(--soft);font-size:.85rem}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{border-top:1px solid var(--rule);padding:.35rem .5rem;text-align:left;vertical-align:top;
overflow-wrap:anywhere}th{font-weight:600;width:24%}td.who{color:var(--soft);width:20%}
code{font:.9em ui-monospace,monospace;overflow-wrap:anywhere}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
.grid{stroke:var(--rule)}.curve,.guess{fill:none;stroke:var(--accent);stroke-width:2}
.dashed{stroke-dasharray:5 4;stroke-width:1.3}.guess{stroke:var(--soft);stroke-width:1}
.dot{fill:var(--accent)}@media(max-width:32rem){th,td{display:block;width:auto!important}
td{border-top:0;padding-top:0}}
@media print{:root{--ink:#000;--soft:#444;--page:#fff;--box:#fff;--rule:#bbb;--accent:#0b62c4}
@page{size:A4;margin:11mm}body{font-size:7.8pt;line-height:1.25}main{padding:0;max-width:none}
table{font-size:7.6pt}.tiles{grid-template-columns:repeat(4,1fr);margin:.4rem 0}
.plots{grid-template-columns:1fr 1fr;margin:.4rem 0}h1{font-size:14pt}
h2{font-size:10pt;margin:.5rem 0 .15rem;break-after:avoid}.lead,.formula{font-size:9pt}
.tile b{font-size:12pt}.tile span,figcaption{font-size:7.6pt}p{margin:.25rem 0}
th,td{padding:.08rem .3rem}tr,figure,.tile{break-inside:avoid}figure svg{max-height:40mm}}
'''


class Table(NamedTuple):
  """A title, and rows of a name, a text, and who stands for it."""

  title: str
  rows: Sequence[Tuple[str, str, str]]


def markdown(card: card_lib.Card) -> str:
  """The card for a README; nothing in it is read as Markdown or HTML but what this file wrote."""
  lines = ['## Privacy', '', _marked(statement.guarantee(card)), '',
           f'`{FORMULA}`, {_FOR_ALL}.', '']
  for table in tables(card):
    lines += [f'### {table.title}', '', '| | | |', '|---|---|---|']
    lines += [f'| {" | ".join(map(_marked, row))} |' for row in table.rows] + ['']
  return '\n'.join(lines + [_HOW])


def write(
    card: card_lib.Card, folder: pathlib.Path, stem: str = 'card') -> List[pathlib.Path]:
  """Writes card.json, card.md and card.html into a folder; returns their paths."""
  texts = {f'{stem}.json': card_json.to_json(card), f'{stem}.md': markdown(card),
           f'{stem}.html': html(card)}
  for name, text in texts.items():
    runfolder.replace(folder / name, text.encode(), 0o666)
  return [folder / name for name in texts]


def html(card: card_lib.Card) -> str:
  """The whole page: style and plots are in it, and no script."""
  tables_of = ''.join(map(_table, tables(card)))
  return (
      '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
      '<meta name="viewport" content="width=device-width,initial-scale=1">'
      '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
      'style-src \'unsafe-inline\'">'
      f'<title>Privacy card</title><style>{_STYLE}</style></head><body><main><h1>Privacy card</h1>'
      f'<p class="lead">{_escaped(statement.guarantee(card))}</p>{_numbers(card)}{tables_of}'
      f'<p class="soft">{_escaped(_HOW.replace("`", ""))}</p></main></body></html>\n')


def tables(card: card_lib.Card) -> Iterator[Table]:
  """Everything on the card, in the order of the page."""
  yield Table('What NIST SP 800-226 asks an evaluator to look at', [
      (f'{point.section}: {point.name}', point.answer, point.standing)
      for point in card_points.points(card)])
  for number, run in enumerate(card.runs, 1):
    yield Table(f'Run {number} of {len(card.runs)}', list(_run(run)))
  yield Table('What is not checked', [
      *(('Not covered', text, '') for text in statement.not_covered(card)),
      *((f'In the words of whoever trained the model, on {own.about}', own.text,
         card_points.WORD) for own in card.words),
      *(('Noted by the library', fact, '') for fact in card.facts)])
  digest = weight_digests.short(card.weights) if card.weights else 'none on this card'
  yield Table('What it was made with', [
      ('Weights', f'{len(card.weights)} arrays, digest {digest}', card_points.CHECKED),
      ('Parts that were used', ', '.join(f'{p.name} ({p.state})' for p in card.parts), ''),
      ('Versions', ', '.join(f'{name} {number}' for name, number in card.versions), ''),
      *((f'Audit: {audit.name}', audit.text, card_points.WORD) for audit in card.audits)])


_HOW = ('Check it: `tfdp verify card.json --weights FILE` computes epsilon again, by another '
        'accountant, from the terms above.\n')


def _run(run: card_lib.Run) -> Iterator[Tuple[str, str, str]]:
  plan = run.entry.plan
  if plan is None:
    yield 'Steps', f'{run.entry.steps} without a plan: their cost is not known.', card_points.WORD
    return
  yield 'Steps', f'{run.entry.steps} done of {plan.steps} planned', card_points.WORD
  yield 'Sampling', plan.sampling.describe(plan), card_points.WORD
  yield 'Amplification', (
      f'Claimed, with probability {run.probability or 0:.6g}.' if run.amplified else
      f'None. A record takes part at most {run.max_participations} times, at least {run.min_sep} '
      'steps apart.'), card_points.CHECKED
  yield 'Mechanism', statement.mechanism(run), card_points.CHECKED
  yield 'Sensitivity', f'{run.sensitivity:.6g} clip norms', card_points.CHECKED
  yield 'Records', statement.population(plan), card_points.WORD
  for name, text in (('Private search', plan.search.describe() if plan.search is not None else ''),
                     ('Users', statement.of_users(run)),
                     ('Own sampling', statement.own_sampling(run))):
    if text:
      yield name, text, card_points.WORD


def _numbers(card: card_lib.Card) -> str:
  """Formula, four numbers and two plots; nothing without a guarantee."""
  if card.epsilon is None:
    return ''
  tiles: List[Tuple[str, str]] = [
      (statement.rounded_up(card.epsilon), f'epsilon after {card.done} steps'),
      (f'{card.delta:g}', 'delta'), (card.unit, 'unit of privacy')]
  if card.profile:
    tiles.append((f'{statement.percent(card.rate):.4g}%', 'found at most, at 1% false positives'))
  shown = ''.join(f'<div class="tile"><b>{_escaped(value)}</b><span>{_escaped(name)}</span></div>'
                  for value, name in tiles)
  plots = [(card_plots.epsilon_over_steps(card), f'Epsilon over steps, at delta {card.delta:g}.')]
  if card.profile:
    plots.append((card_plots.attackers_rates(card), 'No attacker finds more participants than the '
                  'line. Dashed: one Gaussian mechanism of the same epsilon. Thin: guessing.'))
  figures = ''.join(f'<figure>{svg}<figcaption>{_escaped(text)}</figcaption></figure>'
                    for svg, text in plots)
  return (f'<p class="formula">{_FORMULA}</p><p class="soft">{_escaped(_FOR_ALL)}.</p>'
          f'<div class="tiles">{shown}</div><div class="plots">{figures}</div>')


def _table(table: Table) -> str:
  rows = ''.join(f'<tr><th scope="row">{_escaped(name)}</th><td>{_escaped(text)}</td>'
                 f'<td class="who">{_escaped(who)}</td></tr>' for name, text, who in table.rows)
  return f'<h2>{_escaped(table.title)}</h2><table>{rows}</table>'


def _escaped(text: str) -> str:
  return html_lib.escape(text)


def _marked(text: str) -> str:
  return re.sub(r'([\\`*_\[\]#!|~$])', r'\\\1', html_lib.escape(text, quote=False))
