# SPDX-License-Identifier: Apache-2.0
"""Tests of peers that private classes fail in another way than a refusal in words, and why."""

_WORDS = 'It expects an error in the words of Keras, and receives one in ours.'
_MODEL = 'models/model_test.py::ModelTest::'
_LOSSES = 'pld/pld_privacy_accountant_test.py::PldPrivacyAccountantTest::test_'
_TFP = 'keras_models/dp_keras_model_test.py::DPKerasModelTest::'
DIFFERS = {
    **{f'{_MODEL}test_functional_{name}': _WORDS for name in (
        'list_outputs_dict_losses_invalid_keys', 'list_outputs_dict_losses_no_output_names',
        *(f'struct_outputs_struct_losses{i}' for i in (2, 3, 4, 5)))},
    'models/functional_test.py::FunctionalTest::test_required_none_raises_in_fit':
        'It expects an error for None in place of an input, and receives one in other words.',
    **{name: 'It looks for the state of an optimizer that is named adam.' for name in (
        f'{_MODEL}test_get_state_tree',
        'models/variable_mapping_test.py::VariableMappingTest::test_basics')},
    'saving/file_editor_test.py::SavingTest::test_scalar_weight':
        'It counts what a file holds: a private optimizer keeps five numbers more.',
    'saving/saving_lib_test.py::SavingTest::test_saved_module_paths_and_class_names':
        'It looks for the name of a class, which the harness replaces by a private one.',
    **{f'{_TFP}testEarlierAPIFailsearlier API {one}':
       'It tests an argument of tensorflow_privacy alone.' for one in (True, False)},
    **{f'{_LOSSES}composition_errors_for_neighboring_relation{i}':
       'It expects an error in the words of dp_accounting.' for i in range(5)},
    **{f'{_LOSSES}poisson_subsampling_with_zero_probability{i}':
       'Plans sample with a positive probability; what is said of zero is an upper bound or an '
       'error.' for i in range(6)},
    **{f'{_LOSSES}non_positive_composition_value_error{i}':
       'Numbers of steps are checked where plans are made.' for i in range(2)},
    **{f'{_LOSSES}supports_{name}': 'Noise of plans is Gaussian: randomized responses are refused.'
       for name in ('randomized_response_replace_one', 'randomized_response_replace_special',
                    'subsampled_gaussian_and_rr_composition0',
                    'subsampled_gaussian_and_rr_composition1')},
    'layers/core/einsum_dense_test.py::EinsumDenseTest::'
    'test_quantize_lora_integration_int4_btd,ndh->btnh':
        'Its batch of one is divided by 32, the batch size of all tests here: the second step of a '
        'matrix is below the resolution of its numbers. With a batch size of one it passes.',
    f'{_LOSSES}truncated_subsampled_gaussian_basic':
        'It expects delta within 1e-6 of its value; ours is an upper bound within 1e-4.',
}


def of(test):
  """Returns the reason why a test may differ, or ''."""
  return DIFFERS.get(test, '')
