"""The model libraries that only the adapter and the demo need: whether they are there, and what to do if not."""

import importlib.util
from collections.abc import Sequence
from typing import Final

LIBRARIES: Final = ("torch", "transformers")
LIBRARIES_FIX: Final = "in the checkout run `pip install -c constraints.txt '.[transformers]'`"


def missing_libraries(names: Sequence[str] = LIBRARIES) -> list[str]:
    """Which of these cannot be imported because they are not installed; nothing is imported to find out."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def not_installed(error: ModuleNotFoundError) -> ImportError:
    """What to raise in place of an import's own error; that itself where another module is missing."""
    if error.name not in LIBRARIES:
        return error
    what = f"stratad.engines.transformers needs {error.name}, which is not installed: {LIBRARIES_FIX}"
    return ImportError(what, name=error.name)
