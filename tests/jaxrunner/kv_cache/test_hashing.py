from hypothesis import given
from hypothesis import strategies as st

from jaxrunner.kv_cache.hashing import chain_root, extend_chain

ROOT = chain_root(0)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def chain(tokens, block_size=4, root=ROOT):
    hashes = []
    extend_chain(hashes, tokens, block_size, root)
    return hashes


@given(TOKENS, st.integers(1, 5), st.lists(st.integers(0, 40), max_size=4))
def test_a_chain_grown_in_pieces_is_the_same(tokens, block_size, stops):
    hashes = []
    for stop in [*sorted(stops), len(tokens)]:
        extend_chain(hashes, tokens[:stop], block_size, hashes[-1] if hashes else ROOT)
    assert hashes == chain(tokens, block_size)
    assert len(hashes) == len(tokens) // block_size  # full blocks only


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_equal_hashes_mean_equal_histories(a, b, block_size):
    for i, (x, y) in enumerate(zip(chain(a, block_size), chain(b, block_size), strict=False), 1):
        assert (x == y) == (a[: i * block_size] == b[: i * block_size])


def test_equal_tokens_after_another_history_differ():
    assert chain([1, 2, 3, 4, 9, 9, 9, 9])[1] != chain([1, 2, 3, 5, 9, 9, 9, 9])[1]


def test_roots_differ_by_epoch_kind_and_value():
    roots = [
        chain_root(0),
        chain_root(1),
        chain_root(0, [("cache_salt", "")]),
        chain_root(0, [("cache_salt", "a")]),
        chain_root(0, [("lora", "a")]),
        chain_root(0, [("cache_salt", "ab")]),
        chain_root(0, [("cache_salta", "b")]),
        chain_root(0, [("cache_salt", "a"), ("lora", "a")]),
        chain_root(0, [("cache_salt", "\ud800")]),
    ]
    assert len({root for root in roots} | {chain([1] * 4, root=root)[0] for root in roots}) == 2 * len(roots)
