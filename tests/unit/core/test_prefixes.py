"""The prefix index against a scan of all sequences."""

from hypothesis import given
from hypothesis import strategies as st

from stratad.core.prefixes import PrefixIndex, common_tokens
from tests.support.core_harness import pack_tokens

sequences = st.lists(st.lists(st.sampled_from([1, 2, 256, 2**31]), min_size=1, max_size=8), max_size=12)


@given(sequences, st.lists(st.sampled_from([1, 2, 256, 2**31]), max_size=9), st.integers(1, 4))
def test_longest_prefix_is_the_one_a_scan_finds(stored: list[list[int]], query: list[int], block: int) -> None:
    index = PrefixIndex(block)
    for number, tokens in enumerate(stored):
        index.add("s", pack_tokens(tokens), number)

    def shared(tokens: list[int]) -> int:
        count = 0
        while count < min(len(tokens), len(query)) and tokens[count] == query[count]:
            count += 1
        return count

    best = max((shared(tokens) for tokens in stored), default=0)
    found = index.longest_common("s", pack_tokens(query))
    assert (found[1] if found else 0) == best
    if found:
        assert shared(stored[found[0]]) == best
    whole = max((len(t) for t in stored if shared(t) == len(t)), default=0)
    found = index.longest_whole("s", pack_tokens(query))
    assert (found[1] if found else 0) == whole
    assert index.longest_common("other", pack_tokens(query)) is None
    for number, tokens in enumerate(stored):
        index.remove("s", pack_tokens(tokens), number)
    assert len(index) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80), st.integers(1, 4))
def test_the_index_holds_what_was_added_and_not_removed(steps: list[tuple[bool, int]], block: int) -> None:
    index = PrefixIndex(block)
    there: set[int] = set()
    for adds, token in steps:
        if adds and token not in there:
            index.add("s", pack_tokens([token, token]), token)
            there.add(token)
        elif not adds and token in there:
            index.remove("s", pack_tokens([token, token]), token)
            there.remove(token)
        assert len(index) == len(there)
        found = {token for token in range(31) if index.longest_whole("s", pack_tokens([token, token, 99]))}
        assert found == there
        assert {token for token in range(31) if index.longest_common("s", pack_tokens([token]))} == there


def test_common_tokens_counts_tokens_not_bytes() -> None:
    assert common_tokens(pack_tokens([1, 0x01020304]), pack_tokens([1, 0x05020304])) == 1
    assert common_tokens(b"", pack_tokens([1])) == 0
