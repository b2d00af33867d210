# shellcheck shell=bash
# Sourced by the commands in this folder. Leaves the project's folder in $project and its Python in $python,
# from a .venv that it makes on the first call and finds unchanged on later ones. A .venv that somebody else made is
# used if it has pip and a Python that will do; it is never emptied.
# PYTHON=... chooses the interpreter that a new .venv is made with.

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$project/.venv"
python="$venv/bin/python"
stamp="$venv/jaxrunner-installed"        # written last: what the finished environment was made from
unfinished="$venv/jaxrunner-unfinished"  # there while packages are being installed
made="$venv/jaxrunner-made"              # there if this file made the environment, so that it may empty it too
log="$venv/jaxrunner-install.log"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
no_python="no Python 3.12 to 3.14 found. Install one (apt install python3.13-venv, pyenv install 3.13 or uv python\
 install 3.13) or name it: PYTHON=/path/to/python $0"

# One line about an interpreter: "3.13.0 supported pip", or nothing if it doesn't start or isn't CPython >= 3.12.
# It is run to find out: what lies on PATH may be a shim that fails, or a link to something removed.
# "newer" is a Python that JAX may have no packages for yet; "nopip" one whose distribution split off ensurepip.
describe() {
    "$1" - 2>/dev/null <<'PYTHON'
import importlib.util, sys, sysconfig
version, gil = sys.version_info, not sysconfig.get_config_var("Py_GIL_DISABLED")
if sys.implementation.name == "cpython" and version >= (3, 12) and sys.maxsize > 2**32 and gil:
    support = "supported" if version < (3, 15) else "newer"
    pip = "pip" if importlib.util.find_spec("ensurepip") else "nopip"
    print("%d.%d.%d" % version[:3], support, pip)
PYTHON
}

find_uv() {
    local uv
    for uv in uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
        if "$uv" --version >/dev/null 2>&1; then echo "$uv"; return; fi
    done
    return 1
}

# Every interpreter worth a try, best first: PATH, then the ones only pyenv or uv knows, newest first.
candidates() {
    local name pyenv_root uv_pythons uv
    for name in python3.14 python3.13 python3.12 python3 python; do
        type -aP "$name" || true
    done
    pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "$HOME/.pyenv")}
    uv_pythons=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}
    printf '%s\n' "$pyenv_root"/versions/*/bin/python "$uv_pythons"/*/bin/python3 | sort -rV
    if uv=$(find_uv); then "$uv" python find --no-project '>=3.12,<3.15' 2>/dev/null || true; fi
}

# Sets $base to the interpreter to make .venv with; empty if there is none.
choose_base() {
    local candidate facts newer="" nopip=""
    base=""
    if [ -n "${PYTHON:-}" ]; then
        facts=$(describe "$PYTHON") || true
        [ -n "$facts" ] || die "PYTHON=$PYTHON is not a working CPython 3.12 or newer"
        base=$PYTHON
        return
    fi
    while IFS= read -r candidate; do
        facts=$(describe "$candidate") || true
        case $facts in
            *"supported pip") base=$candidate; return ;;
            *"supported nopip") nopip=${nopip:-$candidate} ;;
            *"newer"*) newer=${newer:-$candidate} ;;
        esac
    done < <(candidates)
    base=${nopip:-$newer}
}

# $1: the interpreter. Without ensurepip uv can still fill in pip.
make_venv() {
    local uv
    if "$1" -c 'import ensurepip' 2>/dev/null; then
        "$1" -m venv "$venv" || die "could not make $venv with $1"
    elif uv=$(find_uv); then
        "$uv" venv --quiet --allow-existing --seed --python "$1" "$venv" || die "uv could not make $venv with $1"
    else
        die "$1 can't make environments: it has no ensurepip (on Debian: apt install python$(
            "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv)"
    fi
}

# Emptied rather than removed, since .venv may be a link to a larger disk.
create_venv() {
    local base uv
    choose_base
    uv=$(find_uv) || true
    [ -n "$base$uv" ] || die "$no_python"
    mkdir -p "$venv"
    find "$venv/" -mindepth 1 -delete
    : >"$made"
    : >"$unfinished"
    if [ -n "$base" ]; then
        say "environment: making .venv with Python $(describe "$base" | cut -d' ' -f1) ($base)"
        make_venv "$base"
    else
        say "environment: making .venv with a Python 3.13 that uv fetches"
        "$uv" venv --quiet --allow-existing --seed --python 3.13 "$venv" || die "$no_python"
    fi
}

# $1: what is wrong with the .venv that is there. Somebody else's is left alone.
start_over() {
    if [ -n "$(ls -A "$venv/" 2>/dev/null)" ]; then
        [ -e "$made" ] || die "$venv $1, and this script didn't make it: move or delete it, then run $0 again"
        say "environment: .venv $1, starting over"
    fi
    create_venv
}

# The CUDA libraries that this machine's NVIDIA driver can run: cuda12, cuda13, or nothing without a driver.
cuda_for_driver() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1) || true
    case $driver in '' | *[!0-9]*) return ;; esac
    if [ "$driver" -ge 580 ]; then
        echo cuda13
    elif [ "$driver" -ge 525 ]; then
        echo cuda12
    else
        say "environment: JAX needs NVIDIA driver 525 or newer, this one is $driver; going on without the GPU"
    fi
}

install() {
    say "environment: installing jaxrunner[$1]; the first time takes minutes (progress: $log)"
    : >"$unfinished"
    if ! PIP_USER=0 "$python" -m pip install --disable-pip-version-check --editable "${project}[$1]" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        die "pip failed; the lines above are the end of $log"
    fi
}

set_up() {
    local checksum cuda had_checksum="" had_cuda="" had_project=""
    checksum=$(cksum <"$project/pyproject.toml")
    cuda=$(cuda_for_driver)
    if [ -e "$stamp" ]; then
        IFS='|' read -r had_checksum had_cuda had_project <"$stamp" || true
        # A cluster's login node sees no driver; the environment made on a GPU node stays as it is.
        cuda=${cuda:-$had_cuda}
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        start_over "has no working Python 3.12 or newer"
    elif [ -e "$unfinished" ] && [ -e "$made" ]; then
        start_over "was left unfinished"
    elif ! "$python" -c 'import pip' 2>/dev/null; then
        start_over "has no pip"
    elif [ -n "$had_project" ] && [ "$had_project" != "$project" ]; then
        start_over "was made for $had_project"
    elif [ -n "$had_cuda" ] && [ "$had_cuda" != "$cuda" ]; then
        start_over "was made for $had_cuda, and this machine needs $cuda"
    elif [ "$had_checksum|$had_cuda|$had_project" = "$checksum|$cuda|$project" ]; then
        return
    fi
    install "dev${cuda:+,$cuda}"
    printf '%s|%s|%s\n' "$checksum" "$cuda" "$project" >"$stamp"
    rm -f "$unfinished"
}

# Two commands started at once take turns. Where the system has no file locks, they just go ahead.
{
    if command -v flock >/dev/null && ! flock -n 9 2>/dev/null; then
        say "environment: waiting for another set-up of $project"
        flock 9 2>/dev/null || true
    fi
    set_up
} 9<"$project/pyproject.toml"
