# Sourced by the other scripts here, never run: `ensure_venv EXTRA...` makes .venv in the checkout and installs into it,
# `ensure_old_venv EXTRA...` does so with .venv-old, which has the older generation of the model library.
#
# Needs Python 3.11 or newer and pip; works as root or not, asks nothing, and is over at once when nothing changed since
# the last time. PYTHON=/path/to/python picks another interpreter.

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$checkout/.venv
old_venv=$checkout/.venv-old
constraints=constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PYTHONNOUSERSITE=1

_say() { printf 'stratad: %s\n' "$*" >&2; }

_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Prints the interpreter to build on.
_find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 python; do
    if command -v "$candidate" >/dev/null 2>&1 && _new_enough "$candidate"; then
      command -v "$candidate"
      return 0
    fi
  done
  _say "no Python 3.11 or newer found (looked for \$PYTHON, python3, python3.11 to 3.14, python)." \
    "Install one, or say where it is: PYTHON=/path/to/python bash $0"
  return 1
}

# Makes $venv with a working pip in it; where the system has no ensurepip (Debian without python3-venv), its pip serves.
_make_venv() {
  local python=$1
  _say "making $venv with $("$python" --version 2>&1)"
  rm -rf "$venv"
  if "$python" -m venv "$venv" >/dev/null 2>&1 && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    return 0
  fi
  rm -rf "$venv"
  if "$python" -m venv --without-pip "$venv" >/dev/null 2>&1 &&
    "$python" -m pip --python "$venv/bin/python" install --quiet pip >&2; then
    return 0
  fi
  rm -rf "$venv"
  _say "cannot make a virtual environment: $python has neither ensurepip nor pip." \
    "Install them (Debian, Ubuntu: python3-venv or python3-pip)"
  return 1
}

# What the installation depends on, as one word.
_recipe() {
  "$venv/bin/python" - "$checkout/pyproject.toml" "$checkout/$constraints" <<'PYTHON'
import hashlib, pathlib, sys
state = hashlib.sha256((sys.version + sys.prefix).encode())
for name in sys.argv[1:]:
    state.update(pathlib.Path(name).read_bytes())
print(state.hexdigest())
PYTHON
}

_install() {
  local extras=$1 stamp=$venv/.stratad-$1 recipe
  if ! { [ -x "$venv/bin/python" ] && _new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    local python
    python=$(_find_python) || return 1
    _make_venv "$python" || return 1
  fi
  recipe=$(_recipe) || return 1
  if [ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ]; then
    return 0
  fi
  _say "installing stratad[$extras] into $venv (minutes the first time)"
  if ! (cd "$checkout" && "$venv/bin/python" -m pip install --quiet -c "$constraints" -e ".[$extras]") >&2; then
    _say "the installation failed; see pip's words above"
    return 1
  fi
  printf '%s\n' "$recipe" >"$stamp"
}

# ensure_venv EXTRA...: exit status 0 when $venv holds the package with these extras. One run at a time in a checkout.
ensure_venv() {
  local extras
  extras=$(IFS=,; printf '%s' "$*")
  if command -v flock >/dev/null 2>&1; then
    (flock 9 && _install "$extras") 9>"$venv.lock"
  else
    (_install "$extras")
  fi
}

ensure_old_venv() {
  local venv=$old_venv constraints=constraints-old.txt
  ensure_venv "$@"
}
