#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Usage: install.sh PYTHON ARGUMENT...: like `pip install ARGUMENT...` in the environment of PYTHON.
# If uv is on PATH, it takes a fifth of the time. It does not read pip's configuration, so pip is tried if uv fails.
# No bytecode is compiled here, which would take 20 seconds: Python compiles the few modules that it imports.
set -eu

python=$1
shift
if command -v uv >/dev/null 2>&1; then
    uv pip install -q --python "$python" "$@" && exit
    echo "setup: uv failed; pip tries the same" >&2
fi
exec "$python" -m pip install -qq --no-compile --disable-pip-version-check --no-input "$@"
