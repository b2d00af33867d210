"""Who owns which block of the key/value caches. Host side and plain Python: block ids go in and out, never
arrays.

``spec`` says how large blocks are, ``hashing`` when two blocks hold the same, ``block_pool`` lends the blocks
of one cache group, and ``manager`` keeps every group's blocks of every request.
"""

from jaxrunner.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool
from jaxrunner.kv_cache.manager import KVCacheManager, PrefixCacheStats
from jaxrunner.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup

__all__ = [
    "NULL_BLOCK_ID",
    "BlockPool",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheManager",
    "PrefixCacheStats",
]
