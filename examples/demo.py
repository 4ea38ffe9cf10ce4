# SPDX-License-Identifier: Apache-2.0
"""Shows the use of the library in one table and one picture."""

from __future__ import annotations

from . import compare
from . import federated
from . import report as report_lib
from . import settings
from . import showcases
from . import tasks


def run(
    report: report_lib.Report, text: tasks.Text, by_sentence: tasks.Target,
    by_client: tasks.Target, tune: bool) -> None:
  """Both parts on one text, and the two showcases between them."""
  task = tasks.load(text, need_client=True)
  plan_of_sentences = compare.make_plan(task, by_sentence)
  plan_of_clients = federated.make_plan(task, by_client)
  report.describe(task, tune)
  compare.train_all(task, plan_of_sentences, settings.CENTRALIZED, report, tune)
  for case in (showcases.SCALES, showcases.NOISE):
    showcases.run(case, report, tune)
  report.state('The parts "scales" and "noise" used data made up for them.')
  federated.train_all(task, plan_of_clients, settings.FEDERATED, report, tune)
  report.state('Both parts on text used the same. The models of the centralized part promise '
               'nothing for a client as a whole, so neither do both parts together.')
  report.finish()
