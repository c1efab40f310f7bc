#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Usage: install.sh PYTHON ARGUMENT...: what `pip install ARGUMENT...` does in the environment of PYTHON.
# uv does it in a fifth of the time where it is on PATH. It does not read pip's configuration, so pip follows if it fails.
# Nothing is compiled: Python compiles what is imported, which is a small part of what would take 20 seconds here.
set -eu

python=$1
shift
if command -v uv >/dev/null 2>&1; then
    uv pip install -q --python "$python" "$@" && exit
    echo "setup: uv failed; pip tries the same" >&2
fi
exec "$python" -m pip install -qq --no-compile --disable-pip-version-check --no-input "$@"
