# SPDX-License-Identifier: Apache-2.0
"""Writes docs/independence.md: `make independence-table`, some two minutes of one core.

Each line is a case of the tests, by its name there.
"""

import pathlib
import time

import honest_models_test
import independence_test

import tfdp_adaptive as tfdp

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'independence.md'
TEXT = '''# Models whose examples see each other

Clipping bounds what one record does only if no example's gradient depends on the others. Before the
first step, every model is run, in training, on batches whose other examples are changed: permuted,
zeroed, scaled, not finite, copied, shortened, left out, joined, filled with what the graph compares
with, at the sizes, counts of steps and draws that it asks for. If anything moves that the gradient
of an example is made of, the model is refused; so is one that writes data into what outlives the
step. `tfdp.validate_model(model)` asks at any time.

Made by `make independence-table` from the cases of `independence_test.py` and
`honest_models_test.py`, with seconds of one core each, the trace included (time grows with the
model, as a handful of its training steps; large models are run less often). "Clip norms" is how far
the clipped sum of examples that did not change moves: what one record may do is one.

What it cannot see: mixing that changes less than 1e-5 of anything; conditions on the batch that no
constant of the graph tells (a hash of all words, a threshold that is a weight or that no input
reaches through the layers before); conditions inside Python code that the graph calls
(`tf.numpy_function`, `tf.py_function`).

## Refused: {refused}

{rows}

## Passes without any difference: {passed}

| What the model has | Seconds |
|---|---|
{honest}
'''


def lines(cases):
  """`(name, answer, seconds)` of models; the answer is '' where they pass."""
  for name, make in cases.items():
    model, answer = make(), ''
    start = time.process_time()
    try:
      tfdp.validate_model(model)
    except tfdp.PrivacyError as error:
      answer = str(error).split('examples: ')[1].split(' clip norms. Per-example')[0].replace(
          '. The clipped sum of examples that did not change moves by ', ' | ')
    yield name, answer, time.process_time() - start


def page():
  parts = {}
  for title, cases in (('Always', independence_test.MIXING), ('Rarely', independence_test.RARELY)):
    rows = list(lines(cases))
    assert all(answer for _, answer, _ in rows), rows
    parts[title] = (len(rows), f'### {title}\n\n'
                    '| What the model does | What gives it away | Clip norms | Seconds |\n'
                    '|---|---|---|---|\n' + '\n'.join(
                        f'| {name} | {answer} | {seconds:.1f} |' for name, answer, seconds in rows))
  honest = list(lines(honest_models_test.HONEST))
  assert not any(answer for _, answer, _ in honest), honest
  return TEXT.format(
      refused=sum(count for count, _ in parts.values()),
      rows='\n\n'.join(text for _, text in parts.values()), passed=len(honest),
      honest='\n'.join(f'| {name} | {seconds:.1f} |' for name, _, seconds in honest))


if __name__ == '__main__':
  PAGE.write_text(page(), encoding='utf-8')
