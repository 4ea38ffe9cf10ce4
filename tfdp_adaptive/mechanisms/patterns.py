# SPDX-License-Identifier: Apache-2.0
"""How often, and how far apart, a record may take part: an argument that mechanisms share."""

from typing import Optional, Tuple

from tfdp_adaptive import checks


def participation(min_sep: Optional[int], max_participations: int) -> Tuple[Optional[int], int]:
  """(min_sep, max_participations) as integers; raises unless they are a pattern."""
  checks.whole(max_participations=max_participations)
  if max_participations > 1 and min_sep is None:
    raise ValueError(
        '`min_sep` must be given when a record may take part more than once '
        f'(1 for reshuffled epochs). Received: max_participations={max_participations}, '
        'min_sep=None.')
  if min_sep is not None:
    checks.whole(min_sep=min_sep)
  return min_sep and int(min_sep), int(max_participations)
