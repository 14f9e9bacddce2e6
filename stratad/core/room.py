"""Room: which images have to go before a capture, or a put, finds the granules and the budgets that it needs.

No image is ended here: the caller has the end of the victims written down, drops them, and only then reserves. The
images whose last use is longest ago go first; what is pinned, taken or read stays, and so does what a capture needs.
"""

from collections.abc import Mapping

from shm.extent import GRANULE_BYTES
from stratad.core.catalog import Catalog
from stratad.core.failures import Refusal
from stratad.core.images import Chunk, Draft, Hints, Image


def shortfall(catalog: Catalog, need: Mapping[str, int]) -> dict[str, int]:
    """Granules that each worker's arena lacks of `need` as it is now, without evicting; empty: none."""
    return {w: n - catalog.arenas[w].free_granules for w, n in need.items() if n > catalog.arenas[w].free_granules}


def victims(
    catalog: Catalog, draft: Draft, need: Mapping[str, int], hints: Hints | None = None, *, staged: bool = False
) -> list[Image]:
    """The images that must go before `Catalog.stage` (of a draft that is `staged` already: `fill`) finds room: the
    least recently used that nobody needs, nor its hints. `need` is what `needed_granules` says of the draft.

    Raises:
        Refusal: ``no_space`` (what is left is pinned or in use) or ``too_large`` (it could never fit).
    """
    total_bytes = sum(need.values()) * GRANULE_BYTES
    for worker, granules in need.items():
        if granules > catalog.arenas[worker].total_granules:
            raise Refusal(
                "too_large",
                f"the image needs {granules * GRANULE_BYTES} bytes on {worker}, whose arena has "
                f"{catalog.arenas[worker].total_granules * GRANULE_BYTES}",
            )
    if total_bytes > catalog.budget_bytes:
        raise Refusal("too_large", f"the image needs {total_bytes} bytes, the budget is {catalog.budget_bytes}")
    previous = catalog.previous(draft)
    keep = (previous, None if hints is None else hints.image)
    return _victims(catalog, need, total_bytes, keep, new_images=0 if previous or draft.partial or staged else 1)


def put_victims(catalog: Catalog, draft: Draft) -> list[Image]:
    """The images that must go before `Catalog.begin_put` finds room.

    Raises:
        Refusal: as in `victims`.
    """
    token_bytes = len(draft.tokens)
    if token_bytes > catalog.budget_bytes:
        raise Refusal("too_large", f"the tokens have {token_bytes} bytes, the budget is {catalog.budget_bytes}")
    previous = catalog.previous(draft)
    return _victims(catalog, {}, token_bytes, (previous,), new_images=0 if previous else 1)


def excess(catalog: Catalog) -> list[Image]:
    """What has to go of adopted images, where the budget is smaller than it was; the oldest that nobody pinned. Until
    it has gone the catalog knows that it is `over_budget`.
    """
    try:
        found = _victims(catalog, {}, 0, (), new_images=0)
    except Refusal:
        found = [image for image in catalog.images.values() if image.evictable]
        catalog.over_budget = True
    catalog.over_budget = catalog.over_budget or bool(found)
    return found


def _victims(
    catalog: Catalog, need: Mapping[str, int], total_bytes: int, keep: tuple[Image | None, ...], *, new_images: int
) -> list[Image]:
    """Least recently used images whose end makes room for `need` (granules by worker). The images in `keep` stay:
    what the capture will supersede is kept until the new one is published.

    Raises:
        Refusal: ``no_space``: even all of them would not do.
    """
    short = shortfall(catalog, need)
    held_bytes = catalog.held_bytes
    over_bytes = held_bytes + total_bytes - catalog.budget_bytes
    held_images = catalog.held_images
    over_images = held_images + new_images - catalog.budget_images
    found: list[Image] = []
    dying: dict[Chunk, int] = {}
    by_age = catalog.by_age()
    while short or over_bytes > 0 or over_images > 0:
        image = next(by_age, None)
        if image is None:
            raise Refusal(
                "no_space",
                f"no room for {total_bytes} bytes: {held_bytes} of {catalog.budget_bytes} bytes and {held_images} of "
                f"{catalog.budget_images} images are held; what is left is pinned, taken or being read, or no "
                f"published image yet: {catalog.capturing_count} are being captured, {catalog.open_puts} puts are "
                f"open, {len(catalog.transits)} images are on their way between slots",
            )
        if not image.evictable or any(image is kept for kept in keep):
            continue
        if over_bytes <= 0 and over_images <= 0 and short.keys().isdisjoint(image.scope.workers):
            continue  # its end would be for nothing
        found.append(image)
        over_images -= 1
        over_bytes -= image.put_token_bytes
        for chunk in image.chunks():
            dying[chunk] = dying.get(chunk, 0) + 1
            if dying[chunk] == chunk.references and not chunk.reads:
                over_bytes -= chunk.granule_bytes
                worker = chunk.key.worker
                if worker in short:
                    short[worker] -= catalog.arenas[worker].usable_granules(chunk.place.extents)
                    if short[worker] <= 0:
                        del short[worker]
    return found
