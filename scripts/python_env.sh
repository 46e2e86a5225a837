# Find a Python, make a virtual environment, install into it once; run two commands in parallel.
# Sourced by the other scripts.
#
#   MONTA_PYTHON   the interpreter for the main environment, where the search finds the wrong one
#   MONTA_VENV     the main environment (default: .venv in the repository)
# shellcheck shell=bash

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MAIN_VENV=${MONTA_VENV:-$REPOSITORY/.venv}
MEGATRON_REQUIREMENT="megatron-core[training]==0.19.2"
# This Megatron needs at least 3.12; beyond 3.13 not all packages that it needs have wheels yet.
MAIN_PYTHON_VERSIONS="3.12 3.13"

# pip compiles nothing here (install_once), so each module is compiled when it is first imported;
# if the result were not written, every process would compile it again.
export PYTHONDONTWRITEBYTECODE=

say() {
    printf '==> %s\n' "$*" >&2
}

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# begin_beside NAME COMMAND...: start it in parallel, one at a time; its lines are shown behind NAME.
begin_beside() {
    output=$(mktemp)
    # Job control gives it a process group of its own: an interrupt reaches it only by the trap.
    set -m
    { "${@:2}" 2>&1 | tee "$output" | sed -u "s/^/[$1] /" >&2; } &
    beside=$!
    set +m
    trap 'kill -INT -- "-$beside" 2>/dev/null || true; rm -f "$output"' EXIT
}

# end_beside: wait for it and repeat its last lines, more of them if it failed; its exit status.
end_beside() {
    local status=0 num_lines=1
    wait "$beside" || status=$?
    [[ $status -eq 0 ]] || num_lines=100
    tail -n "$num_lines" "$output"
    return "$status"
}

# alive TEXT COMMAND...: run it, and say every 20 seconds that it still runs; its exit status.
alive() {
    local status=0 heartbeat
    # It ends with this shell too, and neither it nor its sleep keeps an open file or a lock.
    (
        SECONDS=0
        while sleep 20 >/dev/null 2>&1 && kill -0 "$$" 2>/dev/null; do
            say "$1: still running after $SECONDS s"
        done
    ) 9<&- &
    heartbeat=$!
    disown "$heartbeat"
    "${@:2}" || status=$?
    kill "$heartbeat" 2>/dev/null || true
    return "$status"
}

# works PYTHON VERSION: whether this interpreter really runs, is of that version, and can make
# environments. A pyenv shim on PATH may fail; Debian packages ensurepip separately.
works() {
    "$1" -c 'import sys, venv, ensurepip
sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$2" >/dev/null 2>&1
}

# new_enough PYTHON: whether it runs, can make environments, and has the version Megatron needs.
new_enough() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# pyenv_roots: folders of pyenv, one per line. A shim on PATH runs only the version that is active,
# and shows where the others are.
pyenv_roots() {
    local shim
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"
    while IFS= read -r shim; do
        [[ $shim != */shims/* ]] || printf '%s\n' "${shim%/shims/*}"
    done < <(type -aP python3 python)
}

# candidates VERSION: interpreters that may be of that version, one per line.
candidates() {
    local version=$1 name root
    for name in "python$version" python3 python; do
        type -aP "$name" || true
    done
    while IFS= read -r root; do
        compgen -G "$root/versions/$version*/bin/python$version" || true
    done < <(pyenv_roots)
    if command -v uv >/dev/null; then
        uv python find --system "$version" 2>/dev/null || true
    fi
}

# find_python VERSION...: print the first interpreter that works, in the order of the versions.
find_python() {
    local version candidate
    for version in "$@"; do
        while IFS= read -r candidate; do
            if works "$candidate" "$version"; then
                printf '%s\n' "$candidate"
                return
            fi
        done < <(candidates "$version")
    done
    return 1
}

# main_python: print the interpreter for the main environment; uv may have to install one.
main_python() {
    local versions first
    read -ra versions <<<"$MAIN_PYTHON_VERSIONS"
    first=${versions[0]}
    if [[ -n ${MONTA_PYTHON:-} ]]; then
        new_enough "$MONTA_PYTHON" ||
            die "MONTA_PYTHON: $MONTA_PYTHON must run, be Python >= 3.12 and have venv"
        printf '%s\n' "$MONTA_PYTHON"
        return
    fi
    find_python "${versions[@]}" && return
    if command -v uv >/dev/null; then
        say "no Python ${versions[*]} found; uv installs $first"
        uv python install "$first" >&2
        find_python "$first" && return
    fi
    die "no working Python ${versions[*]} found. Install one: 'apt install python$first" \
        "python$first-venv', 'pyenv install $first' or 'uv python install $first';" \
        "or set MONTA_PYTHON to one that is somewhere else."
}

# venv_runs FOLDER: whether there is a virtual environment that can still install.
venv_runs() {
    "$1/bin/python" -m pip --version >/dev/null 2>&1
}

# make_venv FOLDER PYTHON: a new virtual environment, in place of one that is broken.
make_venv() {
    local folder=$1 python=$2
    if [[ -e $folder && ! -e $folder/pyvenv.cfg ]]; then
        die "$folder is there and is no virtual environment; move it away or set MONTA_VENV"
    fi
    say "making $folder with $python"
    alive "making $folder" "$python" -m venv --clear "$folder"
}

# wanted REQUIREMENT...: what the stamp of an installation holds.
wanted() {
    printf '%s\n' "$REPOSITORY" "$@" | cat - "$REPOSITORY/setup.py" | cksum
}

# stamp_of FOLDER REQUIREMENT...: the path of that stamp.
stamp_of() {
    printf '%s\n' "$1/.monta-$(printf '%s\n' "${@:2}" | cksum | cut -d' ' -f1)"
}

# is_installed FOLDER REQUIREMENT...: whether they are, and setup.py has not changed since.
is_installed() {
    local stamp
    stamp=$(stamp_of "$@")
    [[ -e $stamp && $(<"$stamp") == "$(wanted "${@:2}")" ]]
}

# install_once FOLDER REQUIREMENT...: pip install, unless they are installed. Few of the modules
# are ever imported, so pip compiles none of them.
install_once() {
    local folder=$1 quiet=()
    is_installed "$@" && return
    say "installing ${*:2} (torch alone can be gigabytes the first time)"
    # On a terminal pip's progress bars show what takes so long; in a log they are noise.
    [[ -t 1 ]] || quiet=(--quiet)
    alive "installing" "$folder/bin/python" -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check \
        --no-compile "${@:2}"
    wanted "${@:2}" >"$(stamp_of "$@")"
}

# install_package FOLDER EXTRA: this package, editable. Two pips at once would write the same
# metadata.
install_package() {
    (
        flock 9
        install_once "$1" --editable "$REPOSITORY${2:+[$2]}"
    ) 9<"$REPOSITORY/setup.py"
}

# install_main EXTRA: the main environment with Megatron and this package.
# EXTRA is dev, test or empty; dev holds the others.
install_main() {
    local python
    if ! venv_runs "$MAIN_VENV"; then
        python=$(main_python)
        make_venv "$MAIN_VENV" "$python"
    fi
    new_enough "$MAIN_VENV/bin/python" ||
        die "$MAIN_VENV must be Python >= 3.12; move it away or set MONTA_VENV to another folder"
    install_once "$MAIN_VENV" "$MEGATRON_REQUIREMENT"
    is_installed "$MAIN_VENV" --editable "${REPOSITORY}[dev]" || install_package "$MAIN_VENV" "$1"
}
