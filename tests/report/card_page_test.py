# SPDX-License-Identifier: Apache-2.0
"""The page of a card: escaped, complete, and read in a real browser where there is one."""

import dataclasses
import html.parser
import pathlib
import re
import shutil
import subprocess
import xml.etree.ElementTree

import pytest

import tfdp_adaptive as tfdp
from tfdp_adaptive.accounting import sampling
from tfdp_adaptive.privacy import card as card_lib
from tfdp_adaptive.privacy import statement
from tfdp_adaptive.report import card_page

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser')
FLAGS = ('--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
         '--disable-background-networking', '--disable-component-update', '--disable-sync',
         '--virtual-time-budget=2000')
EVIL = '<script>document.title="evil"</script>"><img src=x onerror=alert(1)>](http://x) | `a` &amp;'
# NIST SP 800-226: the components of its pyramid, and what its sections add to them.
ASKED = ('Privacy parameters', 'Variants', 'Unit of privacy', 'Bounded', 'Other releases', 'Audits',
         'Algorithms and correctness', 'Utility', 'Bias', 'Query model', 'Trust model',
         'Side channels', 'Hyperparameters', 'access control', 'Data collection exposure')


@pytest.fixture(scope='module')
def card():
  plan = tfdp.PrivacyPlan(population_size=1000, batch_size=50, steps=8, l2_norm_clip=2.0,
                          noise_multiplier=1.5, target_delta=1e-5)
  fixed = tfdp.PrivacyPlan(population_size=1000, batch_size=50, steps=40, l2_norm_clip=2.0,
                           noise_multiplier=3.0, target_delta=1e-5,
                           sampling=sampling.FixedOrder())
  ledger = tfdp.Ledger().begin(plan, 'dp_adam').done(8).begin(fixed, EVIL, EVIL).done(20)
  return ledger.card(words=[card_lib.Words(EVIL, EVIL)], facts=[EVIL], weights=['0' * 32],
      audits=[card_lib.Audit(EVIL, False, EVIL)])


class Tags(html.parser.HTMLParser):

  def __init__(self, text):
    super().__init__()
    self.found, self.attributes = [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.found.append(tag)
    self.attributes += [(tag, name, value) for name, value in attrs]


def test_a_page_has_no_script_no_network_and_nothing_of_what_strings_say(card):
  tags = Tags(card_page.html(card))
  assert not {'script', 'img', 'link', 'iframe', 'a'} & set(tags.found)
  assert not [name for _, name, _ in tags.attributes if name.startswith('on')
              or name in ('src', 'href')]
  assert 'http' not in card_page.html(card).replace('http-equiv', '').replace('(http://x)', '')
  assert card_page.html(card).count('&lt;script&gt;') >= 6


def test_markdown_shows_what_strings_say_as_they_are(card):
  text = card_page.markdown(card)
  assert '<' not in text.replace('<=', '')
  rows = [line for line in text.splitlines() if line.startswith('| ')]
  assert len(rows) > 30
  for row in rows:
    assert len(re.findall(r'(?<!\\)\|', row)) == 4, row
  assert '](http' not in text.replace('\\](http', '')


def test_every_point_that_nist_asks_for_is_named(card):
  names = ' '.join(name for name, _, _ in card_page.points(card))
  assert [one for one in ASKED if one not in names] == []
  text = card_page.markdown(card)
  for name, _, standing in card_page.points(card):
    assert standing in (card_page.CHECKED, card_page.WORD, card_page.UNKNOWN)
    assert name in text


def test_what_verify_takes_on_trust_is_not_said_to_be_checked(card):
  for weights, standing in (((), card_page.UNKNOWN), (card.weights, card_page.CHECKED)):
    tables = dict(card_page.tables(dataclasses.replace(card, weights=weights)))
    rows = {name: who for rows in tables.values() for name, _, who in rows}
    assert rows['Weights'] == standing
    # `verify` computes epsilon from the noise on the card, and says that the noise is a claim.
    assert rows['Mechanism'] == rows['Sampling'] == rows['Steps'] == card_page.WORD


def test_the_numbers_of_the_page_are_those_of_the_statement(card):
  page, text = card_page.html(card), statement.of(card)
  for number in (statement.rounded_up(card.epsilon), statement.rounded_up(card.planned_epsilon),
                 f'{statement.percent(card.rate):.4g}%', statement.rounded_up(card.mu)):
    assert number in page and number in text


def points_of(svg, kind):
  root = xml.etree.ElementTree.fromstring(svg)
  return [[tuple(map(float, pair.split(','))) for pair in line.get('points').split()]
          for line in root.iter('polyline') if line.get('class') == kind]


def test_plots_stay_in_their_frame_and_rise(card):
  for svg in (card_page.epsilon_over_steps(card), card_page.attackers_rates(card)):
    (curve,) = points_of(svg, 'curve')
    assert all(0 <= x <= 360 and 0 <= y <= 240 for x, y in curve)
    heights = [y for _, y in curve]
    assert heights == sorted(heights, reverse=True) and len(curve) > 8
  (planned,) = points_of(card_page.epsilon_over_steps(card), 'curve dashed')
  assert len(planned) == 2


def test_without_a_guarantee_the_page_has_no_numbers():
  card = tfdp.Ledger().begin(None).done(3).card()
  page = card_page.html(card)
  assert 'NO PRIVACY GUARANTEE' in page and '<svg' not in page and 'infinite' in page


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason='needs chromium, which is not here')


def run(tmp_path, *arguments):
  return subprocess.run(
      [CHROMIUM, *FLAGS, f'--user-data-dir={tmp_path / "profile"}', *arguments], check=True,
      capture_output=True, timeout=120, stdin=subprocess.DEVNULL).stdout


@needs_browser
def test_a_browser_runs_nothing_of_it_and_a_telephone_need_not_scroll_sideways(card, tmp_path):
  (tmp_path / 'card.html').write_text(card_page.html(card), encoding='utf-8')
  (tmp_path / 'frame.html').write_text(
      '<title>?</title><iframe src="card.html" width="390" height="800"></iframe><script>'
      'onload=()=>{let d=frames[0].document;document.title=d.title+" "+'
      'd.documentElement.scrollWidth}</script>', encoding='utf-8')
  dom = run(tmp_path, '--allow-file-access-from-files', '--dump-dom',
            (tmp_path / 'frame.html').as_uri()).decode()
  title, width = re.search(r'<title>(.*) (\d+)</title>', dom).groups()
  assert title == 'Privacy card' and 0 < int(width) <= 390


@needs_browser
def test_a_browser_prints_it_on_two_sheets(card, tmp_path):
  (tmp_path / 'card.html').write_text(card_page.html(card), encoding='utf-8')
  run(tmp_path, '--no-pdf-header-footer', f'--print-to-pdf={tmp_path / "card.pdf"}',
      (tmp_path / 'card.html').as_uri())
  content = pathlib.Path(tmp_path / 'card.pdf').read_bytes()
  assert len(re.findall(rb'/Type\s*/Page\b', content)) == 2
