"""What is found of a prefix, who may find it, and what goes first when room is needed."""

import pytest

from jaxrunner.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheManager
from jaxrunner.request import Request
from jaxrunner.sampling_params import SamplingParams
from tests.cases_by_id import case


def manager(num_blocks=40, block_sizes=(4,), **options) -> KVCacheManager:
    groups = [KVCacheGroup([i], FullAttentionSpec(size, 1, 8)) for i, size in enumerate(block_sizes)]
    return KVCacheManager(KVCacheConfig(num_blocks, groups), **options)


def request(name, tokens, salt=None, **params) -> Request:
    return Request(name, tokens, SamplingParams(**params), cache_salt=salt)


def admit(m, r) -> int:
    """As the scheduler does, up to the point where the whole prompt is computed. Returns the tokens found."""
    found, num_hit = m.get_computed_blocks(r)
    assert m.allocate_slots(r, r.num_tokens, found) is not None
    r.num_computed_tokens = r.num_tokens
    m.cache_blocks(r)
    m.check_accounting()
    return num_hit


def hit(m, tokens, salt=None) -> int:
    return m.get_computed_blocks(request("probe", tokens, salt))[1]


def test_a_prefix_hit_leaves_at_least_one_token():
    given, expected = case("runner_cases", "prefix_hit_cap")
    hits = []
    for n in given["num_tokens"]:
        m = manager(block_sizes=(given["block"],))
        admit(m, request("a", list(range(80))))
        hits.append(hit(m, list(range(n))))
    assert hits == expected["hit"]


def test_a_hit_is_shared_and_the_rest_is_new():
    m = manager()
    a, b = request("a", list(range(11))), request("b", [*range(8), 99, 99, 99, 99, 99])
    admit(m, a)
    assert admit(m, b) == 8
    (of_a,), (of_b,) = m.get_blocks(a), m.get_blocks(b)
    assert of_a[:2] == of_b[:2] and not set(of_a[2:]) & set(of_b[2:])
    assert (len(of_a), len(of_b)) == (3, 4)
    m.free(a)
    m.check_accounting()
    m.free(b)
    assert m.num_free_blocks == 39


def test_only_computed_full_blocks_are_found():
    m = manager()
    a = request("a", list(range(12)))
    found, _ = m.get_computed_blocks(a)
    m.allocate_slots(a, 12, found)
    m.cache_blocks(a)  # scheduled, nothing computed
    assert hit(m, list(range(12))) == 0
    a.num_computed_tokens = 7
    m.cache_blocks(a)
    assert hit(m, list(range(12))) == 4
    a.num_computed_tokens = 12
    m.cache_blocks(a)
    assert hit(m, list(range(13))) == 12


def test_generated_tokens_are_found_too():
    m = manager()
    a = request("a", [1, 2, 3])
    admit(m, a)
    a.append_output_tokens([4, 5, 6])
    assert m.allocate_slots(a, 6) == ([2],)
    a.num_computed_tokens = 6
    m.cache_blocks(a)
    assert hit(m, [1, 2, 3, 4, 5]) == 4


def test_salts_keep_apart_and_the_same_salt_shares():
    m = manager()
    admit(m, request("a", list(range(9)), salt="a"))
    assert [hit(m, list(range(9)), salt) for salt in ("b", None, "", "a")] == [0, 0, 0, 8]


@pytest.mark.parametrize("params", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}])
def test_some_read_nothing_but_are_found(params):
    m = manager()
    admit(m, request("a", list(range(9))))
    assert admit(m, request("b", [*range(8), 7, 7, 7, 7], **params)) == 0
    assert hit(m, [*range(8), 7, 7, 7, 7, 1]) == 12


def test_without_prefix_caching_nothing_is_found():
    m = manager(enable_prefix_caching=False)
    a = request("a", list(range(9)))
    admit(m, a)
    m.free(a)
    assert hit(m, list(range(9))) == 0 and not a.block_hashes
    assert m.pools[0].num_cached == 0


def test_tails_are_lost_before_heads():
    m = manager(num_blocks=7)
    a = request("a", list(range(24)))
    admit(m, a)
    m.free(a)
    left = []
    for i in range(1, 6):
        m.allocate_slots(request(f"n{i}", [0]), 1)
        left.append(hit(m, list(range(25))))
    assert left == [20, 16, 12, 8, 4]


def test_a_hit_is_not_lent_out_as_new():
    m = manager(num_blocks=5)
    a = request("a", list(range(16)))
    admit(m, a)
    m.free(a)  # all four blocks are free, and all can be found
    b = request("b", [*range(8), 9, 9, 9, 9, 9, 9])
    assert admit(m, b) == 8
    assert len(set(m.get_blocks(b)[0])) == 4


def test_found_free_blocks_count_as_taken():
    m = manager(num_blocks=5)
    a = request("a", list(range(8)))
    admit(m, a)
    m.free(a)
    b = request("b", list(range(20)))
    found, num_hit = m.get_computed_blocks(b)
    assert num_hit == 8 and m.num_free_blocks == 4
    assert m.allocate_slots(b, 20, found) is None  # needs 5: the two found and three more
    assert m.num_free_blocks == 4 and found == m.get_computed_blocks(b)[0]
    assert m.allocate_slots(b, 16, found, keep_free=1) is None
    assert m.allocate_slots(b, 16, found) is not None
    m.check_accounting()


def test_allocate_slots_says_what_is_new():
    m = manager(num_blocks=6)
    a = request("a", [1] * 6)
    assert m.allocate_slots(a, 6, m.get_computed_blocks(a)[0]) == ([1, 2],)
    assert m.allocate_slots(a, 8) == ()
    assert m.allocate_slots(a, 9) == ([3],)
    assert m.allocate_slots(a, 25) is None
    assert m.get_blocks(a) == ([1, 2, 3],)
    assert m.usage == pytest.approx(3 / 5)


def test_a_twin_takes_over_where_the_first_was_lost():
    m = manager(num_blocks=6)
    a, b = request("a", list(range(8))), request("b", list(range(8)))
    for r in (a, b):  # both compute the same at the same time: neither finds the other
        m.allocate_slots(r, 8, m.get_computed_blocks(r)[0])
    for r in (a, b):
        r.num_computed_tokens = 8
        m.cache_blocks(r)
    m.free(a)
    m.allocate_slots(request("c", [0] * 12), 12)  # the fifth block, and both of a's
    assert hit(m, list(range(9))) == 0
    m.free(b)
    assert hit(m, list(range(9))) == 8
    m.check_accounting()


def test_nothing_from_before_a_reset_is_found():
    m = manager()
    gone, running = request("gone", list(range(9))), request("running", [5] * 8)
    admit(m, gone)
    m.free(gone)
    waiting = request("waiting", list(range(9)))
    assert m.get_computed_blocks(waiting)[1] == 8  # hashed before the reset
    admit(m, running)
    m.reset_prefix_cache()
    assert m.get_computed_blocks(waiting)[1] == 0
    assert hit(m, [5] * 9) == 0
    running.append_output_tokens([5] * 4)  # goes on, on top of what was before
    m.allocate_slots(running, 12)
    running.num_computed_tokens = 12
    m.cache_blocks(running)
    m.free(running)
    assert hit(m, [5] * 13) == 0
    assert admit(m, waiting) == 0  # computed afresh, so it can be found
    assert hit(m, list(range(9))) == 8
    m.check_accounting()


def test_groups_agree_on_a_hit():
    m = manager(block_sizes=(4, 8))
    a = request("a", list(range(29)))
    admit(m, a)
    assert [len(held) for held in m.get_blocks(a)] == [8, 4]
    assert [hit(m, list(range(n))) for n in (8, 9, 16, 17, 28, 29, 40)] == [0, 8, 8, 16, 24, 24, 24]
    blocks, _ = m.get_computed_blocks(request("probe", list(range(20))))
    assert blocks == (m.get_blocks(a)[0][:4], m.get_blocks(a)[1][:2])
    m.free(a)
    m.pools[1].forget_all()  # one group has lost it
    assert hit(m, list(range(29))) == 0


def test_groups_of_unrelated_block_sizes():
    m = manager(block_sizes=(4, 6))
    admit(m, request("a", list(range(30))))
    assert [hit(m, list(range(n))) for n in (12, 13, 24, 25, 40)] == [0, 12, 12, 24, 24]


def test_each_group_has_its_own_blocks_and_both_must_have_room():
    m = manager(num_blocks=4, block_sizes=(4, 8))
    a = request("a", [1] * 12)
    assert m.allocate_slots(a, 12) == ([1, 2, 3], [1, 2])
    b = request("b", [1])
    assert m.allocate_slots(b, 1) is None  # one group has a block left, the other none
    assert m.pools[1].num_free == 1
    m.check_accounting()


def test_common_prefix_blocks_are_those_that_everyone_holds():
    m = manager()
    a, b, c = (request(name, [*range(8), ord(name), 1, 1, 1, 1]) for name in "abc")
    admit(m, a)
    assert m.num_common_prefix_blocks([a]) == [0]  # alone: nothing is shared
    admit(m, b)
    assert m.num_common_prefix_blocks([a, b]) == [2]
    admit(m, c)
    assert m.num_common_prefix_blocks([c, a]) == [2]
    d = request("d", [*range(4), 77, 77, 77, 77, 77])
    admit(m, d)
    assert m.num_common_prefix_blocks([a, b, c, d]) == [1]
    admit(m, request("e", [9] * 5))
    assert m.num_common_prefix_blocks([a]) == [0]
    assert m.num_common_prefix_blocks([]) == [0]


def test_check_accounting_finds_a_block_held_twice_by_one():
    m = manager()
    a = request("a", [1] * 8)
    admit(m, a)
    m.get_blocks(a)[0][1] = m.get_blocks(a)[0][0]
    with pytest.raises(RuntimeError, match="'a' holds a block twice in group 0"):
        m.check_accounting()
