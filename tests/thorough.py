# SPDX-License-Identifier: Apache-2.0
"""What `make test` leaves out and `.ci/run` runs, with the reason.

`LEFT_OUT` maps tests to the rows of their tables that are kept (`*` stands for anything), or, with
`!`, to those that are not; no rows: the whole test is left out. Nothing may be left out that alone
notices a bug of `tests/mutants`.
"""

ROWS_SHARE_CODE = 'The rows share all code; those kept differ in kind.'
LARGER = 'A smaller test in the same file or room notices the same.'
PARTS = 'The parts are tested one by one; this runs them together, in processes of their own.'

_BY_REASON = {
    ROWS_SHARE_CODE: {
        'accounting/law_contract_test.py::test_delta_is_never_below_the_truth_and_hardly_above': (
            '!0.3-*',),
        'accounting/law_contract_test.py::test_a_second_accountant_says_the_same': (
            '!PoissonExamples*',),
        'documents_test.py::test_examples_run_one_after_the_other': (
            'README.md', 'docs/guides/training.md', 'docs/guides/users.md', 'docs/guides/resume.md',
            'docs/guides/federated.md'),
        'keras/face_test.py::test_old_and_new_spellings_take_the_same_steps': (
            'quantile', 'groups', 'layers', 'engine'),
        'audit/white_box_test.py::test_a_correct_class_is_not_refuted': (
            'DPSGD', 'DPAdamIME', 'DPAdamSTP', 'DP2Yogi'),
        'audit/white_box_test.py::test_planted_bugs_are_caught': (
            'DPSGD', 'DPAdamIME', 'DPAdamSTP', 'DP2Yogi'),
        'audit/white_box_test.py::test_queries_are_audited_and_their_bugs_caught': (
            'dp_adam_ime', 'scale_then_privatize'),
        'audit/white_box_test.py::test_correlated_noise_is_compared_with_its_mechanism': (
            'mechanism0',),
        'audit/gradient_canaries_test.py::'
        'test_the_difference_is_what_a_plan_without_amplification_accounts_for': (
            'tree', 'replace'),
        'examples/showcases_test.py::test_what_is_reported_is_within_epsilon': ('noise',),
        'clipping/bookkeeping_forward_test.py::test_expressions_of_models_that_draw': (
            'GaussianDropout',),
        'clipping/bookkeeping_forward_test.py::test_results': (
            'transformer-float32', 'towers-mixed_float16', 'reversible-float32'),
        'clipping/bookkeeping_generic_test.py::test_layers_with_weights': ('!RNN', '!ConvLSTM*'),
        'clipping/bookkeeping_layers_test.py::test_precisions': (
            'float64-images', 'float64-sequences', 'mixed_float16-sequences'),
        'clipping/bookkeeping_models_test.py::test_recurrent_dropout': ('layer0', 'layer3'),
        'clipping/bookkeeping_numbers_test.py::test_every_route': ('gram', 'ragged blocks'),
        'clipping/bookkeeping_numbers_test.py::test_mixed_precision': ('mixed_float16',),
        'clipping/bookkeeping_numbers_test.py::test_no_record_exceeds_the_clip_norm': (
            '*-1e-20-*', '*-1.0-1e-30', 'True-1.0-*', 'False-1.0-1e+18', 'False-1.0-1e-30'),
        'clipping/bookkeeping_numbers_test.py::test_sizes_known_only_at_run_time': ('True-2.0',),
        'clipping/bookkeeping_numbers_test.py::test_squares_that_overflow': (
            'False-mlp', 'False-text'),
        'clipping/bookkeeping_restored_test.py::test_another_thread_takes_turns': ('False',),
        'clipping/bookkeeping_test.py::test_dense_in_a_function': ('True',),
        'clipping/bookkeeping_test.py::test_recurrent': (
            'lstm', 'gru', 'gru reset before', 'bidirectional'),
        'clipping/bookkeeping_test.py::test_recurrent_with_a_mask': ('<lambda>0', '<lambda>2'),
        'clipping/losses_test.py::test_losses_that_compare_examples_get_them_one_at_a_time': (
            '!contrastive-y0',),
        'clipping/magnitudes_test.py::test_book_keeping': (
            'rank one', 'explicit', 'embedding', 'generic', 'blocks'),
        'clipping/magnitudes_test.py::test_other_engines': ('rank one-*',),
        'clipping/materialized_test.py::test_sums_are_those_of_batches_of_one': (
            'dense-vectorized-4-scaled', 'sequence-looped-2-isotropic', 'dense-looped-1-scaled',
            'per_step-*'),
        'clipping/out_of_range_test.py::test_tables_that_are_not_trained_and_ids_of_other_types': (
            '_frozen-int32-7', '_frozen-float32-nan'),
        'clipping/users_test.py::test_sums_are_those_of_users_one_by_one': (
            'bookkeeping-mixed-mean', 'layered-sequence-sum'),
        'federated/groups_test.py::test_groups_give_what_clients_give_one_by_one': (
            '!functional', '!gradients'),
        'federated/processes_test.py::test_equals_numpy_over_user_deltas': (
            'in_process-*', 'tff-scale_then_privatize'),
        'federated/processes_test.py::test_equals_the_query_and_the_rule_by_hand': (
            'in_process-*', 'tff-two releases'),
        'federated/workers_test.py::test_nothing_is_left_running': ('kill',),
        'independence/honest_models_test.py::'
        'test_honest_models_pass_without_any_difference': (
            '!an LSTM that drops', '!a GRU both ways'),
        'keras/admission_test.py::test_batches_are_taken_once_and_in_their_order': (
            'Poisson-*', 'RandomAllocation-*'),
        'keras/agreement_test.py::test_keras_equals_the_query': (
            'DPAdamSTP', 'DP2Yogi', 'DPSOAP', 'DPAdamJME'),
        'keras/agreement_test.py::test_large_models_take_the_same_steps_in_one_pass': (
            'DPAdamSTP',),
        'keras/classes_test.py::test_fits_and_resumes_mid_phase': (
            'DPSGD', 'DPAdamIME', 'DP2Yogi', 'NoisyAdaGrad', 'DPSOAP'),
        'keras/features_test.py::test_mixed_precision_clips_and_adds_noise_in_float32': (
            'auto-mixed_float16', 'materialized-mixed_bfloat16'),
        'keras/formulas_test.py::test_without_noise_it_is_the_formula': (
            '*-graph', 'adam_stp-xla', 'adam-eager'),
        'keras/history_test.py::test_files_carry_it': ('False',),
        'keras/matrix_rules_test.py::'
        'test_saved_in_the_middle_and_loaded_equals_training_at_a_stretch': ('DPSOAP', 'DPMuon'),
        'keras/mechanisms_test.py::'
        'test_noise_is_correlated_as_designed_also_over_a_resume': ('blt', 'banded'),
        'keras/memory_budget_test.py::test_steps_are_those_of_the_whole_batch': ('kwargs3',),
        'keras/misuse_test.py::test_time_is_not_taken_for_the_batch_by_the_probes': ('SimpleRNN',),
        'keras/noise_test.py::test_a_seeded_resume_is_exact': ('DPAdamIME',),
        'noise/noise_streams_test.py::test_rows_are_the_noising_matrix_times_z': (
            'eager-*', 'passes-*', 'graph-independent', 'xla-tree', 'xla-blt',
            'xla-banded_inverse'),
        'noise/noise_streams_test.py::test_a_checkpoint_resumes_bit_for_bit': (
            'tree', 'blt', 'toeplitz', 'independent', 'banded_inverse'),
        'noise/noise_streams_test.py::test_no_noise_value_occurs_twice': (
            'tree', 'blt', 'toeplitz', 'independent', 'column_normalized'),
        'noise/noise_streams_test.py::'
        'test_a_restored_state_with_a_fresh_key_continues_with_new_noise': (
            'tree*', 'blt', 'toeplitz', 'independent', 'column_normalized'),
        'rules/rules_contract_test.py::test_xla_equals_eager_without_retracing': (
            'dp_sgd*', 'dp_adam_ime*', 'dp2_*', 'scale_then_privatize', 'dp_soap', 'noisy_adagrad',
            'pdp_sgd', 'pagan-ball', 'dp_muon', 'dp_adam_bc', 'low_pass*'),
        'queries/mechanism_federated_test.py::test_rounds_are_means_plus_rows': (
            'tree', 'independent', 'toeplitz', 'blt'),
        'queries/mechanism_sum_test.py::test_results_are_clipped_sums_plus_rows': (
            '*independent', '*tree', '*toeplitz', '*blt', '*banded_inverse'),
        'rules/following_clip_test.py::test_keras_and_query_are_the_formula_with_explicit_noise': (
            'slack-None',),
        'rules/grouped_test.py::'
        'test_keras_is_the_formula_with_explicit_noise_and_query_is_keras': (
            'groups2-names2',),
        'rules/identities_test.py::test_order_of_records_does_not_matter': (
            '!pasan*', '!pagan', '!noisy_adagrad-*'),
        'rules/rules_contract_test.py::test_graph_equals_eager_without_retracing': (
            'dp_sgd*', 'dp_adam_ime*', 'dp2_*', 'scale_then_privatize', 'dp_soap', 'noisy_adagrad',
            'pdp_sgd', 'pagan-ball', 'dp_muon', 'dp_adam_bc', 'low_pass*'),
        'queries/rule_query_test.py::test_graph_and_xla_equal_eager_without_noise': (
            'True-dp_sgd', 'True-dp_soap', 'True-scale_then_privatize', 'False-dp_adam_ime'),
    },
    LARGER: {
        'advice/budget_test.py::test_seconds_are_a_budget_too': (),
        'advice/budget_test.py::'
        'test_without_a_clear_step_the_largest_batch_of_enough_steps_is_proposed': (),
        'advice/choice_test.py::'
        'test_bins_and_gaps_are_chosen_where_draws_show_that_they_are_better': (),
        'advice/choice_test.py::test_no_factor_of_the_population_is_better': (),
        'noise/noise_distribute_test.py::test_replicas_have_the_noise_of_one_device': (),
        'clipping/layers_page_test.py::test_the_page_is_what_the_program_writes': (),
        'audit/own_models_test.py::test_a_right_model_passes_and_is_left_as_it_was': (),
        'cli/compare_test.py::test_tuning_takes_the_least_validation_loss_and_counts_its_runs': (),
        'clipping/bookkeeping_layers_test.py::test_in_functions': (),
        'clipping/bookkeeping_models_test.py::test_a_recurrent_layer_of_unknown_cells': (),
        'clipping/bookkeeping_restored_test.py::test_a_pass_that_breaks_off': (),
        'federated/tasks_test.py::test_stackoverflow_of_tff': (),
        'federated/workers_test.py::test_only_what_is_used_is_imported': (),
        'keras/matrix_rules_test.py::test_compiled_by_xla_equals_eager_training': (),
        'keras/explain_test.py::test_why_a_layer_goes_another_way': (),
        'queries/mechanism_conformance_test.py::GaussianTest::test_gaussian_sum_with_noise': (),
        'queries/mechanism_conformance_test.py::NestedTest::test_nested_query_with_noise': (),
    },
    PARTS: {
        'cli/compare_test.py::test_epsilon_is_what_the_noise_gives': (),
        'cli/federated_command_test.py::test_the_demo_has_both_parts_in_one_table': (),
        'cli/federated_command_test.py::test_workers_elsewhere_and_what_a_run_does_per_second': (),
        'cli/train_command_test.py::test_a_full_disk_loses_nothing': (),
        'cli/train_command_test.py::test_users_are_protected_by_their_examples': (),
        'faults/kill_test.py::test_fit_with_backups_survives_kills': (),
        'keras/distribute_test.py::'
        'test_a_plan_takes_the_steps_of_one_device_in_fit_and_in_a_loop': (),
        'cli/audit_command_test.py::test_a_private_run_is_consistent': (),
        'cli/audit_command_test.py::test_an_audit_that_can_prove_nothing_says_so': (),
        'cli/audit_command_test.py::test_training_without_noise_is_refuted': (),
        'cli/compare_test.py::test_every_method_is_in_the_table': (),
        'faults/kill_test.py::test_train_survives_kills_and_keeps_its_curve': (),
        'federated/resume_test.py::test_kill_9': (),
        'keras/distribute_test.py::test_what_mixes_examples_is_refused_before_replicas_see_it': (),
        'keras/multi_worker_kill_test.py::test_a_killed_run_goes_on_and_uses_no_noise_twice': (),
        'keras/multi_worker_kill_test.py::test_the_example_runs_by_the_lines_that_it_shows': (),
        'keras/multi_worker_test.py::'
        'test_every_record_takes_part_once_at_most_and_all_workers_agree': (),
        'keras/multi_worker_test.py::test_noise_is_drawn_once_for_all_workers': (),
    },
}
LEFT_OUT = {test: rows for tests in _BY_REASON.values() for test, rows in tests.items()}
