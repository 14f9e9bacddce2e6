"""Where a GPU runtime's shared libraries may lie: in this process already, beside torch, or where the system looks."""

import importlib.util
import re
from pathlib import Path
from typing import Final

# Packages that carry such libraries, and the folder in them that is searched ("" stands for all of it).
_CARRIERS: Final = (("nvidia", ""), ("torch", "lib"), ("_rocm_sdk_core", "lib"))


def mapped_libraries() -> str:
    """The memory map of this process as text."""
    return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")


def library_files(stem: str, versions: tuple[str, ...]) -> list[str]:
    """Names to load for ``lib<stem>.so``, best first; nothing is imported to find them."""
    names = re.findall(rf"/\S*/lib{stem}[-.\w]*\.so[.\d]*", mapped_libraries())
    for package, folder in _CARRIERS:
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or []) if spec is not None else []:
            names += sorted((str(path) for path in (Path(location) / folder).rglob(f"lib{stem}*.so*")), reverse=True)
    names += [f"lib{stem}.so.{version}" for version in versions] + [f"lib{stem}.so"]
    return [name for name in dict.fromkeys(names) if "builtins" not in name and ".alt." not in name]
