"""Arguments that several mechanisms share."""

import numpy as np


def participation(min_sep, max_participations):
  """(min_sep, max_participations) as integers; raises unless they are a pattern."""
  count(max_participations=max_participations)
  if max_participations > 1 and min_sep is None:
    raise ValueError(
        '`min_sep` must be given when a record may take part more than once '
        f'(1 for reshuffled epochs). Received: max_participations={max_participations}, '
        'min_sep=None.')
  if min_sep is not None:
    count(min_sep=min_sep)
  return min_sep and int(min_sep), int(max_participations)


def count(**counts):
  """Raises unless every value is a positive integer."""
  for name, value in counts.items():
    if (isinstance(value, (bool, str)) or not np.isscalar(value) or not np.isfinite(value)
        or int(value) != value or value < 1):
      raise ValueError(f'`{name}` must be a positive integer. Received: {name}={value!r}.')
