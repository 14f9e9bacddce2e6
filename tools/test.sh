#!/usr/bin/env bash
# Every check in order; the first that fails ends it with its exit status. Other arguments go on to pytest.
#
# The tests run in several processes, a few of the host's cores (tests/conftest.py says how many); `-n 0` runs them in one.
#
# --old-transformers   afterwards, the adapter's tests once more in an environment of their own, .venv-old, that has the
#                      older generation of transformers (constraints-old.txt)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"

old=
arguments=()
for argument in "$@"; do
  if [ "$argument" = --old-transformers ]; then old=1; else arguments+=("$argument"); fi
done

ensure_venv transformers test lint
cd "$checkout"

check() {
  printf '== %s\n' "$*" >&2
  "$@"
}

(
  export PATH=$venv/bin:$PATH
  check ruff check .
  check ruff format --check .
  check mypy
  check basedpyright
  check lint-imports
  check pytest -n auto --dist worksteal ${arguments[@]+"${arguments[@]}"}
)
if [ -n "$old" ]; then
  ensure_old_venv transformers test
  check "$old_venv/bin/python" -m pytest ${arguments[@]+"${arguments[@]}"} \
    tests/unit/stratad/test_{cache_api,cache_kinds,containers,engine_models,kept_states,kv_planes,transformers_adapter}.py \
    tests/integration/test_{cache_kinds,engine_process,transformers}.py
fi
