"""Tests that the default run leaves out beside those that are marked `slow`, by name, and what shows the same there.

Each costs many seconds of processor time. `make test-all` runs them.
"""

from __future__ import annotations

from collections import Counter

import pytest

_TRACED = (
    "attention-implementation",
    "attention-shape",
    "compile-not-traced",
    "costly-redistribution",
    "does-not-run",
    "equal-random",
    "fsdp-uneven",
    "fused-features",
    "half-sequence-parallel",
    "idle-rule",
    "large-root-unit",
    "lost-documents",
    "layout-mismatch",
    "left-out",
    "local-attention",
    "multi-hop-redistribution",
    "needs-whole",
    "optimizer-collectives",
    "precision-cast",
    "redundant-redistribution",
    "replicated-logits",
    "replicated-sum",
    "sequence-padded",
    "shadowed-rule",
    "sharded-logits",
    "small-fsdp-units",
    "tp-crosses-nodes",
    "unused-axis",
    "varying-gradient",
    "varying-loss",
    "wrong-loss",
)
"""Codes whose example runs a step: their checks have tests of their own, on smaller models."""

LEFT_OUT: dict[str, tuple[str, ...]] = {
    # The command and its mistakes stay in tests/commands/test_search.py, what each aim finds in test_aims.py.
    "tests/propose/search/test_run.py": (
        "test_ctrl_c_leaves_what_is_known",
        "test_a_found_preset_has_the_time_and_the_memory_that_plan_prints[2-within0]",
    ),
    # The parts of a traced step under each schedule stay.
    "tests/simulate/time/test_predict_pipeline.py": (
        "test_the_parts_of_a_traced_step_add_up[1f1b]",
        "test_stages_divide_the_operations_of_a_step_without_a_pipeline",
    ),
    # Ledger and memory of folded layers stay in test_stretch.py.
    "tests/simulate/record/test_time_line.py": (
        "test_products_in_float8_are_those_of_kernels_on_cuda_and_emulated_on_a_cpu[rowwise",
        "test_folding_equal_layers_changes_nothing[fsdp tp]",
    ),
    "tests/diagnostics/codes/test_all_codes.py": tuple(
        f"test_every_example_triggers_its_code_and_no_other_error[{code}]" for code in _TRACED
    ),
    # Every axis is in the cells that stay: tp2, fsdp2_tp2 and cp2 of the families, tp2, fsdp2 and hsdp2x2 of the Llamas.
    # Its parts have tests where the package has them.
    "tests/benchmarks/gpu/test_gpu.py": ("test_a_part_writes_tables_and_what_it_had_no_time_for",),
    "tests/diagnostics/test_interrupts.py": (
        "test_an_interrupted_import_is_no_traceback[recipes.train]",
        "test_an_interrupted_import_is_no_traceback[parallelizer]",
    ),
    "tests/test_no_gpu_at_import.py": ("test_a_module_that_did_would_be_found",),
    "tests/benchmarks/proofs/test_families.py": (
        "test_a_cell_is_proven[hf_gpt_neox on fsdp2_cp2_tp2, whole stream]",
        "test_a_cell_is_proven[hf_gpt2 on fsdp2_cp2_tp2]",
        "test_a_cell_is_proven[hf_gemma3_text on cp2_tp2]",
        "test_a_cell_is_proven[encoder_decoder_tiny on tp2, whole stream]",
        "test_a_cell_is_proven[hf_gemma2",
    ),
    "tests/benchmarks/proofs/test_matrix.py": (
        "test_models_and_presets_that_shrink_to_the_same_share_a_proof",
        "test_a_cell_is_proven[llama_debug, llama, tied embeddings on hsdp2x16_tp8]",
        "test_a_cell_is_proven[llama3_405b",
    ),
    "tests/commands/test_import_plan.py": (
        "test_it_is_a_plan_that_validates[cp2]",
        "test_it_is_a_plan_that_validates[tp2]",
        "test_it_is_a_plan_that_validates[fsdp2]",
        "test_it_is_a_plan_that_validates[single]",
        "test_rules_that_are_yours_are_not_compared",
        "test_a_rule_that_names_nothing_any_more_is_told",
        "test_what_differs_is_told_with_its_line",
        "test_a_plan_that_is_as_it_would_be_written_passes",
    ),
    "tests/commands/test_main.py": (
        "test_a_model_is_found_in_the_working_directory",
        "test_a_reader_who_has_gone_ends_a_command_quietly",
    ),
    "tests/commands/test_setup_options.py": ("test_a_folder_and_a_root_configuration_of_one_s_own",),
    "tests/commands/test_train.py": (
        "test_a_training_and_its_text_from_an_empty_folder",
        "test_a_mistake_is_told_as_the_recipe_tells_it",
    ),
    "tests/commands/test_validate.py": (
        "test_validate_says_that_a_plan_is_valid",
        "test_validate_in_json",
    ),
    "tests/commands/test_verify.py": (
        "test_a_proven_plan_exits_with_0_and_nothing_on_stderr",
        "test_a_wrong_plan_exits_with_1_and_shows_its_rule",
        "test_json_is_all_of_stdout",
        "test_ranks_that_fail_are_told_in_a_line",
    ),
    "tests/compiler/observe/test_equal_layers.py": ("test_a_shortened_model_keeps_the_ends",),
    "tests/configuration/test_old_paths.py": (
        "test_a_file_of_the_user_s_own_recipes_is_found_before",
        "test_where_there_are_no_recipes_they_are_found_too",
        "test_a_run_of_before_goes_on",
    ),
    # The same findings for every caller: shown for a wrong plan; without a mistake there is less to compare.
    "tests/configuration/test_validate.py": (
        "test_whoever_validates_finds_the_same[nothing]",
        "test_a_proof_comes_with_the_same_findings",
        "test_whoever_validates_finds_the_same[a gradient that nothing sums]",
    ),
    "tests/docs/test_checkpoints.py": (
        "test_a_person_can_kill_a_run_and_start_it_again_under_another_preset",
    ),
    "tests/docs/test_experts.py": ("test_its_plans_are_valid",),
    "tests/docs/test_examples.py": (
        "test_the_encoder_and_decoder_have_the_same_losses_on_one_rank_and_on_two",
    ),
    # These scripts have tests of their own.
    "tests/docs/test_figures.py": (
        "test_the_command_runs[tests.hugging_face.expert_survey]",
        "test_the_command_runs[benchmarks/pipeline_step_time.py]",
        "test_the_command_runs[benchmarks.clock]",
        "test_the_command_runs[benchmarks/any_size.py --clock]",
        "test_the_command_runs[benchmarks/step_time.py]",
        "test_the_command_runs[benchmarks/loading.py]",
        "test_the_command_runs[benchmarks/startup.py]",
        "test_the_command_runs[tests.init.survey]",
        "test_the_command_runs[tests.hugging_face.survey]",
        "test_the_command_runs[tests.hostile]",
        "test_the_command_runs[tests.silent]",
        "test_the_command_runs[benchmarks.ledger_truth]",
        "test_the_command_runs[benchmarks/any_size.py]",
        "test_the_command_runs[tests.styles.context_parallel.matrix]",
        "test_the_command_runs[benchmarks/validate_time.py]",
        "test_the_command_runs[tests.survival]",
        "test_the_command_runs[benchmarks/checkpoint.py]",
        "test_the_command_runs[benchmarks/live_view.py --comparison]",
        "test_the_command_runs[tests.proof.faults]",
        "test_the_command_runs[tests.proof.seeds]",
        "test_the_command_runs[benchmarks.proofs]",
        "test_the_command_runs[benchmarks.float8_families]",
        "test_the_command_runs[benchmarks.ledger_truth --only float8]",
        "test_the_command_runs[benchmarks.memory_truth --only float8]",
        "test_the_command_runs[benchmarks.proofs families]",
        "test_the_command_runs[benchmarks.proofs --full-mesh]",
    ),
    # One loop, the bare one, is compared with the recipe's losses in the default run, and one Fabric loop.
    "tests/docs/test_foreign_loops.py": (
        "test_the_script_runs_as_its_docstring_says",
        "test_the_trainer_accumulates_saves_and_goes_on_under_another_mesh",
        "test_the_loop_trains_alike_on_other_meshes",
        "test_the_loop_trains_to_the_losses_of_the_recipe",
        "test_evaluation_of_the_trainer_is_the_mean_over_rows_of_all_ranks",
    ),
    "tests/docs/test_generate.py": ("test_the_first_commands_write_a_text",),
    # Pages that train for half a minute. The README's commands and the page for beginners are in the default run.
    "tests/docs/test_in_ci.py": (
        "test_the_checks_of_every_push_say_what_is_shown",
        "test_the_longer_proofs_hold",
    ),
    "tests/docs/test_site.py": (
        "test_a_page_with_a_link_that_leads_nowhere_is_refused",
        "test_the_site_has_every_page",
        "test_nothing_is_fetched_and_every_file_that_pages_name_is_there",
    ),
    "tests/docs/test_watching.py": ("test_its_commands_leave_what_it_says",),
    "tests/docs/test_your_own_model.py": (
        "test_init_proposes_the_plan_that_is_shown",
        "test_the_command_does_what_is_shown",
    ),
    "tests/docs/test_foreign_model.py": ("test_the_command_does_what_is_shown",),
    "tests/styles/context_parallel/test_order.py": ("test_per_document_every_rank_sees_about_as_many_keys",),
    # Each refusal has a test where it is decided; this runs all attacks in one process.
    "tests/hostile/test_hostile.py": ("test_every_attack_is_refused_and_nothing_is_executed_opened_or_told",),
    "tests/hugging_face/test_build.py": ("test_nothing_but_json_is_printed_where_json_is_asked_for",),
    "tests/hugging_face/test_recipe.py": (
        "test_a_run_that_learns_nothing_saves_what_it_loaded",
        "test_a_model_that_came_from_no_folder_is_saved_for_from_pretrained",
    ),
    "tests/hugging_face/test_weights.py": ("test_a_folder_goes_through_every_mesh_and_comes_back_the_same",),
    "tests/mutation/test_judge.py": (
        "test_a_plan_that_compiles_to_the_same_is_not_run",
        "test_a_harmless_mutant_is_accepted_and_its_proof_kept",
        "test_a_harmful_mutant_is_refused",
    ),
    # A fault of each place stays: a rule, the data, the loss, the order of a sequence.
    "tests/proof/test_faults.py": (
        "test_a_planted_fault_is_found_placed_and_named[replicas of hsdp not summed]",
        "test_a_planted_fault_is_found_placed_and_named[another weight decay]",
        "test_a_planted_fault_is_found_placed_and_named[key heads of another rank]",
        "test_a_planted_fault_is_found_placed_and_named[key weights dealt out in the wrong order]",
        "test_a_planted_fault_is_found_placed_and_named[the gradient norm counts replicas]",
    ),
    # The cells of tests/benchmarks/proofs that stay are proofs of correct plans.
    "tests/proof/test_prove.py": (
        "test_float32_is_a_verdict_of_its_own_precision",
        "test_a_correct_plan_is_proven_and_nothing_differs",
        "test_the_cost_does_not_depend_on_the_real_size",
        "test_a_seed_raises_no_alarm",
        "test_the_document_of_a_failed_proof_is_as_documented",
        "test_bfloat16_is_information",
    ),
    "tests/proof/test_verify.py": (
        "test_validate_of_a_setup_is_the_command",
        "test_verify_is_the_command",
        "test_a_model_that_is_there_is_validated_under_a_plan_and_left_as_it_is",
    ),
    "tests/recipes/test_bad_input.py": ("test_the_command_says_what_validate_says",),
    "tests/recipes/test_generate.py": (
        "test_the_greedy_text_is_the_plain_model_s_under_every_preset",
        "test_a_seed_s_texts_are_the_same_on_other_ranks",
        "test_a_saved_model_comes_with_its_tokenizer_and_goes_on_under_any_preset",
    ),
    # A sweep over presets, which composes, starts and numbers its runs, stays.
    "tests/recipes/test_hydra.py": (
        "test_rules_come_behind_the_plan_s_own",
        "test_a_style_s_options_have_defaults_and_a_style_is_switched_off",
        "test_a_plan_by_name_by_path_and_from_a_folder_of_one_s_own",
        "test_one_folder_written_once_by_the_parent",
        "test_a_dry_run_prints_and_leaves_nothing",
        "test_a_layout_is_switched_everywhere",
        "test_a_job_that_fails_does_not_stop_a_sweep_and_is_not_forgotten",
        "test_paths_are_relative_to_where_the_command_runs",
    ),
    "tests/recipes/test_parity.py": ("test_losses_are_those_of_one_rank[fsdp2_cp2_tp2",),
    "tests/runtime/checkpoint/test_saving.py": (
        "test_a_rank_copies_only_what_it_writes_and_all_together_the_model_once",
    ),
    # Ranks of torchrun join in tests/runtime/launch/test_outside.py.
    "tests/recipes/test_torchrun.py": (
        "test_torchrun_runs_the_same_command",
        "test_the_rank_that_fails_says_why_and_the_one_that_lost_it_leaves_its_traceback_in_its_log",
    ),
    # A run that learns and one that is terminated stay.
    "tests/recipes/test_train.py": (
        "test_bfloat16_trains_close_to_float32[fsdp2_tp2]",
        "test_ctrl_c_before_the_first_step_leaves_no_folder",
        "test_a_panel_shows_the_run_in_its_place_and_stays_behind",
        "test_evaluation_changes_nothing",
        "test_ctrl_c_in_a_terminal_ends_every_rank",
    ),
    "tests/report/export/test_export.py": ("test_on_real_ranks_every_gradient_is_the_same_to_the_bit",),
    "tests/report/html/test_page.py": (
        "test_the_command_writes_the_page_and_says_when_it_cannot",
        "test_a_page_of_126_layers_is_under_400_kilobytes",
    ),
    "tests/report/test_lock.py": ("test_a_plan_is_as_locked_until_it_changes",),
    "tests/runtime/checkpoint/test_contents.py": (
        "test_every_number_is_written_by_one_rank_and_the_work_is_shared",
    ),
    # Presets go on from each other in tests/survival; one compiled step is compared in tests/styles.
    "tests/runtime/checkpoint/test_loading.py": (
        "test_every_mesh_reads_what_every_other_wrote_to_the_bit",
        "test_shared_frozen_packed_and_saved_tensors_are_among_them",
        "test_all_meshes_have_one_file_layout_of_whole_tensors_under_the_models_names",
        "test_torchs_own_tool_makes_one_file_of_it",
    ),
    "tests/runtime/test_redistribution.py": (
        "test_the_run_and_the_dry_run_take_the_path_that_the_preset_says",
    ),
    "tests/runtime/test_step.py": (
        "test_two_ranks_compute_what_one_does[tp2 llama]",
        "test_two_ranks_compute_what_one_does[tp2 llama_tp]",
    ),
    "tests/simulate/checks/test_traced_step.py": (
        "test_hops_over_several_axes_are_told_and_the_cheaper_order_with_its_price",
        "test_whole_logits_cost_what_the_step_gathers",
    ),
    "tests/simulate/checks/test_varying_gradient.py": (
        "test_what_is_named_is_what_a_proof_finds_wrong",
        "test_layers_that_are_not_followed_are_named_with_the_others",
    ),
    "tests/simulate/follow/test_whole.py": ("test_a_sequence_that_a_rule_splits_inside_is_followed_too",),
    "tests/simulate/record/test_ledger.py": (
        "test_weights_in_float8_travel_as_bytes_behind_one_reduction_of_their_largest_values",
        "test_real_ranks_send_entry_by_entry_what_is_predicted[float8 gathered fsdp2_tp2]",
        "test_gradients_travel_as_the_rule_for_fsdp_says_and_the_loss_and_the_norm_in_float32",
        "test_ulysses_inside_a_ring_sends_over_cp_what_is_predicted_and_the_closed_form_says",
        "test_an_optimizer_that_is_not_fused_sends_nothing_more",
    ),
    "tests/simulate/record/test_memory.py": (
        "test_every_phase_peaks_where_the_allocator_does[cp2_tp2 bf16 selective]",
        "test_a_stage_peaks_where_the_allocator_does[pp2_cp2 interleaved-1f1b last rank]",
        "test_a_rank_with_a_smaller_shard_needs_less",
        "test_every_phase_peaks_where_the_allocator_does[fsdp2_tp2 llama_tp bf16 checkpoint]",
        "test_what_lives_at_the_peak_adds_up_to_it",
    ),
    "tests/simulate/record/test_stretch.py": (
        "test_layers_that_differ_are_not_folded_or_in_runs[another rule for one layer]",
    ),
    "tests/simulate/record/test_trace_classes.py": (
        "test_ranks_that_hold_less_are_traced_as_themselves",
        "test_parts_of_a_sequence_differ_only_under_a_causal_mask",
    ),
    "tests/simulate/test_trace_failed.py": (
        "test_the_command_shows_the_diagnostic_alone_where_torch_logs_a_traceback",
        "test_of_folded_layers_it_names_the_one_in_the_whole_model",
    ),
    "tests/styles/context_parallel/test_compile.py": (
        "test_a_compiled_block_computes_the_same[all-gather]",
        "test_what_would_be_taken_twice_or_escape_is_refused",
    ),
    "tests/styles/context_parallel/test_flex.py": (
        "test_every_way_to_call_it_two_meshes_statistics_and_dtensors",
    ),
    "tests/styles/context_parallel/test_flex_models.py": (
        "test_a_window_beside_tensor_parallelism_is_proven",
        "test_a_window_and_a_learned_bias_are_proven",
        "test_a_mask_that_is_dropped_is_found",
    ),
    "tests/styles/test_compiled_layers.py": (
        "test_equal_layers_share_one_graph_in_watched_and_later_steps[tp2]",
        "test_equal_layers_share_one_graph_in_watched_and_later_steps[cp2 ring]",
    ),
    "tests/styles/test_unmodified.py": ("test_over_tp_and_fsdp",),
    # The checkpoints and the launcher have tests of each part: these kill whole runs.
    "tests/survival/test_survival.py": (
        "test_a_mixture_goes_on_with_its_experts_in_slices_and_back",
        "test_a_run_whose_ranks_are_killed_ends_as_if_they_had_not_been",
        "test_a_full_disk_costs_a_run_its_checkpoints_and_nothing_else",
        "test_presets_go_on_from_each_other",
        "test_damage_of_any_kind_is_found",
    ),
    "tests/child/test_children.py": ("test_a_child_computes_alone_whatever_threads_its_parent_has_used",),
    # New processes import torch anew. `test_a_new_process_answers_as_a_forked_one` stays.
    "tests/child/test_cuda_use.py": (
        "test_the_trace_and_the_findings_are_the_same",
        "test_the_verdict_is_the_same",
        "test_a_users_own_model_is_proven",
        "test_a_script_without_a_guard_is_told_of_it",
        "test_commands_and_the_recipe_ask_by_nvml_before_they_fork[plan]",
        "test_commands_and_the_recipe_ask_by_nvml_before_they_fork[validate]",
        "test_a_question_without_nvml_would_be_seen",
    ),
    "tests/test_mesh.py": ("test_a_foreign_mesh_trains_as_one_of_ours",),
    "tests/training/job/test_recipe_file.py": ("test_another_process_imports_it_from_its_module",),
    # A run that goes on to the bit stays; what is passed over, named and compared is in tests/runtime/checkpoint.
    "tests/training/keep/test_checkpoints.py": (
        "test_another_mesh_gives_the_same_losses_to_rounding",
        "test_it_goes_on_under_another_preset_and_says_so",
        "test_a_finished_run_says_so_and_changes_nothing",
        "test_a_damaged_newest_one_is_passed_over_and_a_named_one_refused",
        "test_what_begins_anew_goes_on_all_the_same_when_its_job_is_queued_again",
        "test_a_finished_run_that_saved_its_model_is_no_mistake_when_it_is_started_again",
        "test_what_differs_from_the_checkpoint_is_told_in_a_line",
        "test_a_run_starts_from_another_ones_output_folder_and_then_goes_on_with_its_own",
        "test_a_changed_text_stops_the_run_at_its_next_checkpoint",
        "test_what_does_not_fit_is_told_before_a_rank_starts",
    ),
    # The same command runs for one model in tests/docs/test_figures.py.
    "tests/benchmarks/test_float8_families.py": (
        "test_the_named_linears_are_cast_and_no_others[llama_debug]",
    ),
    # Another schedule, or another cell, of each stays.
    "tests/simulate/record/test_pipeline_step.py": (
        "test_real_ranks_send_what_is_planned[cell3]",
        "test_ranks_with_like_stages_have_the_peaks_of_their_own_traces",
        "test_checkpoints_of_a_stage_run_again_under_the_device_s_attention[interleaved-zero-bubble]",
    ),
    # The proof of stages beside `compile` stays.
    "tests/runtime/pipeline/test_other_styles.py": (
        "test_stages_beside_another_style_are_proven[compile]",
        "test_reshard_after_forward_says_how_often_a_stage_gathers[1f1b]",
    ),
    # Real ranks send what is planned in tests/simulate/record/test_pipeline_step.py.
    "tests/report/rows/test_messages.py": ("test_the_bytes_of_messages_are_those_of_the_residual_stream",),
    # Experts, an encoder and rows that kernels take stay.
    "tests/simulate/checks/test_float8_rows.py": (
        "test_options_under_which_the_rows_do_not_matter",
        "test_patches_and_a_class_token_are_no_sequence[cuda-fsdp2-195]",
    ),
    # A model of one's own goes from `init` to a proof in tests/docs/test_readme.py.
    "tests/commands/test_init.py": (
        "test_a_plan_that_the_model_config_names_and_that_is_not_there_is_written_and_validates",
    ),
    # Which kernel CUDA takes is decided in tests/styles and shown for masks here.
    "tests/simulate/record/test_cuda_attention.py": (
        "test_grouped_heads_hold_their_scores_on_cuda_in_float32_alone",
    ),
    # A rank under ring attention, compared with real ranks, stays.
    "tests/simulate/rehearse/test_rehearse.py": (
        "test_every_rank_of_a_pipeline_has_the_memory_and_collectives_that_were_planned[1f1b]",
        "test_the_last_of_many_ranks_has_finite_values_that_are_its_own",
        "test_collectives_of_compiled_layers_are_compared_too[fsdp2]",
    ),
    # One side is planned for it in the same file.
    "tests/configuration/test_hardware_device.py": ("test_both_sides_of_a_comparison_are_planned_for_it",),
    # The links of a GPU stay.
    "tests/configuration/test_step_time.py": (
        "test_a_processor_s_seconds_are_not_put_on_a_gpu_s_links",
        "test_the_computation_is_stretched_and_the_links_are_not",
        "test_one_rank_alone_takes_what_it_was_seen_to_take",
    ),
    # The mesh with `cp` alone stays.
    "tests/simulate/checks/test_local_attention.py": (
        "test_attention_without_context_parallelism_is_named[cp2_tp2]",
    ),
    # The other changes that make a plan fit stay.
    "tests/report/test_what_would_fit.py": ("test_a_pipeline_takes_more_microbatches",),
    # The estimate itself stays.
    "tests/proof/test_duration.py": ("test_a_slow_machine_takes_longer_and_is_told_of",),
    # Real ranks send what the given routing plans, in the same file.
    "tests/simulate/record/test_expert_ledger.py": (
        "test_a_selective_checkpoint_sends_no_row_twice[rule2-14]",
        "test_a_selective_checkpoint_sends_no_row_twice[rule1-6]",
        "test_another_routing_sends_other_bytes",
        "test_fsdp_gathers_experts_before_tokens_travel[dp_shard=4 ep=2]",
    ),
    # Another sibling that is left out stays.
    "tests/simulate/checks/test_left_out.py": (
        "test_a_sibling_that_is_left_out_is_told_at_the_glob[attention.w[qkv]-attention.w[kv]-attention.wq-attention.{wk,wv}]",
        "test_the_same_module_of_another_layer_comes_before_a_sibling",
    ),
    # Sums of other axes stay; real ranks send what is predicted for fsdp in tests/simulate/record/test_ledger.py.
    "tests/simulate/test_closed_forms.py": (
        "test_fsdp_and_hsdp",
        "test_context_parallelism[False]",
    ),
    # The other rows stay.
    "tests/report/rows/test_precision.py": (
        "test_inputs_that_are_cast_are_gathered_as_bytes_and_cast_once",
        "test_a_stage_s_casts_and_products_are_those_of_all_its_microbatches[1]",
    ),
    # A step with flex attention is followed and dry-run in the same file.
    "tests/compiler/observe/test_flex_attention.py": (
        "test_flex_attention_that_no_rule_names_is_said_to_see_local_rows",
    ),
    # The other size stays.
    "tests/simulate/checks/test_fused_features.py": (
        "test_a_fused_projection_that_is_not_packed_is_named[2]",
    ),
    # minGPT stays.
    "tests/propose/from_forward/test_as_written.py": (
        "test_nanogpt_counts_its_heads_by_the_width_of_its_input",
        "test_attention_with_a_bias_and_experts_in_a_list_are_split_and_proven[experts in a list]",
    ),
    # The aims `memory` and `time` stay.
    "tests/propose/search/test_aims.py": (
        "test_without_a_price_the_key_is_named",
        "test_for_cost_kinds_and_numbers_of_gpus_are_compared",
    ),
    # A table in a buffer stays.
    "tests/simulate/checks/test_missing_buffers.py": ("test_a_table_that_is_a_parameter_is_named",),
    # The page has the same beside each other.
    "tests/commands/test_rehearse.py": ("test_each_rank_is_shown_beside_what_was_predicted",),
    # Real ranks send what their routing says in tests/simulate/record/test_expert_ledger.py.
    "tests/report/rows/test_experts.py": ("test_bytes_and_peaks_are_those_of_the_routing",),
    "tests/commands/test_search_files.py": ("test_a_page_has_every_result_and_the_lock_is_that_of_plan",),
    "tests/benchmarks/proofs/test_precision.py": (
        "test_a_recipe_is_proven_wherever_it_can_be_used[llama_debug on rowwise on tp2]",
    ),
    "tests/training/watch/test_first_step.py": (
        "test_a_run_says_it_once_behind_its_first_step_and_a_resumed_one_too",
    ),
    "tests/training/watch/test_profiling.py": ("test_each_rank_leaves_a_trace_of_these_steps",),
    "tests/typos/test_typos.py": ("test_a_sample_of_typos_is_told",),
    "tests/wheel/test_life.py": ("test_from_nothing_to_a_sample",),
    "tests/styles/test_compiled_forward.py": ("test_a_compiled_step_computes_what_one_process_does",),
    "tests/docs/test_blocks.py": ("test_the_command_says_what_is_shown",),
    "tests/runtime/launch/test_launcher.py": ("test_spawned_ranks_as_on_cuda_behave_alike",),
    "tests/training/job/test_proof.py": ("test_a_run_whose_proof_fails_is_refused",),
    "tests/report/test_diff.py": ("test_the_command_compares_two_plans_under_the_same_overrides",),
    "tests/proof/test_locate.py": ("test_what_differs_behind_the_last_step_is_found",),
    "tests/styles/test_whole_parameters.py": ("test_mixed_precision_holds_for_them_too",),
    "tests/training/test_trackers.py": ("test_one_s_own_is_added_by_a_module_that_imports_names",),
    "tests/runtime/guards/test_drift.py": ("test_five_steps_raise_no_alarm",),
    "tests/proof/test_hard_cases.py": (
        "test_a_gradient_that_cancels_to_rounding_is_proven_and_hides_nothing",
    ),
    # Another case of each stays.
    "tests/benchmarks/proofs/test_pipelines.py": (
        "test_a_cell_is_proven[hf_llama_packed interleaved-1f1b on pp2]",
        "test_a_cell_is_proven[hf_gemma2 dualpipev on pp2]",
        "test_a_cell_is_proven[vit_tiny gpipe on pp2]",
    ),
    "tests/proof/test_validate.py": (
        "test_a_certificate_is_required_and_settles_what_a_check_is_not_sure_of[overrides1-needs-whole]",
    ),
    "tests/runtime/launch/test_lookout.py": (
        "test_a_rank_that_holds_the_others_up_is_named_with_its_stack_and_the_timeout_ends_it[stopped]",
    ),
    "tests/hugging_face/test_stages.py": (
        "test_a_folder_goes_through_stages_and_comes_back_the_same[pp2_tp2-phi3]",
    ),
    "tests/runtime/checkpoint/test_stages.py": (
        "test_any_layout_goes_on_from_any_other[tp2 pp2 plain]",
        "test_any_layout_goes_on_from_any_other[pp2 pp4 plain]",
    ),
    "tests/simulate/test_validate.py": (
        "test_a_sum_over_the_batch_is_an_error_where_ranks_have_rows_of_their_own[item]",
    ),
}
"""Names of tests by file: all cases of a function, or those whose id begins so."""

FIRST: dict[str, dict[str, int]] = {
    "tests/hugging_face/test_own_loop.py": {"test_loss_and_gradients_are_those_of_one_process": 2},
    "tests/simulate/test_validate.py": {"test_what_fake_tensors_cannot_do_is_no_mistake": 2},
    "tests/proof/test_prove.py": {"test_biases_and_packed_parts_are_proven": 1},
    "tests/configuration/test_compose.py": {"test_rules_are_added_on_the_command_line": 4},
    "tests/child/test_children.py": {"test_a_model_is_left_as_it_was_though_layers_are_folded": 1},
    "tests/simulate/checks/test_varying_gradient.py": {"test_the_right_kind_of_gradient_is_accepted": 1},
    "tests/recipes/test_generate.py": {"test_what_cannot_be_is_refused_before_a_rank_starts": 5},
    "tests/configuration/test_override_mistakes.py": {
        "test_an_override_that_does_not_parse_is_shown_in_the_right_quotes": 5
    },
    "tests/proof/test_documents.py": {"test_a_wrong_mask_is_found_and_the_order_is_known_where_it_can_be": 1},
    "tests/training/job/test_slurm_jobs.py": {"test_a_sweep_that_cannot_be_submitted": 1},
    "tests/simulate/test_trace_failed.py": {"test_it_names_the_module_the_operator_and_the_expression": 3},
    "tests/docs/test_data.py": {"test_a_run_of_the_page_trains": 1},
    "tests/test_plans.py": {
        "test_every_mistake_on_a_model_is_found_in_its_columns_and_nothing_else": 40,
        "test_every_mistake_of_a_preset_is_found_in_its_columns_and_nothing_else": 13,
        "test_good_plans_pass_without_an_error_or_a_warning": 10,
    },
    "tests/benchmarks/proofs/test_families.py": {"test_a_cell_is_proven": 1},
    "tests/benchmarks/proofs/test_matrix.py": {"test_a_cell_is_proven": 1},
    "tests/compiler/observe/test_flex_attention.py": {"test_a_step_is_followed_and_dry_run": 1},
    "tests/configuration/test_compose_mistakes.py": {
        "test_an_override_that_is_wrong_is_marked_and_corrected": 10
    },
    "tests/configuration/test_origins.py": {
        "test_the_narrowest_place_wins": 5,
        "test_what_is_written_anew_at_the_place_of_a_key_becomes_its_value": 1,
        "test_the_text_at_the_place_of_a_key_is_its_value": 5,
        "test_the_parts_of_a_value_keep_their_places": 5,
    },
    "tests/docs/test_styles.py": {"test_what_moves_is_what_the_dry_run_reports": 3},
    "tests/language/schema/test_schema.py": {
        "test_schema_and_reader_judge_a_preset_alike": 6,
        "test_schema_and_parser_judge_every_option_alike": 20,
    },
    "tests/proof/test_faults.py": {"test_a_planted_fault_is_found_placed_and_named": 1},
    "tests/recipes/test_bad_input.py": {"test_one_message_and_nothing_left": 8},
    "tests/recipes/test_parity.py": {"test_losses_are_those_of_one_rank": 1},
    "tests/recipes/test_torchrun.py": {"test_one_message_of_all_ranks": 3},
    "tests/report/export/test_export.py": {
        "test_a_shipped_plan_places_and_sends_the_same": 1,
        "test_other_modules_place_and_send_the_same": 2,
        "test_other_styles_place_and_send_the_same": 2,
    },
    "tests/report/test_rendered.py": {"test_findings_on_a_model": 7},
    "tests/runtime/launch/test_launcher.py": {
        "test_a_signal_ends_every_rank_without_noise": 1,
        "test_ctrl_c_while_ranks_are_being_started_leaves_none": 3,
    },
    "tests/simulate/checks/test_followed_step.py": {
        "test_a_wrong_layout_is_refused_where_it_is_written": 2,
        "test_every_shipped_plan_is_clean_on_every_preset": 1,
        "test_other_ways_to_write_the_same_are_clean": 1,
    },
    "tests/simulate/checks/test_left_out.py": {"test_a_sibling_that_is_left_out_is_told_at_the_glob": 1},
    "tests/simulate/checks/test_traced_step.py": {"test_the_shipped_plans_waste_nothing": 1},
    "tests/simulate/follow/test_attention_shapes.py": {
        "test_both_kinds_of_attention_are_seen_with_and_without_context_parallelism": 1,
        "test_heads_that_a_forward_reads_and_nobody_divides": 1,
    },
    "tests/simulate/follow/test_whole.py": {
        "test_behind_what_is_split_over_tp_the_sequence_is_still_split": 3,
        "test_what_each_rank_may_do_to_its_part_is_not": 3,
        "test_what_needs_the_whole_is_refused_at_its_line": 6,
        "test_what_one_module_gathers_over_both_axes_is_whole": 1,
        "test_over_both_axes_too_what_is_right_passes": 1,
    },
    "tests/simulate/record/test_ledger.py": {"test_each_entry_has_its_module_and_its_rule_in_order": 1},
    "tests/simulate/record/test_planned.py": {"test_they_are_those_of_the_closed_form_of_palm": 1},
    "tests/simulate/test_closed_forms.py": {
        "test_context_parallelism": 1,
        "test_tensor_and_sequence_parallelism": 1,
    },
    "tests/styles/context_parallel/test_attention.py": {"test_shapes_propagate_on_a_fake_world": 1},
    "tests/training/test_settings.py": {"test_values_of_no_use": 8},
}
"""How many cases of a function the default run has, in the order of the file: those behind differ in numbers or names
alone, and each runs a step or composes a configuration.
"""


def mark(items: list[pytest.Item]) -> None:
    """Mark them `slow`."""
    seen: Counter[tuple[str, str]] = Counter()
    for item in items:
        file, _, name = item.nodeid.partition("::")
        function = name.partition("[")[0]
        names = LEFT_OUT.get(file, ())
        if any(name == one or name.startswith(one if "[" in one else f"{one}[") for one in names):
            item.add_marker(pytest.mark.slow)
        elif not item.get_closest_marker("slow"):
            seen[file, function] += 1
            if seen[file, function] > FIRST.get(file, {}).get(function, seen[file, function]):
                item.add_marker(pytest.mark.slow)
