# SPDX-License-Identifier: Apache-2.0
"""Tests that `make test` leaves out and `.ci/run` runs, with the reasons.

`LEFT_OUT` maps a test to the rows of its table that still run (`*` stands for anything), or, with
`!`, to the rows that do not. Without rows, the whole test is left out. A test that alone notices a
bug of `tests/mutants` must not be left out.
"""

ROWS_SHARE_CODE = 'The rows share all code; those kept differ in kind.'
LARGER = 'A smaller test in the same file or room notices the same.'
DEAR = ('It costs more than two seconds, and without it the others still notice every '
        'planted bug.')
PARTS = 'The parts are tested one by one; this runs them together, in processes of their own.'

_BY_REASON = {
    ROWS_SHARE_CODE: {
        'accounting/schemes_test.py::test_a_second_accountant_says_the_same': (
            '!PoissonExamples*',),
        'audit/white_box_test.py::test_planted_bugs_are_caught': (
            'DPSGD', 'DPAdamIME', 'DPAdamSTP', 'DP2Yogi'),
        'audit/white_box_test.py::test_correlated_noise_is_compared_with_its_mechanism': (
            'mechanism0',),
        'audit/gradient_canaries_test.py::'
        'test_the_difference_is_what_a_plan_without_amplification_accounts_for': (
            'tree', 'replace'),
        'clipping/bookkeeping_generic_test.py::test_layers_with_weights': ('!RNN', '!ConvLSTM*'),
        'clipping/bookkeeping_models_test.py::test_recurrent_dropout': ('layer0', 'layer3'),
        'clipping/bookkeeping_numbers_test.py::test_every_route': ('gram', 'ragged blocks'),
        'clipping/bookkeeping_numbers_test.py::test_no_record_exceeds_the_clip_norm': (
            '*-1e-20-*', '*-1.0-1e-30', 'True-1.0-*', 'False-1.0-1e+18', 'False-1.0-1e-30'),
        'clipping/magnitudes_test.py::test_book_keeping': (
            'rank one', 'explicit', 'embedding', 'generic', 'blocks'),
        'clipping/out_of_range_test.py::test_tables_that_are_not_trained_and_ids_of_other_types': (
            '_frozen-int32-7', '_frozen-float32-nan'),
        'federated/processes_test.py::test_equals_the_query_and_the_rule_by_hand': (
            'in_process-*', 'tff-two releases'),
        'federated/silo_test.py::'
        'test_rounds_are_one_fit_with_the_same_weights_passed_through': ('correlated',),
        'keras/semantics_test.py::test_a_gradient_inside_call_is_that_of_a_tape': ('False',),
        'keras/semantics_test.py::test_fit_and_evaluate_report_what_keras_reports': (
            'masked', 'weighted', 'heads'),
        'keras/structures_test.py::test_losses_in_the_structure_of_the_outputs': ('False',),
        'keras/structures_test.py::test_a_loss_of_several_outputs_beside_losses_of_each': ('None',),
        'independence/honest_models_test.py::test_honest_models_pass_without_any_difference': (
            '!an LSTM that drops', '!a GRU both ways'),
        'keras/docstring_examples_test.py::test_the_example_trains_all_steps': (
            'DPKFC', 'NoisyAdaGrad'),
        'keras/matrix_rules_test.py::'
        'test_saved_in_the_middle_and_loaded_equals_training_at_a_stretch': ('DPSOAP', 'DPMuon'),
        'keras/mechanisms_test.py::test_noise_is_correlated_as_designed_also_over_a_resume': (
            'blt', 'banded'),
        'noise/noise_streams_test.py::test_a_checkpoint_resumes_bit_for_bit': (
            'tree', 'blt', 'toeplitz', 'independent', 'banded_inverse'),
        'noise/noise_streams_test.py::test_no_noise_value_occurs_twice': (
            'tree', 'blt', 'toeplitz', 'independent', 'column_normalized'),
        'noise/noise_streams_test.py::'
        'test_a_restored_state_with_a_fresh_key_continues_with_new_noise': (
            'tree*', 'blt', 'toeplitz', 'independent', 'column_normalized'),
        'rules/rules_contract_test.py::test_xla_equals_eager_without_retracing': (
            'dp_sgd*', 'dp_adam_ime*', 'dp2_*', 'scale_then_privatize', 'dp_soap',
            'noisy_adagrad', 'pdp_sgd', 'pagan-ball', 'dp_muon', 'dp_adam_bc'),
        'queries/mechanism_federated_test.py::test_rounds_are_means_plus_rows': (
            'tree', 'independent', 'toeplitz', 'blt'),
        'queries/mechanism_sum_test.py::test_results_are_clipped_sums_plus_rows': (
            '*independent', '*tree', '*toeplitz', '*blt', '*banded_inverse'),
        'rules/following_clip_test.py::test_keras_and_query_are_the_formula_with_explicit_noise': (
            'slack-None',),
        'rules/grouped_test.py::test_keras_is_the_formula_with_explicit_noise_and_query_is_keras': (
            'groups2-names2',),
        'rules/identities_test.py::test_order_of_records_does_not_matter': (
            '!pasan*', '!pagan', '!noisy_adagrad-*'),
        'queries/rule_query_test.py::test_graph_and_xla_equal_eager_without_noise': (
            'True-dp_sgd', 'True-dp_soap', 'True-scale_then_privatize', 'False-dp_adam_ime'),
    },
    LARGER: {
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
        'keras/matrix_rules_test.py::test_compiled_by_xla_equals_eager_training': (),
        'keras/explain_test.py::test_why_a_layer_goes_another_way': (),
        'queries/mechanism_conformance_test.py::GaussianTest::test_gaussian_sum_with_noise': (),
        'queries/mechanism_conformance_test.py::NestedTest::test_nested_query_with_noise': (),
    },
    PARTS: {
        'cli/compare_test.py::test_epsilon_is_what_the_noise_gives': (),
        'cli/federated_command_test.py::test_the_demo_has_both_parts_in_one_table': (),
        'faults/kill_test.py::test_fit_with_backups_survives_kills': (),
        'keras/distribute_test.py::'
        'test_a_plan_takes_the_steps_of_one_device_in_fit_and_in_a_loop': (),
        'cli/audit_command_test.py::test_a_private_run_is_consistent': (),
        'cli/audit_command_test.py::test_an_audit_that_can_prove_nothing_says_so': (),
        'cli/audit_command_test.py::test_training_without_noise_is_refuted': (),
        'cli/compare_test.py::test_every_method_is_in_the_table': (),
        'federated/resume_test.py::test_kill_9': (),
        'keras/distribute_test.py::test_what_mixes_examples_is_refused_before_replicas_see_it': (),
        'keras/multi_worker_kill_test.py::test_a_killed_run_goes_on_and_uses_no_noise_twice': (),
        'keras/multi_worker_kill_test.py::test_the_example_runs_by_the_lines_that_it_shows': (),
        'keras/multi_worker_test.py::'
        'test_every_record_takes_part_once_at_most_and_all_workers_agree': (),
        'keras/multi_worker_test.py::test_noise_is_drawn_once_for_all_workers': (),
    },
    DEAR: {
        'accounting/accounting_test.py::test_calibrated_plans_keep_to_the_target': (),
        'accounting/composition_test.py::test_a_calibration_takes_few_transforms': (
            '!0.0001-100000-0.01',),
        'accounting/composition_test.py::test_calibration_to_extreme_targets': ('!1e-09-1e-05',),
        'accounting/composition_test.py::'
        'test_epsilon_is_never_below_the_truth_and_at_most_a_percent_above': ('!3',),
        'accounting/composition_test.py::test_one_step_at_any_delta': ('!1e-06-0.4-1e-08',),
        'accounting/composition_test.py::test_very_long_runs_are_answered': (),
        'accounting/schemes_test.py::test_delta_is_never_below_the_truth_and_hardly_above': (
            '!0.3-*', "!1.0-PoissonExamples(sampling_probability*it': 'user'}"),
        'advice/choice_test.py::test_the_chosen_plan_keeps_epsilon_and_has_less_error': (),
        'advice/recommendation_test.py::test_the_same_seed_gives_the_same_answer': (),
        'advice/recommendation_test.py::test_code_trains_what_is_proposed': (),
        'advice/recommendation_test.py::test_an_interrupted_search_gives_the_best_so_far': (),
        'advice/recommendation_test.py::test_tokens_and_several_inputs_are_tried_as_given': (),
        'advice/recommendation_test.py::'
        'test_a_frozen_base_is_computed_once_and_its_features_are_scaled': (),
        'audit/bounds_test.py::test_attempts_prove_more_than_others': (),
        'audit/canaries_test.py::'
        'test_one_call_audit_finds_what_a_model_with_little_noise_remembers': (),
        'audit/canaries_test.py::test_one_call_audit_of_much_noise_finds_little': (),
        'audit/own_models_test.py::test_bugs_are_caught': (),
        'audit/own_models_test.py::test_data_in_penalties_end_in_a_verdict': (),
        'audit/own_models_test.py::test_mistakes_beside_the_private_step_are_caught': (),
        'audit/planted_sizes_test.py::test_a_tail_that_is_cut_is_seen': (),
        'audit/planted_sizes_test.py::test_every_size_ends_with_status_3': (
            '!noise times 0', '!noise times 0.7', '!noise times inf'),
        'audit/planted_sizes_test.py::test_the_noise_of_what_rides_along_is_seen_under_replace': (),
        'audit/planted_sizes_test.py::test_what_follows_may_be_set_by_the_command_line': (),
        'audit/shadow_models_test.py::test_a_keras_model_that_learns_by_heart_is_found': (),
        'audit/white_box_test.py::test_a_correct_class_is_not_refuted': ('DPSGD', 'DPAdamIME'),
        'audit/white_box_test.py::test_a_plan_of_users_by_the_command_line': (),
        'audit/white_box_test.py::test_queries_are_audited_and_their_bugs_caught': (),
        'audit/white_box_test.py::test_what_cannot_be_audited_is_refused': (),
        'audit/white_box_test.py::'
        'test_what_claims_nothing_is_not_refuted_unless_a_claim_is_made': (),
        'cli/audit_command_test.py::test_too_many_canaries': (),
        'cli/compare_test.py::test_files_and_their_paths': (),
        'cli/federated_command_test.py::test_a_run_that_lost_its_worker_goes_on': (),
        'cli/federated_command_test.py::'
        'test_an_unfinished_run_goes_on_as_it_was_begun_or_not_at_all': (),
        'cli/mechanism_command_test.py::test_numbers_are_the_mechanisms_own': (),
        'cli/robust_command_test.py::test_an_interrupt_at_any_moment_ends_in_one_line': (),
        'cli/robust_command_test.py::test_help_and_wrong_arguments_do_not_wait_for_libraries': (),
        'cli/robust_command_test.py::test_output_that_cannot_be_written': (),
        'cli/white_box_command_test.py::test_json_without_a_guarantee': (),
        'clipping/bookkeeping_forward_test.py::test_expressions_of_models_that_draw': (),
        'clipping/bookkeeping_forward_test.py::test_results': (
            'towers-mixed_float16', 'reversible-float32'),
        'clipping/bookkeeping_layers_test.py::test_every_registered_kind_is_in_some_table': (),
        'clipping/bookkeeping_layers_test.py::test_precisions': (
            'float64-images', 'mixed_float16-sequences'),
        'clipping/bookkeeping_numbers_test.py::test_mixed_precision': (),
        'clipping/bookkeeping_numbers_test.py::test_sizes_known_only_at_run_time': (),
        'clipping/bookkeeping_numbers_test.py::test_squares_that_overflow': ('False-mlp',),
        'clipping/bookkeeping_random_test.py::test_random_models': (),
        'clipping/bookkeeping_restored_test.py::test_another_thread_takes_turns': (),
        'clipping/bookkeeping_test.py::test_dense_in_a_function': (),
        'clipping/bookkeeping_test.py::test_encoder_and_decoder': (),
        'clipping/bookkeeping_test.py::test_recurrent': ('lstm', 'gru', 'gru reset before'),
        'clipping/bookkeeping_test.py::test_recurrent_with_a_mask': ('<lambda>0',),
        'clipping/layered_test.py::test_compiled': (),
        'clipping/layered_test.py::test_sums_are_those_of_single_records': ('!512',),
        'clipping/losses_test.py::test_losses_that_compare_examples_get_them_one_at_a_time': (
            '!contrastive-y0', '!<lambda>-y1'),
        'clipping/losses_test.py::test_no_loss_of_keras_lets_an_example_change_another': (
            '!squared_hinge',),
        'clipping/magnitudes_test.py::test_other_engines': ('rank one-layered', 'rank one-loop'),
        'clipping/materialized_test.py::test_sums_are_those_of_batches_of_one': (
            'dense-looped-1-scaled', 'per_step-*'),
        'clipping/out_of_range_test.py::test_a_table_may_be_asked_for_constants': (),
        'clipping/out_of_range_test.py::test_the_record_counts_as_none': ('!-1-id-materialized',),
        'clipping/out_of_range_test.py::test_training_goes_on_and_counts_them': (),
        'clipping/projection_test.py::test_xla_and_vectorized': (),
        'clipping/record_weights_test.py::test_never_above_the_clip_norm': (),
        'clipping/second_moments_test.py::'
        'test_every_other_kind_of_layer_has_sides_of_its_shape': (),
        'clipping/users_test.py::test_sums_are_those_of_users_one_by_one': (),
        'recipes_test.py::test_recipe_prints_the_rows_of_its_page': ('frozen_features', 'users'),
        'documents_test.py::test_examples_run_one_after_the_other': (
            'README.md', 'docs/guides/training.md', 'docs/guides/users.md'),
        'entropy_test.py::test_secrets_depend_on_the_test_alone': (),
        'estimates/adapt_test.py::test_adapted_layers_are_named': (),
        'examples/corpus_test.py::test_real_files': (),
        'examples/showcases_test.py::test_what_is_reported_is_within_epsilon': (),
        'federated/engines_test.py::test_a_round_is_the_same_in_process_and_in_tff': (),
        'federated/engines_test.py::test_a_run_goes_on_in_the_other_engine': (),
        'federated/engines_test.py::test_a_run_is_the_same_in_every_engine': ('flower-*',),
        'federated/federated_card_test.py::test_the_card_of_a_simulation_is_what_was_run': (),
        'federated/groups_test.py::test_groups_give_what_clients_give_one_by_one': (
            '!functional', '!gradients', '!momentum, scaled, weighted', '!normalization',
            '!remembering'),
        'federated/identity_test.py::'
        'test_descriptions_differ_and_are_the_same_in_another_process': (),
        'federated/processes_test.py::test_equals_numpy_over_user_deltas': ('in_process-*',),
        'federated/processes_test.py::test_federated_sgd_answers_with_the_gradient': ('!tff',),
        'federated/processes_test.py::'
        'test_nothing_exact_about_the_clients_comes_out_unless_asked_for': ('!tff',),
        'federated/resume_test.py::test_a_run_that_was_cut_off_ends_like_one_that_was_not': (
            '!clients',),
        'federated/rounds_test.py::test_calls_and_workers_do_not_change_the_sum': ('!tff',),
        'federated/simulation_test.py::test_simulate_is_the_process_on_the_cohorts_of_the_plan': (
            '!tff',),
        'federated/simulation_test.py::test_the_ledger_goes_from_users_to_keras_and_back': (),
        'federated/tasks_test.py::test_next_word': (),
        'federated/tasks_test.py::test_stackoverflow': (),
        'federated/tasks_test.py::test_tag_prediction': (),
        'faults/silo_kill_test.py::test_a_silo_that_is_killed_again_and_again': (),
        'federated/silo_test.py::test_the_learning_rate_is_that_of_the_round': (),
        'federated/silo_test.py::test_what_the_weights_cost_before_is_counted_once': (),
        'federated/tff_process_test.py::test_a_functional_model_gives_the_same_weights': (),
        'federated/tff_process_test.py::test_whoever_reads_the_output_sees_its_end': (),
        'federated/tff_process_test.py::test_the_query_works_in_tffs_own_factory': (),
        'federated/user_sources_test.py::test_a_hundred_thousand_users_need_no_memory': (),
        'keras/batch_validation_test.py::test_a_batch_of_another_plan_is_refused': (),
        'keras/batch_validation_test.py::test_after_a_refusal_the_same_model_trains': ('!False',),
        'keras/batch_validation_test.py::test_batches_are_taken_once_and_in_their_order': (),
        'keras/batch_validation_test.py::'
        'test_rows_of_a_batch_are_taken_once_and_in_their_place': (),
        'keras/batch_validation_test.py::'
        'test_two_models_and_a_second_optimizer_on_one_plan_each_keep_it': (),
        'keras/agreement_test.py::test_keras_equals_the_query': ('DP2Yogi', 'DPAdamJME'),
        'keras/agreement_test.py::test_large_models_take_the_same_steps_in_one_pass': (),
        'keras/autograph_test.py::test_layers_of_users_alone_are_rewritten': (),
        'keras/callbacks_test.py::test_backups_are_of_one_plan_and_one_process': (),
        'keras/classes_test.py::test_fits_and_resumes_mid_phase': (
            'DPSGD', 'DPAdamIME', 'DP2Yogi', 'NoisyAdaGrad'),
        'keras/classes_test.py::test_public_data_as_function_and_data_set': (),
        'keras/diagnostics_test.py::test_numbers_of_a_step': ('!materialized-1',),
        'keras/explain_test.py::test_after_training_open_axes_are_those_that_were_trained_on': (),
        'keras/features_test.py::test_learning_rate_schedule_weight_decay_and_constraints': (),
        'keras/features_test.py::'
        'test_make_private_shares_weights_and_takes_every_kind_of_model': (),
        'keras/features_test.py::test_mixed_precision_clips_and_adds_noise_in_float32': (
            'auto-mixed_float16',),
        'keras/features_test.py::test_moving_average_of_keras': (),
        'keras/features_test.py::test_nothing_is_written_where_data_end': (),
        'keras/features_test.py::test_one_trace_serves_all_steps': ('!True',),
        'keras/features_test.py::test_regularizers_are_added_after_the_noise_and_not_clipped': (),
        'keras/features_test.py::test_sample_weights_scale_the_loss_before_clipping': (),
        'keras/features_test.py::test_several_inputs_and_outputs_with_loss_weights': (),
        'keras/features_test.py::test_subclassed_models_callbacks_metrics_and_validation': (),
        'keras/features_test.py::test_weights_only_and_checkpoint_files_resume': (),
        'keras/features_test.py::'
        'test_weights_that_are_not_trained_may_come_first_also_in_a_saved_model': (),
        'keras/formulas_test.py::test_without_noise_it_is_the_formula': ('*-graph', 'adam-eager'),
        'keras/habits_test.py::test_a_functional_model_keeps_its_structure': (),
        'keras/habits_test.py::test_a_layer_frozen_after_compile_is_not_trained': (),
        'keras/habits_test.py::test_strings_are_split_into_words_in_the_model': (),
        'keras/history_test.py::test_a_run_without_plan_leaves_no_epsilon': (),
        'keras/history_test.py::test_files_carry_it': (),
        'keras/history_test.py::test_spent_is_less_than_planned': (),
        'keras/history_test.py::test_wrapping_again_or_sharing_a_layer_hides_nothing': (),
        'keras/ledger_everywhere_test.py::test_exactly_what_was_spent_is_stated': (
            '!a file of another run', '!a run that goes on', '!checkpoints', '!two optimizers'),
        'keras/ledger_everywhere_test.py::test_no_way_around_the_ledger': (),
        'keras/memory_budget_test.py::test_eager_steps_estimate_once_for_every_kind_of_batch': (),
        'keras/memory_budget_test.py::test_steps_are_those_of_the_whole_batch': (),
        'keras/memory_budget_test.py::test_too_small_a_budget_names_what_is_needed': (),
        'keras/misuse_test.py::test_more_steps_than_planned_are_refused': ('!2',),
        'keras/misuse_test.py::test_time_is_not_taken_for_the_batch_by_the_probes': (),
        'keras/noise_test.py::test_a_seeded_resume_is_exact': (),
        'keras/padding_test.py::test_fit_learns_without_padding_what_it_learns_with_it': (),
        'keras/padding_test.py::test_nothing_is_traced_after_the_first_epoch': (),
        'keras/privacy_card_test.py::test_a_model_its_optimizer_and_its_report_say_one_thing': (),
        'keras/privacy_card_test.py::test_verify_knows_the_file_of_the_model_and_no_other': (),
        'keras/secret_patterns_test.py::test_backups_go_on_with_the_coins_of_the_run': (),
        'keras/users_in_fit_test.py::test_users_with_one_example_are_examples': (),
        'keras/users_in_fit_test.py::test_what_is_no_batch_of_users_is_refused': (),
        'keras/views_test.py::test_a_run_goes_on_with_its_views_after_it_was_saved': (),
        'keras/views_test.py::test_equal_views_are_the_plain_step': ('example-chunks',),
        'keras/views_test.py::'
        'test_one_example_moves_the_sum_by_one_clip_norm_whatever_its_views': (),
        'keras/views_test.py::test_the_mean_of_the_views_is_clipped': ('bookkeeping',),
        'keras/views_test.py::test_users_with_views': ('mean',),
        'keras/ways_out_test.py::test_a_step_of_ones_own_needs_an_audit': (),
        'keras/ways_out_test.py::test_data_inside_what_a_step_calls': (
            '!bias_regularizer', '!kernel_constraint', '!kernel_regularizer'),
        'mechanisms/golden_values_test.py::test_table_of_one_participation': ('!2000',),
        'mechanisms/mechanism_registry_test.py::'
        'test_a_mechanism_without_a_noise_stream_cannot_be_imported': (),
        'noise/noise_streams_test.py::test_noise_cancels_across_the_border_of_xla': ('!tree',),
        'noise/noise_streams_test.py::test_rows_are_the_noising_matrix_times_z': (
            'eager-*', 'passes-*', 'graph-independent', 'xla-blt', 'xla-banded_inverse'),
        'report/card_test.py::test_a_damaged_card_is_refused_or_read_never_a_defect': (),
        'report/card_test.py::test_every_plan_has_a_card_that_a_second_accountant_confirms': (
            '!one bin', '!truncated', "!users' examples"),
        'privatizer_test.py::test_the_budget_ends_with_the_plan_or_the_mechanism': (
            '!None-mechanism1-4',),
        'public_names_test.py::test_a_new_process_loads_models_without_naming_their_classes': (),
        'rules/following_groups_test.py::test_every_engine_adds_up_the_same_numbers': ('!slack',),
        'rules/following_groups_test.py::'
        'test_keras_and_query_are_the_formula_with_explicit_noise': (),
        'rules/kronecker_rules_test.py::test_the_same_compiled': ('!False',),
        'rules/muon_test.py::test_without_noise_it_is_the_muon_of_keras': (),
        'rules/partitions_test.py::test_keras_and_query_are_the_formula_with_explicit_noise': (),
        'rules/rules_contract_test.py::test_graph_equals_eager_without_retracing': (
            'dp_sgd*', 'dp_adam_ime*', 'dp2_*', 'scale_then_privatize', 'noisy_adagrad',
            'pdp_sgd', 'pagan-ball', 'dp_muon', 'dp_adam_bc'),
        'tuning_test.py::test_the_best_of_the_drawn_runs_is_returned_with_the_cost_of_all': (),
    },
}
LEFT_OUT = {test: rows for tests in _BY_REASON.values() for test, rows in tests.items()}
