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

install_main ""

exec "$MAIN_VENV/bin/python" "$REPOSITORY/scripts/quickstart/main.py" "$@"
