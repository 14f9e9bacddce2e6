#!/usr/bin/env bash
# Every check in order; the first that fails ends it with its exit status. Arguments go on to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
ensure_venv transformers test lint
cd "$checkout"
export PATH=$venv/bin:$PATH

check() {
  printf '== %s\n' "$*" >&2
  "$@"
}

check ruff check .
check ruff format --check .
check mypy
check basedpyright
check lint-imports
printf '== pytest %s\n' "$*" >&2
exec pytest "$@"
