# SPDX-License-Identifier: Apache-2.0
"""The methods of the demonstration and their settings, chosen once and recorded here.

All on public or made-up data. Those of the two showcases are the best of the twelve in
each method's grid, by the mean of several runs on validation examples; the federated
ones are the best of a few that are given there, by validation loss, and the centralized ones on
text what `tfdp compare --tune` chose: one of three rates each.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, Callable, Dict, NamedTuple, Tuple


class Method(NamedTuple):
  """One line of the table.

  Attributes:
    label: Its name there.
    optimizer: The `tfdp` class, or the `tfdp.rules` factory in federated runs;
      None for training without privacy.
    settings: What it is trained with.
    grid: The values tried for some of the settings.
  """

  label: str
  optimizer: Any
  settings: Dict[str, Any]
  grid: Dict[str, Tuple[Any, ...]]


# On text all have the clip norm .5 (scale-then-privatize: the square root of the number of
# parameters), epsilon at the noise floor, so that second moments count, and one of three rates.
# Loss on validation sentences, rate by rate: Adam, not private 4.643, 4.598, 4.753; DP-SGD 5.003,
# 4.898, 5.218; DP-Adam 5.054, 4.883, 5.086; DP-AdamBC 4.898, 4.951, 5.949; DP-AdamIME 5.019, 5.054,
# 6.350; DP-AdamSTP 5.029, 4.878, 5.035. One run each; those of DP-SGD and DP-AdamSTP are older.
_FLOOR, _RATES = 1.2e-3, dict(learning_rate=(.01, .03, .1))
CENTRALIZED = {
    'adam': Method('Adam, not private', None, dict(learning_rate=.03), _RATES),
    'dp_sgd': Method(
        'DP-SGD', 'DPSGD', dict(learning_rate=1.5, l2_norm_clip=.5, momentum=.9),
        dict(learning_rate=(.5, 1.5, 5.))),
    'dp_adam': Method(
        'DP-Adam', 'DPAdam', dict(learning_rate=.03, l2_norm_clip=.5, epsilon=_FLOOR), _RATES),
    'dp_adam_bc': Method(
        'DP-AdamBC', 'DPAdamBC', dict(learning_rate=.01, l2_norm_clip=.5, epsilon=_FLOOR), _RATES),
    'dp_adam_ime': Method(
        'DP-AdamIME', 'DPAdamIME', dict(learning_rate=.01, l2_norm_clip=.5, epsilon=_FLOOR),
        _RATES),
    'dp_adam_stp': Method(
        'DP-AdamSTP', 'DPAdamSTP',
        dict(learning_rate=.03, l2_norm_clip=180., scale_epsilon=_FLOOR, epsilon=_FLOOR), _RATES),
}

# Over clients, at epsilon 10, noise of all coordinates is 1.2 clip norms. Loss on validation
# sentences after 50 rounds, rate by rate, one run each; word frequencies have 5.219. DP-AdamSTP
# near the noise floor: 5.130, 5.073, 5.368. DP-Adam at the floor: 5.187 (.03), 5.332 (.15); thirty
# times above it, where it is DP-SGD with momentum, 5.103: its second moments would be noise here.
FEDERATED = {
    'dp_adam': Method(
        'DP-Adam', 'dp_adam',
        dict(server_learning_rate=1., client_learning_rate=1., l2_norm_clip=.5, epsilon=.1),
        dict(server_learning_rate=(.5, 1., 2.))),
    'dp_adam_stp': Method(
        'DP-AdamSTP', 'scale_then_privatize',
        dict(server_learning_rate=.12, client_learning_rate=1., l2_norm_clip=50.,
             scale_epsilon=1e-3, epsilon=1e-3),
        dict(server_learning_rate=(.05, .12, .25))),
}


SCALES = {
    'adam': Method(
        'Adam, not private', None, dict(learning_rate=.6, beta_2=.99),
        dict(learning_rate=(.3, .6, 1., 2., 3., 6.), beta_2=(.99, .999))),
    'dp_sgd': Method(
        'DP-SGD', 'DPSGD', dict(learning_rate=3., l2_norm_clip=1., momentum=.9),
        dict(learning_rate=(.3, 1., 3., 10.), l2_norm_clip=(1., 3., 10.))),
    'dp_adam': Method(
        'DP-Adam', 'DPAdam', dict(learning_rate=3., l2_norm_clip=.3, epsilon=1e-8),
        dict(learning_rate=(1., 3., 6.), l2_norm_clip=(.3, 1.), epsilon=(1e-8, 1e-3))),
    'dp_adam_bc': Method(
        'DP-AdamBC', 'DPAdamBC', dict(learning_rate=.3, l2_norm_clip=.3, epsilon=1e-4),
        dict(learning_rate=(.1, .3, 1.), l2_norm_clip=(.3, 1.), epsilon=(1e-4, 3e-4))),
    'dp_adam_stp': Method(
        'DP-AdamSTP', 'DPAdamSTP',
        dict(learning_rate=3., l2_norm_clip=60., scale_epsilon=1e-3, epsilon=1e-8),
        dict(learning_rate=(1., 3., 6.), l2_norm_clip=(60., 120.), scale_epsilon=(1e-3, 3e-3))),
}

_NOISE_GRID = dict(learning_rate=(.3, 1., 3., 10.), l2_norm_clip=(.5, 1., 2.))
NOISE = {
    'sgd': Method(
        'SGD, not private', None, dict(learning_rate=30., momentum=.9),
        dict(learning_rate=(.3, 1., 3., 10., 30., 100.), momentum=(0., .9))),
    'independent': Method(
        'DP-SGD, independent noise', 'DPSGD',
        dict(learning_rate=3., l2_norm_clip=1., momentum=.9), _NOISE_GRID),
    'banded': Method(
        'DP-SGD, banded noise', 'DPSGD',
        dict(learning_rate=10., l2_norm_clip=.5, momentum=.9, bands=16), _NOISE_GRID),
}


def settled(
    method: Method, tuned: bool,
    validation_loss: Callable[[Dict[str, Any]], float]) -> Tuple[Dict[str, Any], int]:
  """The recorded settings, or those of the method's whole grid that do best.

  Args:
    method: A `Method`.
    tuned: Whether the grid is tried.
    validation_loss: `settings -> float`, trains a model.

  Returns:
    The settings, and the number of models trained.
  """
  if not tuned:
    return method.settings, 0
  results = []
  for values in itertools.product(*method.grid.values()):
    settings = {**method.settings, **dict(zip(method.grid, values))}
    results.append((validation_loss(settings), settings))
    print(f'{method.label}: validation loss {results[-1][0]:.4f} with {settings}', file=sys.stderr)
  best = min(results, key=lambda result: result[0])[1]
  print(f'{method.label}: chosen {best}', file=sys.stderr)
  return best, len(results)
