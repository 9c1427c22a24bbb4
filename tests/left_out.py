"""Tests that the default run leaves out beside those that are marked `slow`, by name, and what shows the same there.

Each costs many seconds of processor time. `make test-all` runs them.
"""

from __future__ import annotations

import pytest

LEFT_OUT: dict[str, tuple[str, ...]] = {
    # Pages that train for half a minute. The README's commands and the page for beginners are in the default run.
    "tests/docs/test_in_ci.py": (
        "test_the_checks_of_every_push_say_what_is_shown",
        "test_the_longer_proofs_hold",
    ),
    "tests/docs/test_checkpoints.py": (
        "test_a_person_can_kill_a_run_and_start_it_again_under_another_preset",
    ),
    "tests/docs/test_watching.py": ("test_its_commands_leave_what_it_says",),
    "tests/docs/test_examples.py": (
        "test_the_encoder_and_decoder_have_the_same_losses_on_one_rank_and_on_two",
    ),
    "tests/docs/test_generate.py": ("test_the_first_commands_write_a_text",),
    "tests/docs/test_your_own_model.py": ("test_init_proposes_the_plan_that_is_shown",),
    # One loop, the bare one, is compared with the recipe's losses in the default run, and one Fabric loop.
    "tests/docs/test_foreign_loops.py": (
        "test_the_script_runs_as_its_docstring_says",
        "test_the_trainer_accumulates_saves_and_goes_on_under_another_mesh",
        "test_the_loop_trains_to_the_losses_of_the_recipe[hf_trainer-axes1]",
        "test_the_loop_trains_alike_on_other_meshes",
    ),
    # These scripts have tests of their own.
    "tests/docs/test_figures.py": (
        "test_the_command_runs[benchmarks/loading.py]",
        "test_the_command_runs[benchmarks/startup.py]",
        "test_the_command_runs[tests.init.survey]",
        "test_the_command_runs[tests.hugging_face.survey]",
        "test_the_command_runs[tests.hostile]",
    ),
    # The same findings for every caller: shown for a wrong plan; without a mistake there is less to compare.
    "tests/configuration/test_validate.py": (
        "test_whoever_validates_finds_the_same[nothing]",
        "test_a_proof_comes_with_the_same_findings",
    ),
    "tests/proof/test_verify.py": ("test_validate_of_a_setup_is_the_command",),
    # Every axis is in the cells that stay: tp2, fsdp2_tp2 and cp2 of the families, tp2, fsdp2 and hsdp2x2 of the Llamas.
    "tests/benchmarks/proofs/test_families.py": (
        "test_a_cell_is_proven[hf_gpt_neox on fsdp2_cp2_tp2, whole stream]",
        "test_a_cell_is_proven[hf_gpt2 on fsdp2_cp2_tp2]",
        "test_a_cell_is_proven[hf_gemma3_text on cp2_tp2]",
        "test_a_cell_is_proven[encoder_decoder_tiny on tp2, whole stream]",
    ),
    "tests/benchmarks/proofs/test_matrix.py": (
        "test_a_cell_is_proven[llama_debug, llama, tied embeddings on hsdp2x16_tp8]",
        "test_a_cell_is_proven[llama3_405b, llama_tp on fsdp1024_cp2_tp8]",
        "test_a_cell_is_proven[llama3_405b, llama on cp2]",
    ),
    "tests/proof/test_prove.py": (
        "test_float32_is_a_verdict_of_its_own_precision",
        "test_a_correct_plan_is_proven_and_nothing_differs[parallel=hsdp2x2 plan=llama_tp",
    ),
    # A fault of each place stays: a rule, the data, the loss, the order of a sequence.
    "tests/proof/test_faults.py": (
        "test_a_planted_fault_is_found_placed_and_named[replicas of hsdp not summed]",
        "test_a_planted_fault_is_found_placed_and_named[another weight decay]",
        "test_a_planted_fault_is_found_placed_and_named[key heads of another rank]",
        "test_a_planted_fault_is_found_placed_and_named[key weights dealt out in the wrong order]",
        "test_a_planted_fault_is_found_placed_and_named[the gradient norm counts replicas]",
    ),
    "tests/recipes/test_hydra.py": (
        "test_rules_come_behind_the_plan_s_own",
        "test_a_style_s_options_have_defaults_and_a_style_is_switched_off",
        "test_a_layout_is_switched_everywhere[++parallel.layouts.stream='shard(1)'",
    ),
    "tests/recipes/test_generate.py": ("test_the_greedy_text_is_the_plain_model_s_under_every_preset",),
    "tests/runtime/test_redistribution.py": (
        "test_the_run_and_the_dry_run_take_the_path_that_the_preset_says",
    ),
    # Every preset goes on from every other in tests/survival; one compiled step is compared in tests/styles.
    "tests/runtime/checkpoint/test_loading.py": ("test_every_mesh_reads_what_every_other_wrote_to_the_bit",),
    "tests/runtime/checkpoint/test_contents.py": (
        "test_every_number_is_written_by_one_rank_and_the_work_is_shared",
    ),
    "tests/training/keep/test_checkpoints.py": (
        "test_another_mesh_gives_the_same_losses_to_rounding",
        "test_it_goes_on_under_another_preset_and_says_so",
    ),
    "tests/styles/context_parallel/test_compile.py": ("test_a_compiled_block_computes_the_same[all-gather]",),
    "tests/styles/context_parallel/test_flex_models.py": (
        "test_a_window_beside_tensor_parallelism_is_proven",
    ),
    "tests/runtime/test_step.py": ("test_two_ranks_compute_what_one_does[tp2 llama]",),
    "tests/recipes/test_train.py": ("test_bfloat16_trains_close_to_float32[fsdp2_tp2]",),
    "tests/recipes/test_torchrun.py": (
        "test_the_rank_that_fails_says_why_and_the_one_that_lost_it_leaves_its_traceback_in_its_log[raises]",
    ),
    "tests/simulate/record/test_stretch.py": (
        "test_layers_that_differ_are_not_folded_or_in_runs[another rule for one layer]",
    ),
    "tests/simulate/record/test_memory.py": (
        "test_a_rank_with_a_smaller_shard_needs_less",
        "test_every_phase_peaks_where_the_allocator_does[fsdp2_tp2 llama_tp bf16 checkpoint]",
    ),
    "tests/mutation/test_judge.py": ("test_a_harmless_mutant_is_accepted_and_its_proof_kept",),
    "tests/commands/test_import_plan.py": (
        "test_it_is_a_plan_that_validates[tp2]",
        "test_it_is_a_plan_that_validates[fsdp2]",
        "test_it_is_a_plan_that_validates[single]",
        "test_rules_that_are_yours_are_not_compared",
        "test_a_rule_that_names_nothing_any_more_is_told",
    ),
    "tests/hugging_face/test_build.py": ("test_nothing_but_json_is_printed_where_json_is_asked_for",),
    # `make test-wheel`, which CI runs too, has all of tests/wheel.
    "tests/wheel/test_wheel.py": (
        "test_commands_run_in_an_empty_folder",
        "test_ones_own_files_are_searched_first_and_ours_behind",
    ),
    "tests/wheel/test_life.py": ("test_from_nothing_to_a_sample",),
}
"""Names of tests by file: all cases of a function, or those whose id begins so."""


def mark(items: list[pytest.Item]) -> None:
    """Mark them `slow`."""
    for item in items:
        file, _, name = item.nodeid.partition("::")
        names = LEFT_OUT.get(file, ())
        if any(name == one or name.startswith(one if "[" in one else f"{one}[") for one in names):
            item.add_marker(pytest.mark.slow)
