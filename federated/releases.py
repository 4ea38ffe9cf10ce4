"""Where released numbers go: TFF release managers, driven from ordinary Python."""

import asyncio
import concurrent.futures

import tensorflow_federated as tff


def managers(path):
  """CSV and TensorBoard files in a run's folder."""
  return [tff.program.CSVFileReleaseManager(path / 'metrics.csv', key_fieldname='round'),
          tff.program.TensorBoardReleaseManager(path / 'tensorboard')]


def release(release_managers, row):
  """Hands a row of numbers to every `tff.program.ReleaseManager`, by its round."""
  values = {name: value for name, value in row.items() if name != 'round'}

  async def to_all():
    await asyncio.gather(*(manager.release(values, row['round']) for manager in release_managers))

  # A thread of its own, since notebooks already run an event loop in this one.
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    pool.submit(asyncio.run, to_all()).result()
