import pytest

from jaxrunner.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=3, head_dim=64, dtype="bfloat16")


def test_sizes():
    assert SPEC.page_size_bytes == 2 * 16 * 3 * 64 * 2
    groups = [KVCacheGroup(range(5), SPEC), KVCacheGroup([5, 6], FullAttentionSpec(8, 3, 64, "float32"))]
    config = KVCacheConfig(10, groups)
    assert config.bytes_per_block == 5 * SPEC.page_size_bytes + 2 * 2 * 8 * 3 * 64 * 4
    assert config.max_request_tokens == 9 * 8  # of the group whose blocks hold least; block 0 isn't used


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullAttentionSpec(0, 1, 1), "block_size must be an integer of at least 1, got 0"),
        (lambda: FullAttentionSpec(1, 1, 2.5), "head_dim must be an integer of at least 1, got 2.5"),
        (lambda: FullAttentionSpec(1, 1, 1, "float12"), "dtype must be one of .*'bfloat16'.* got 'float12'"),
        (lambda: KVCacheGroup([], SPEC), "layer_indices is empty"),
        (lambda: KVCacheConfig(1, [KVCacheGroup([0], SPEC)]), "num_blocks must be .* at least 2 .* got 1"),
        (lambda: KVCacheConfig(9, []), "groups is empty"),
        (lambda: KVCacheConfig(9, [KVCacheGroup([0, 1], SPEC), KVCacheGroup([1], SPEC)]), r"layers \[1\] stand more"),
    ],
)
def test_nonsense_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
