import pytest

from jaxrunner.kv_cache import BlockPool


def test_every_block_but_the_null_block_is_lent_once():
    pool = BlockPool(6)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(2) == [4, 5]
    assert pool.num_free == 0
    with pytest.raises(RuntimeError, match="1 blocks asked of a pool with 0 free of 6"):
        pool.allocate(1)


def test_a_pool_without_a_block_to_lend_is_refused():
    with pytest.raises(ValueError, match="at least 2 .* got 1"):
        BlockPool(1)


def published(pool, *hashes):
    blocks = pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    return blocks


def test_a_released_block_is_found_until_it_is_lent_again():
    pool = BlockPool(3)
    (block,) = published(pool, b"a")
    assert pool.find(b"a") == block
    pool.release([block])
    assert (pool.find(b"a"), pool.num_free) == (block, 2)
    pool.allocate(1)  # the other one: nothing is known of it
    assert pool.find(b"a") == block
    assert pool.allocate(1) == [block]
    assert pool.find(b"a") is None


def test_the_least_recently_released_loses_its_content_first():
    pool = BlockPool(5)
    a, b, c, d = published(pool, b"a", b"b", b"c", b"d")
    pool.release([c, a])
    pool.release([d, b])
    pool.share([a])  # used again ...
    pool.release([a])  # ... so now it is the last
    assert [pool.allocate(1)[0] for _ in range(4)] == [c, d, b, a]


def test_a_shared_block_is_free_when_its_last_owner_goes():
    pool = BlockPool(3)
    (block,) = published(pool, b"a")
    pool.share([block])
    pool.release([block])
    assert (pool.num_owners(block), pool.num_free) == (1, 1)
    pool.release([block])
    assert (pool.num_owners(block), pool.num_free) == (0, 2)
    assert pool.num_unowned([block]) == 1
    pool.share([block])  # out of the middle of the free ones
    assert (pool.num_owners(block), pool.num_free) == (1, 1)
    pool.check_accounting({block: 1})


def test_of_two_blocks_with_one_content_the_first_is_found():
    pool = BlockPool(3)
    first, second = published(pool, b"a", b"a")
    assert pool.find(b"a") == first
    pool.release([second])
    assert pool.allocate(1) == [second]  # it had nothing to be found for
    assert pool.find(b"a") == first


def test_after_forget_all_nothing_is_found_and_all_can_be_lent():
    pool = BlockPool(5)
    a, b, c, _ = published(pool, b"a", b"b", b"c", b"d")
    pool.release([c, b])
    pool.forget_all()
    assert [pool.find(h) for h in (b"a", b"b", b"c", b"d")] == [None] * 4 and pool.num_cached == 0
    pool.check_accounting({a: 1, 4: 1})
    assert sorted(pool.allocate(2)) == [b, c]


def test_check_accounting_names_what_is_wrong():
    pool = BlockPool(4)
    pool.allocate(2)
    pool.check_accounting({1: 1, 2: 1})
    with pytest.raises(RuntimeError, match="block 2 counts 1 owners, 0 requests hold it"):
        pool.check_accounting({1: 1})
    pool._free.append(1)
    with pytest.raises(RuntimeError, match="block 1 is owned, and also free"):
        pool.check_accounting({1: 1, 2: 1})
    pool._free.clear()
    with pytest.raises(RuntimeError, match=r"free, cached-free, owned, null = \(0, 0, 2, 1\), in all 4"):
        pool.check_accounting({1: 1, 2: 1})
