"""Which earlier states are kept of a slot, and where."""

from transformers import Cache, DynamicCache

from stratad.engines.checkpoints import KeptStates

TOKENS = list(range(100, 200))


def test_states_of_a_cache_are_found_in_ascending_order() -> None:
    kept, cache = KeptStates(slots=3, kept=2), DynamicCache()
    assert kept.state_slots == 9
    assert kept.room == 2
    assert kept.of(1, cache, TOKENS) == []
    places = {position: kept.note(1, cache, TOKENS[:position]) for position in (50, 20)}
    assert sorted(places.values()) == [5, 6]  # those of slot 1, behind the newest state of every slot
    assert kept.of(1, cache, TOKENS) == [(20, places[20]), (50, places[50])]
    assert kept.of(0, cache, TOKENS) == []


def test_the_oldest_gives_way() -> None:
    kept, cache = KeptStates(slots=1, kept=2), DynamicCache()
    first, second, third = (kept.note(0, cache, TOKENS[:position]) for position in (10, 20, 30))
    assert third == first != second
    assert kept.of(0, cache, TOKENS) == [(20, second), (30, third)]


def test_a_position_is_kept_once() -> None:
    kept, cache = KeptStates(slots=1, kept=3), DynamicCache()
    kept.note(0, cache, TOKENS[:10])
    kept.note(0, cache, TOKENS[:20])
    again = kept.note(0, cache, TOKENS[:10])
    assert [position for position, _ in kept.of(0, cache, TOKENS)] == [10, 20]
    assert len({state_slot for _, state_slot in kept.of(0, cache, TOKENS)}) == 2
    assert (10, again) in kept.of(0, cache, TOKENS)


def test_states_of_another_cache_or_of_other_tokens_are_not_taken_along() -> None:
    kept, cache, other = KeptStates(slots=1, kept=3), DynamicCache(), DynamicCache()
    kept.note(0, cache, TOKENS[:10])
    assert kept.of(0, other, TOKENS) == []  # of the same tokens, but read otherwise
    assert kept.of(0, cache, [1, *TOKENS[1:]]) == []  # the cache was emptied and has read others
    assert kept.of(0, cache, TOKENS[:10]) == []  # the newest state is there itself
    assert kept.of(0, cache, TOKENS[:5]) == []
    kept.note(0, other, TOKENS[:20])
    assert kept.of(0, cache, TOKENS) == []
    assert [position for position, _ in kept.of(0, other, TOKENS)] == [20]


def test_a_cache_is_not_held_back() -> None:
    kept = KeptStates(slots=1, kept=1)
    caches: list[Cache] = [DynamicCache()]
    kept.note(0, caches[0], TOKENS[:10])
    caches.clear()
    assert kept.of(0, DynamicCache(), TOKENS) == []
