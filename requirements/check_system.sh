#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes sure of the few things that pip cannot install: a Python with headers and venv, a C++20 compiler, libnuma (vLLM links to it).
set -euo pipefail
python=$1

fail() {
    echo "error: $1" >&2
    exit 1
}

"$python" - <<'PY' || fail "$python is not Python 3.11; the lock files are for 3.11: pass PYTHON=/path/to/python3.11"
import sys
sys.exit(sys.version_info[:2] != (3, 11))
PY
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot create environments (Debian: apt-get install python3.11-venv)"
header=$("$python" -c 'import os, sysconfig; print(os.path.join(sysconfig.get_path("include"), "Python.h"))')
[ -e "$header" ] || fail "$header is missing (Debian: apt-get install python3.11-dev)"
command -v "${CXX:-g++}" >/dev/null || fail "no C++ compiler '${CXX:-g++}' (Debian: apt-get install g++)"

has_numa() { "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; }
if ! has_numa && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libnuma1
fi
has_numa || fail "libnuma.so.1 is missing (Debian: apt-get install libnuma1)"
