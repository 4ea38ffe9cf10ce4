# SPDX-License-Identifier: Apache-2.0
"""Whole trainings, private beside plain: CPU seconds from the import to the end of five epochs.

Usage: python benchmarks/speed/guides.py [--python INTERPRETER ...] [name ...]

Four models like those of Keras' guides, and a large table, on made-up data of fixed shapes. Each
figure is of a new process. `rest` is what the steps after the first take. One table for each
interpreter, of which each may have another stack; else for the one that runs this.
"""

import argparse
import pathlib
import subprocess
import sys

REMARKS = pathlib.Path(__file__).parents[1] / 'remarks' / 'guides.txt'
EPOCHS = 5
PARTS = ('import', 'model', 'first step', 'rest')
# Name -> (records, batch size, data `x, y`, model, loss), as Python.
GUIDES = {
    'text classification': (
        4096, 64, 'rng.integers(0, 20_000, (N, 200)), rng.integers(0, 2, (N, 1)).astype("float32")',
        '''
inputs = keras.Input((200,), dtype='int64')
x = layers.Embedding(20_000, 64)(inputs)
x = layers.Dropout(0.5)(x)
x = layers.Conv1D(64, 7, strides=3, activation='relu')(x)
x = layers.Conv1D(64, 7, strides=3, activation='relu')(x)
x = layers.GlobalMaxPooling1D()(x)
x = layers.Dense(64, activation='relu')(x)
outputs = layers.Dense(1, activation='sigmoid')(layers.Dropout(0.5)(x))
''', 'keras.losses.BinaryCrossentropy()'),
    'time-series transformer': (
        1024, 64, 'rng.normal(size=(N, 200, 1)).astype("float32"), rng.integers(0, 2, N)',
        '''
inputs = x = keras.Input((200, 1))
for _ in range(4):
  y = layers.MultiHeadAttention(4, 64, dropout=0.25)(x, x)
  y = layers.LayerNormalization(epsilon=1e-6)(layers.Dropout(0.25)(y))
  x = layers.Add()([x, y])
  y = layers.Conv1D(4, 1, activation='relu')(x)
  y = layers.LayerNormalization(epsilon=1e-6)(layers.Conv1D(1, 1)(layers.Dropout(0.25)(y)))
  x = layers.Add()([x, y])
x = layers.GlobalAveragePooling1D(data_format='channels_last')(x)
x = layers.Dropout(0.4)(layers.Dense(128, activation='relu')(x))
outputs = layers.Dense(2, activation='softmax')(x)
''', 'keras.losses.SparseCategoricalCrossentropy()'),
    'structured data': (
        4096, 32, 'rng.normal(size=(N, 40)).astype("float32"), rng.integers(0, 2, (N, 1)) * 1.0',
        '''
inputs = keras.Input((40,))
x = layers.Dense(32, activation='relu')(inputs)
outputs = layers.Dense(1, activation='sigmoid')(layers.Dropout(0.5)(x))
''', 'keras.losses.BinaryCrossentropy()'),
    'U-Net': (
        128, 16,
        'rng.normal(size=(N, 48, 48, 3)).astype("float32"), rng.integers(0, 3, (N, 48, 48))',
        '''
inputs = keras.Input((48, 48, 3))
x = before = layers.Conv2D(16, 3, strides=2, padding='same', activation='relu')(inputs)
for filters in (32, 64):
  x = layers.SeparableConv2D(filters, 3, padding='same', activation='relu')(x)
  x = layers.GroupNormalization(8)(x)
  x = layers.MaxPooling2D(3, strides=2, padding='same')(x)
  before = layers.Conv2D(filters, 1, strides=2, padding='same')(before)
  x = before = layers.Add()([x, before])
for filters in (64, 32, 16):
  x = layers.Conv2DTranspose(filters, 3, padding='same', activation='relu')(x)
  x = layers.GroupNormalization(8)(x)
  x = layers.UpSampling2D(2)(x)
  before = layers.Conv2D(filters, 1, padding='same')(layers.UpSampling2D(2)(before))
  x = before = layers.Add()([x, before])
outputs = layers.Conv2D(3, 3, activation='softmax', padding='same')(x)
''', 'keras.losses.SparseCategoricalCrossentropy()'),
    'a million words': (
        4096, 256,
        'rng.integers(0, 1_000_000, (N, 20)), rng.integers(0, 2, (N, 1)).astype("float32")',
        '''
inputs = keras.Input((20,), dtype='int64')
x = layers.GlobalAveragePooling1D()(layers.Embedding(1_000_000, 64)(inputs))
outputs = layers.Dense(1, activation='sigmoid')(x)
''', 'keras.losses.BinaryCrossentropy()')}
PROGRAM = '''
import sys, time
import numpy as np
import tensorflow as tf
import tfdp_adaptive as tfdp
keras = tfdp.compat.keras
layers = keras.layers
if private: tfdp.DPAdam, tfdp.make_private
marks = [time.process_time()]
rng, N = np.random.default_rng(0), {records}
data = ({data})
plan = tfdp.PrivacyPlan(
    population_size=N, batch_size={batch_size}, steps={steps}, l2_norm_clip=1.0,
    noise_multiplier=1.0, target_delta=1e-5) if private else None
{model}
model = keras.Model(inputs, outputs)
if private:
  model = tfdp.make_private(model)
model.compile(tfdp.DPAdam(1e-3, plan=plan) if private else keras.optimizers.Adam(1e-3), {loss})
marks.append(time.process_time())
first = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: len(marks) < 3 and marks.append(time.process_time()))
batches = plan.batches(data) if private else tf.data.Dataset.from_tensor_slices(data).shuffle(
    N).repeat().batch({batch_size}, drop_remainder=True)
model.fit(batches, steps_per_epoch=N // {batch_size}, epochs={epochs}, verbose=0,
          callbacks=[first])
marks.append(time.process_time())
print('version', tf.__version__, 'seconds', *marks)
'''


def seconds(python, name, private):
  """`(version of TensorFlow, CPU seconds of each of `PARTS`)`, in a new process."""
  records, batch_size, data, model, loss = GUIDES[name]
  program = f'private = {private}\n' + PROGRAM.format(
      records=records, batch_size=batch_size, data=data, model=model, loss=loss, epochs=EPOCHS,
      steps=EPOCHS * (records // batch_size))
  out = subprocess.run([python, '-c', program], stdout=subprocess.PIPE, check=True,
                       stderr=subprocess.DEVNULL, text=True).stdout
  version, _, *marks = out.rpartition('version')[2].split()
  marks = [0.0, *map(float, marks)]
  return version, [after - before for before, after in zip(marks, marks[1:])]


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--python', action='append')
  parser.add_argument('names', nargs='*', default=list(GUIDES))
  options = parser.parse_args()
  print(REMARKS.read_text())
  for python in options.python or [sys.executable]:
    for i, name in enumerate(options.names):
      (version, plain), (_, private) = seconds(python, name, False), seconds(python, name, True)
      if not i:
        print(f'TensorFlow {version}, {EPOCHS} epochs, CPU seconds; parts private / plain\n')
        print(f'{"":24} {"plain":>7} {"private":>7} {"ratio":>6}   ',
              *(f'{part:>13}' for part in PARTS))
      parts = ' '.join(f'{b:6.1f}/{a:6.1f}' for a, b in zip(plain, private))
      print(f'{name:24} {sum(plain):7.1f} {sum(private):7.1f} {sum(private) / sum(plain):6.2f}    '
            f'{parts}', flush=True)
    print()


if __name__ == '__main__':
  main()
