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

Clipping bounds the influence of one record only if no example's gradient depends on other
examples. Before the first step, the library therefore tests every model. It keeps one example,
changes the others and runs the model in training mode:

* The other examples are permuted, zeroed, scaled, made infinite, copied, shortened, removed or
  added.
* If the model compares its inputs with constants, the other examples are set to those constants.
  If it tests for a batch size, a step count or a random draw, that value is tried, too.

If the outputs or gradients of the kept example change, the model is refused. A model that writes
data into a variable, table or file that outlives the step is also refused.
`tfdp.validate_model(model)` runs the test at any time.

The test cannot find:

* mixing that changes every value by less than 1e-5 of itself;
* conditions on the batch that do not compare with a constant of the graph, such as a hash of all
  words, a threshold that is a weight, or a threshold that no input can reach through the layers
  before it;
* conditions inside Python code that the graph calls (`tf.numpy_function`, `tf.py_function`).

`make independence-table` writes the tables below from the cases of `independence_test.py` and
`honest_models_test.py`. "Clip norms" is the largest change of the clipped sum of the examples that
were kept. One record may change the sum by 1. "Seconds" is the time on one core, tracing included.
The test takes as long as a few training steps. It runs large models less often.

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
