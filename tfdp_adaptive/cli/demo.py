"""`tfdp demo`: the main job, `tfdp compare` and `tfdp federated` on one text into one table."""

from tfdp_adaptive.cli import compare
from tfdp_adaptive.cli import federated
from tfdp_adaptive.cli import options
from tfdp_adaptive.cli import report as report_lib
from tfdp_adaptive.cli import settings as settings_lib
from tfdp_adaptive.cli import tasks


def add_parser(subparsers):
  parser = subparsers.add_parser('demo', description=__doc__)
  compare.add_arguments(parser)
  federated.add_arguments(parser)
  options.add_data_arguments(parser)
  options.add_privacy_arguments(
      parser, f'{compare.EPSILON:g} per sentence, {federated.EPSILON:g} per client')
  parser.set_defaults(tune=False)
  return parser


def run(arguments):
  federated.require(arguments.workers)
  with report_lib.Report(arguments.out, federated.PART) as report:
    task = tasks.load(arguments, need_client=True)
    by_sentence = compare.make_plan(arguments, task)
    by_client = federated.make_plan(arguments, task)
    report.describe(task, arguments)
    report.state(*report_lib.preamble(task, arguments))
    compare.train_all(arguments, task, by_sentence, settings_lib.CENTRALIZED, report)
    federated.train_all(arguments, task, by_client, settings_lib.FEDERATED, report)
    report.state('Both parts used the same text. The models of the centralized part promise '
                 'nothing for a client as a whole, so neither do both parts together.')
    report.finish(arguments.json)
