"""A naive model of the persistent batch: dictionaries and lists, no rows, no indices, no NumPy."""

from dataclasses import dataclass, field

from jaxrunner.protocol import SchedulerOutput


@dataclass
class NaiveRequest:
    tokens: list[int]
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class NaiveBatch:
    """What every array of a step must be, request by request."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.requests: dict[str, NaiveRequest] = {}

    def step(self, so: SchedulerOutput) -> dict[str, dict]:
        """Per scheduled request: its tokens, positions, slots, sequence length and whether its sample is discarded."""
        for req_id in so.finished_req_ids:
            self.requests.pop(req_id, None)
        for req_id in so.preempted_req_ids:
            if req_id in self.requests:
                self.requests[req_id].blocks = []
        for data in so.scheduled_new_reqs:
            prefill = data.prompt_token_ids if data.prefill_token_ids is None else data.prefill_token_ids
            self.requests[data.req_id] = NaiveRequest(
                list(prefill), len(data.prompt_token_ids), list(data.block_ids[0]), data.num_computed_tokens
            )
        cached = so.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            request, blocks = self.requests[req_id], cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                request.blocks = []
            request.blocks = request.blocks + list(blocks[0] if blocks else [])
            request.computed = cached.num_computed_tokens[i]
        return {req_id: self._view(so, req_id) for req_id in so.num_scheduled_tokens}

    def _view(self, so: SchedulerOutput, req_id: str) -> dict:
        request, drafts = self.requests[req_id], so.scheduled_spec_decode_tokens.get(req_id, [])
        end = request.computed + so.num_scheduled_tokens[req_id]
        positions = list(range(request.computed, end))
        sequence, size = request.tokens + drafts, self.block_size
        return {
            "tokens": [sequence[p] for p in positions],
            "positions": positions,
            "slots": [request.blocks[p // size] * size + p % size for p in positions],
            "seq_len": end,
            "discard": end < len(request.tokens),
            "blocks": request.blocks[: -(-end // size)],
            "logits_rows": 1 + len(drafts),
        }
