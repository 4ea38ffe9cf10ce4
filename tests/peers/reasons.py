# SPDX-License-Identifier: Apache-2.0
"""Tests of Keras that private models fail in another way than a refusal in words, and why."""

_WORDS = 'It expects an error in the words of Keras, and receives one in ours.'
_MODEL = 'models/model_test.py::ModelTest::'
DIFFERS = {
    **{f'{_MODEL}test_functional_{name}': _WORDS for name in (
        'list_outputs_dict_losses_invalid_keys', 'list_outputs_dict_losses_no_output_names',
        *(f'struct_outputs_struct_losses{i}' for i in (2, 3, 4, 5)))},
    'models/functional_test.py::FunctionalTest::test_required_none_raises_in_fit':
        'It expects an error for None in place of an input, and receives one in other words.',
    **{f'{_MODEL}test_functional_optional_inputs_{name}': 'An optional input must have a value, '
       'since None has no row for each example.' for name in ('optional_none',
                                                              'generator_optional_none')},
    f'{_MODEL}test_get_state_tree': 'It looks for the state of an optimizer that is named adam.',
}


def of(test):
  """Returns the reason why a test may differ, or ''."""
  return DIFFERS.get(test, '')
