#!/usr/bin/env bash
# Run the tests; what they need is installed first, once.
#
#   scripts/test.sh                     all tests on the newest supported Megatron-Core, and those
#                                       marked old_end on the oldest
#   scripts/test.sh ARGS...             pytest ARGS on the newest alone
#   scripts/test.sh --fast ARGS...      the inner loop: tests that find much in little time
#   scripts/test.sh --old-end ARGS...   pytest ARGS, of those marked old_end, on the oldest alone
#   scripts/test.sh --newest            all tests on the newest alone
set -euo pipefail

# shellcheck source=scripts/python_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"

OLD_VENV=$REPOSITORY/.venv-0.16
OLD_PYTHON_VERSIONS="3.11 3.10"
# The oldest Megatron-Core of the supported range, and the last torch that it was tried with.
OLD_REQUIREMENTS=("megatron-core==0.16.1" "torch>=2.6,<2.14")

# Whole programs, such as commands of pages, launches, and trainings on Slurm, which mostly wait for
# each other: these tests run in parallel with the rest.
BESIDE=(tests/launch tests/megatron tests/slurm tests/benchmark tests/calibration tests/docs
        tests/emulation tests/timeline tests/unit/kernels)

# The inner loop, at most 90 s of CPU time. These tests find more than half of the planted faults;
# those left out take seconds and find none.
FAST=(tests/unit/test_{cause,chains,copies,count_messages,cuda_dispatcher,failures}.py
      tests/unit/test_{layer_memory,layer_pipeline,memory,pipeline_streams,program,rooms}.py
      tests/unit/test_{stream_safety,time_limit,windows}.py tests/unit/planner
      tests/benchmark/test_point.py tests/calibration/test_{fit,timer}.py
      tests/emulation/test_costs.py tests/launch/test_comparison.py tests/timeline/test_timeline.py
      "tests/dist/test_exchange_properties.py::test_every_chain_gives_what_the_reference_gives[4]")
LEFT_OUT=(tests/unit/planner/test_{host_operations,plan,study}.py
          tests/unit/planner/test_plan_command.py::test_a_run_file_is_taken_as_it_is
          tests/unit/test_stream_safety.py::test_collectives_are_issued_in_one_order_on_every_rank_whatever_the_data)

# pytest fails if it collects nothing (status 5), and so do these functions.

test_old_end() {
    local python versions
    if ! venv_runs "$OLD_VENV"; then
        read -ra versions <<<"$OLD_PYTHON_VERSIONS"
        if ! python=$(find_python "${versions[@]}"); then
            say "skipped: the tests on ${OLD_REQUIREMENTS[0]} need a Python ${versions[*]}"
            return
        fi
        make_venv "$OLD_VENV" "$python"
    fi
    install_once "$OLD_VENV" "${OLD_REQUIREMENTS[@]}"
    install_package "$OLD_VENV" test
    say "oldest Megatron-Core: pytest tests/unit tests/dist -m old_end $*"
    "$OLD_VENV/bin/python" -m pytest tests/unit tests/dist -m old_end "$@"
}

test_newest() {
    local status=0
    say "these tests take about 15 minutes on 2 cores, the programs among them in parallel"
    install_main test
    begin_beside programs scripts/test.sh "${BESIDE[@]}"
    scripts/test.sh "${BESIDE[@]/#/--ignore=}" || status=$?
    say "in parallel: ${BESIDE[*]}"
    end_beside || status=$?
    say "the tests took $((SECONDS / 60)) min $((SECONDS % 60)) s"
    return "$status"
}

test_all() {
    local status=0
    begin_beside "oldest Megatron" scripts/test.sh --old-end
    scripts/test.sh --newest || status=$?
    end_beside || status=$?
    return "$status"
}

cd "$REPOSITORY"
if [[ $# -eq 0 ]]; then
    test_all
elif [[ $1 == --old-end ]]; then
    test_old_end "${@:2}"
elif [[ $1 == --newest ]]; then
    test_newest
else
    [[ $1 != --fast ]] || set -- "${FAST[@]}" "${LEFT_OUT[@]/#/--deselect=}" "${@:2}"
    install_main test
    say "newest Megatron-Core: pytest $*"
    "$MAIN_VENV/bin/python" -m pytest "$@"
fi
