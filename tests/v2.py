"""The tests that run on Model Runner V2 too, in a process of their own: Triton's interpreter has to be installed before
vLLM is imported (`tests/engine/conftest.py`).

python -m tests.v2            `SHORT`, a case of each mechanism: part of `make test`
python -m tests.v2 one        one case
python -m tests.v2 methods    every method, a distribution of every kind, every draft: 25 minutes on two cores
python -m tests.v2 rest       all else that has a result there: over an hour
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ENGINE = Path("tests", "engine")
ROOT = Path(__file__).parents[1]

Cases = dict[str, list[str]]
"""File of `ENGINE` -> tests, or cases of tests; none named: all."""

LAW = "test_tokens_follow_the_target_s_law"
SHORT: dict[str, Cases] = {  # MODEL_RUNNER -> cases
    "v2-async": {
        "test_v2_step.py": [
            "test_a_fixed_budget[opt_tree]",
            "test_large_trees_stand_depth_first",
            "test_a_draft_that_rests_reads_nothing_and_catches_up",
            "test_a_head_that_rests_reads_later[eagle3-None]",
            "test_a_head_that_rests_reads_later[dflash2-ngram]",
            "test_beside_replicas_there_is_no_quota",
            "test_no_trees_grow_where_none_is_verified",
            "test_a_crowd_decodes_without_trees[model]",
            "test_nothing_waits_for_the_device[adaptive_tree-model]",
            "test_kernels_of_draws_and_rules[dyspec-traversal-options0]",
            "test_history_of_every_node",
            "test_asynchronous_scheduling_where_it_is_asked_for",
        ],
        "test_adaptive_tree.py": [],
        "test_request_options.py": ["test_identity"],
        "test_request_kinds.py": ["test_adapters_and_processors[7]"],
        "test_options.py": [
            "test_dyspec_fills_its_trees",
            "test_opt_trees_price_floor_and_temperature",
            "test_a_threshold_is_measured_once",
            "test_a_verification_is_timed_alone",
            "test_a_draft_is_timed_in_steps",
        ],
        "test_dead_rows.py": ["test_dead_rows[dyspec]"],
        "test_requests_leave.py": ["test_aborted_preempted_and_called_by_an_old_name[model]"],
        "test_drafts.py": [
            "test_look_ups_go_on_while_the_draft_rests[eagle3-opt_tree-auto-ngram]",
        ],
        "test_pairs.py": [
            "test_requests_that_outgrow_the_draft_go_on_without[model]",
        ],
        "test_contract.py": ["test_a_process_of_its_own_checks_too"],
        "test_one_forward.py": ["test_greedy_and_seeded[dspark-opt_tree-auto]"],
        "test_images.py": ["test_identity[known]", "test_m_rope_after_an_image[qwen3-vl]"],
        "test_connectors.py": ["test_what_is_offloaded_and_loaded[model, resting at times]"],
        "test_tensor_parallel.py": ["test_ranks_learn_the_same_costs"],
    },
    "v2": {
        "test_latent.py": [
            "test_prompts_beside_trees",
            "test_the_target_s_own_module[5]",
            "test_the_start_up_check",
            "test_a_tree_read_as_a_chain_shows",
        ],
        "test_self_check.py": [
            "test_a_right_engine_passes",
            "test_one_row_of_a_model_with_experts_may_differ",
            "test_a_broken_engine_fails_by_name[break_the_parents-model]",
            "test_a_broken_engine_fails_by_name[break_a_draw-draws]",
            "test_a_broken_engine_fails_by_name[break_the_order_of_the_device-waits]",
            "test_a_certificate_shortens_the_next_check",
            "test_one_request_at_a_time",
            "test_a_failure_switches_trees_off",
            "test_modes",
            "test_a_draft_that_repeats_a_token_passes",
            "test_a_head_is_compared_too[eagle3]",
            "test_the_block_of_a_head_is_compared[dspark]",
        ],
    },
    "v2-kernels": {
        "test_capture.py": ["test_pieces_of_a_step", "test_the_rehearsal_sees", "test_the_rehearsal_sees_a_wait"],
    },
}
METHODS: dict[str, Cases] = {
    "v2": {
        "test_methods.py": ["test_greedy_and_seeded", "test_greedy_under_every_rule"],
        "test_adaptive_tree.py": [],
        "test_law.py": [
            f"{LAW}[top_k children, auto]",
            f"{LAW}[adaptive_tree, traversal]",
            f"{LAW}[adaptive_tree, chosen children]",
            f"{LAW}[dyspec, rrsw]",
            f"{LAW}[dyspec, rrsw, depth first]",
            f"{LAW}[iid, rrs]",
            f"{LAW}[hub pairs, spechub]",
            f"{LAW}[top k and one, greedy_multi_draft]",
            "test_other_drafts",
        ],
        "test_drafts.py": [],
        "test_one_forward.py": [],
        "test_head_chains.py": ["test_a_tree_of_one_child_is_vllm_s_walk"],
    },
    "v2-kernels": {
        "test_capture.py": ["test_the_memory_profile_has_seen_the_levels"],
        "test_v2_step.py": ["test_a_fixed_budget[opt_tree]"],
    },
}
REST: dict[str, Cases] = {
    "v2": {
        "test_structured.py": [],
        "test_scheduling.py": [],
        "test_v2_step.py": [],
        "test_step_record.py": [],
        "test_quantised.py": [],
        "test_images.py": ["test_identity", "test_m_rope_after_an_image"],
        "test_connectors.py": [],
        "test_tensor_parallel.py": [],
        "test_pairs.py": [
            "test_a_draft_of_another_shape_and_shorter_context",
            "test_requests_that_outgrow_the_draft_go_on_without",
        ],
        "test_families.py": [
            "test_identity",
            "test_random_configurations",
            "test_a_commit_to_the_first_group_alone_shows",
        ],
        "test_sampling.py": [],
        "test_llm_calls.py": [],
        "test_sessions.py": [],
        "test_public_reports.py": [],
        "test_request_kinds.py": [],
        "test_request_options.py": [],
        "test_initial.py": [],
        "test_self_check.py": [
            "test_a_broken_engine_fails_by_name",
            "test_the_doctors_engine",
            "test_a_head_is_compared_too",
            "test_the_block_of_a_head_is_compared",
            "test_a_block_longer_than_its_tree",
        ],
    },
    "v2-kernels": {"test_latent.py": []},
}
ONE: dict[str, Cases] = {"v2-async": {"test_v2_step.py": ["test_a_fixed_budget[opt_tree]"]}}
SETS = {"short": SHORT, "one": ONE, "methods": METHODS, "rest": REST}


def names(cases: Cases) -> list[str]:
    """As pytest takes them."""
    return [str(ENGINE / file) + (test and f"::{test}") for file, tests in cases.items() for test in tests or [""]]


def main(arguments: list[str]) -> int:
    """Run a set, runner by runner; pytest ends with an error for a name that is not there."""
    parser = argparse.ArgumentParser(prog="python -m tests.v2", description="tests on Model Runner V2")
    parser.add_argument("set", nargs="?", choices=SETS, default="short")
    command = [sys.executable, "-m", "pytest", "-m", "slow or not slow", "-n", "2", "--dist", "loadfile"]
    command += ["-p", "no:cacheprovider", "--durations=10"]
    failed = False
    for runner, cases in SETS[parser.parse_args(arguments).set].items():
        print(f"MODEL_RUNNER={runner}", flush=True)
        environment = {**os.environ, "MODEL_RUNNER": runner}
        failed |= subprocess.run([*command, *names(cases)], cwd=ROOT, env=environment).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
