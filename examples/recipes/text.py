# SPDX-License-Identifier: Apache-2.0
"""Text, with a pretrained transformer and LoRA.

The program pretrains a small transformer on public text: it predicts the next
word in the documentation of Python and NumPy. The private examples are
sentences from the documentation of Keras, SciPy and TensorFlow, and the label
is the library. LoRA freezes the pretrained weights and trains low-rank changes
of their matrices, so fewer weights get noise. All words of the vocabulary
occur in public text.

Replace `load` with a function that returns your own strings and labels. The
program needs Keras 3.
"""

import importlib.util
import pathlib
import re
import sysconfig

import keras
import numpy as np

import tfdp_adaptive as tfdp

LIBRARIES = ('keras', 'scipy', 'tensorflow')
LENGTH, WORDS, WIDTH = 16, 2_000, 32
layers = keras.layers


def sentences(folder):
  """Yields the sentences in the docstrings of all modules in a folder."""
  for path in sorted(pathlib.Path(folder).rglob('*.py')):
    inside = path.relative_to(folder).parts
    if {'site-packages', 'test', 'tests'} & set(inside):
      continue
    source = path.read_text(encoding='utf-8', errors='ignore')
    for text in re.findall(r'"""(.*?)"""', source, re.DOTALL):
      for sentence in re.split(r'(?<=[.!?])\s+|\n\s*\n', text):
        if len(sentence.split()) > 5:
          yield ' '.join(sentence.split())


def documentation(package):
  folder = pathlib.Path(importlib.util.find_spec(package).origin).parent
  return sentences(folder)


def load():
  """Returns public strings, and the strings and labels of all examples."""
  public = {*sentences(sysconfig.get_paths()['stdlib']),
            *documentation('numpy')}
  found = [set(documentation(name)) for name in LIBRARIES]
  rng = np.random.default_rng(0)
  texts, labels = [], []
  for label, own in enumerate(found):
    others = set().union(*(one for one in found if one is not own))
    own = rng.permutation(sorted(own - others - public))[:8_000]
    texts.extend(own)
    labels.extend([label] * len(own))
  order = rng.permutation(len(texts))
  return sorted(public), np.array(texts)[order], np.array(labels)[order]


def build():
  """Returns a language model, and the part of it that reads the words."""
  words = keras.Input([LENGTH], dtype='int32')
  x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(words)
  y = layers.LayerNormalization()(x)
  y = layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
  x = layers.Add()([x, y])
  y = layers.LayerNormalization()(x)
  y = layers.Dense(2 * WIDTH, activation='gelu')(y)
  x = layers.Add()([x, layers.Dense(WIDTH)(y)])
  x = layers.LayerNormalization()(x)
  base = keras.Model(words, x)
  return keras.Model(words, layers.Dense(WORDS)(x)), base


def pretrain(tokens, epochs):
  """Returns the weights of a base that has learned to predict words."""
  keras.utils.set_random_seed(0)
  model, base = build()
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(keras.optimizers.Adam(2e-3), loss)
  following = np.roll(tokens, -1, axis=1)
  following[:, -1] = 0
  model.fit(tokens, following, sample_weight=(following > 0).astype('float32'),
      batch_size=64, epochs=epochs, verbose=0)
  return base.get_weights()


def classifier(pretrained, rank=None):
  """Returns a classifier; with `rank`, its base has low-rank changes."""
  keras.utils.set_random_seed(1)
  _, base = build()
  base.set_weights(pretrained)
  for layer in base._flatten_layers(include_self=False):
    if rank and isinstance(layer, (layers.Dense, layers.EinsumDense,
                                   layers.Embedding)):
      layer.enable_lora(rank)
    elif rank and isinstance(layer, layers.LayerNormalization):
      layer.trainable = False
  x = layers.GlobalAveragePooling1D()(base.output)
  return keras.Model(base.input, layers.Dense(
      len(LIBRARIES), activation='softmax', kernel_initializer='zeros')(x))


def report(name, model, x, y):
  accuracy = np.mean(model.predict(x, verbose=0).argmax(1) == y)
  trained = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
  print(f'{name:32} accuracy {accuracy:.3f}, {trained:,} trained weights')


def main(quick=False, data=None):
  public, texts, labels = data or load()
  reader = layers.TextVectorization(WORDS, output_sequence_length=LENGTH)
  reader.adapt(public)  # The vocabulary comes from public text alone.
  read = lambda strings: np.asarray(reader(np.array(strings)), 'int32')
  pretrained = pretrain(read(public), epochs=1 if quick else 2)

  tokens = read(texts)
  held_out = len(texts) // 8
  test = tokens[:held_out], labels[:held_out]
  labeled = tokens[held_out:][:100], labels[held_out:][:100]
  x, y = tokens[held_out + 100:], labels[held_out + 100:]
  loss = 'sparse_categorical_crossentropy'

  model = classifier(pretrained, rank=4)
  model.compile(keras.optimizers.Adam(3e-3), loss)
  model.fit(*labeled, batch_size=20, epochs=1 if quick else 10, verbose=0)
  report('100 public labels alone', model, *test)

  plan = tfdp.PrivacyPlan.calibrate(
      target_epsilon=1.0, target_delta=1e-6, population_size=len(y),
      batch_size=len(y) // 20, steps=2 if quick else 100, l2_norm_clip=1.0)
  for name, rank, rate in (('all weights', None, 0.01), ('LoRA', 4, 0.02)):
    model = tfdp.make_private(classifier(pretrained, rank))
    model.compile(tfdp.DPAdam(rate, plan=plan, epsilon=1e-3), loss)
    model.fit(plan.batches((x, y)), verbose=0)
    report(f'{name}, epsilon 1', model, *test)
  statement = model.ledger.statement()

  model = classifier(pretrained, rank=4)
  model.compile(keras.optimizers.Adam(3e-3), loss)
  model.fit(x, y, batch_size=64, epochs=1 if quick else 2, verbose=0)
  report('LoRA, not private', model, *test)
  print(statement.split('. ')[0] + '.')


if __name__ == '__main__':
  main()
