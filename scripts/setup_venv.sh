#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Create a virtual environment and install this package, editable, with its development tools.
# Usage: setup_venv.sh PYTHON VENV [JAX_VERSION]; the version `nightly` comes from the index in JAX_NIGHTLY_INDEX.
set -eu

python=$1 venv=$2 jax=${3:-}
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)

fail() {
    echo "setup: $*" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 || fail "no '$python' here; install Python 3.11 or later, or name one with PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "'$python' is $("$python" -V 2>&1); Python 3.11 or later is needed, name one with PYTHON=..."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "'$python' cannot make virtual environments (venv or ensurepip is missing); on Debian and Ubuntu: apt-get install python3-venv"

# The environment belongs to another Python: create it anew instead of mixing two.
wanted=$("$python" -c 'import sys; print(*sys.version_info[:3])')
found=$("$venv/bin/python" -c 'import sys; print(*sys.version_info[:3])' 2>/dev/null || true)
if [ "$wanted" != "$found" ]; then
    # --clear empties the folder, so the folder must be an environment, or not exist.
    [ ! -e "$venv" ] || [ -e "$venv/pyvenv.cfg" ] || fail "'$venv' exists and is no virtual environment; choose another VENV=..."
    "$python" -m venv --clear "$venv"
fi

echo "setup: installing into $venv (Python $(echo "$wanted" | tr ' ' .), JAX ${jax:-the newest for it}); this takes a minute or two" >&2
# --upgrade only without a version: "newest" must not mean the version that happens to be installed.
if [ "$jax" = nightly ]; then
    [ -n "${JAX_NIGHTLY_INDEX:-}" ] || fail "JAX=nightly needs JAX_NIGHTLY_INDEX, the address of the index that holds it"
    "$root/scripts/install.sh" "$venv/bin/python" -e "$root[dev]"
    "$venv/bin/python" -m pip install -qq --no-compile --pre --upgrade --extra-index-url "$JAX_NIGHTLY_INDEX" jax jaxlib
elif [ -n "$jax" ]; then
    "$root/scripts/install.sh" "$venv/bin/python" "jax==$jax" -e "$root[dev]"
else
    "$root/scripts/install.sh" "$venv/bin/python" --upgrade jax -e "$root[dev]"
fi
echo "setup: installed JAX $("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("jax"))')" >&2
[ "${wanted#3 11}" = "$wanted" ] || echo "setup: newer versions of JAX need Python 3.12 or later, e.g. PYTHON=python3.12" >&2
