"""Options of an LLM small enough for a test: one bucket of each kind, so that it compiles little."""

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "token_buckets": [16],
    "logits_buckets": [4],
    "block_size": 4,
    "quiet": True,
}
