#!/usr/bin/env bash
# From a fresh clone to a trained model: install into .venv, then train a small GPT-MoE with
# Megatron on 4 CPU ranks that are 2 nodes of 2, once with the `monta` dispatcher and once with
# Megatron's own `alltoall`. As root or with user namespaces the nodes are joined by an emulated
# network, and the iterations are timed; the losses have to agree everywhere.
#
#   scripts/quickstart.sh [--iterations N] [--pairs N] [--inter-mbit R] [--no-network]
#
# Results: runs/quickstart/summary.json, and the log of each training in the same folder.
set -euo pipefail

# shellcheck source=scripts/python_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"

is_new=
is_installed "$MAIN_VENV" "$MEGATRON_REQUIREMENT" || is_new=yes
install_main ""

if [[ $is_new ]]; then
    say "importing Megatron for the first time, which compiles it (a minute on a slow machine)"
    MONTA_CPU_RANKS=1 alive "importing Megatron" \
        "$MAIN_VENV/bin/python" -W ignore -c "import megatron.training"
fi

exec "$MAIN_VENV/bin/python" "$REPOSITORY/scripts/quickstart/main.py" "$@"
