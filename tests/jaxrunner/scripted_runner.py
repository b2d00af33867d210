"""A runner without a model: the token after t is ``successor[t]``. It fails when it is told to."""

from jaxrunner.config import RunnerConfig
from jaxrunner.protocol import ModelRunnerOutput, SchedulerOutput


class ScriptedRunner:
    """Attributes:
    fail_at: number of the step that raises ``failure``, halfway through; None: never.
    steps: how often a step was run.
    """

    def __init__(self, successor: dict[int, int], **config) -> None:
        self.successor = successor
        self.config = RunnerConfig(**config)
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.steps = 0
        self.fail_at: int | None = None
        self.failure: BaseException = RuntimeError("the device is gone")

    def reset(self) -> None:
        self.tokens.clear()
        self.computed.clear()

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.steps += 1
        for req_id in plan.finished_req_ids:
            self.tokens.pop(req_id, None)
        for data in plan.scheduled_new_reqs:
            assert data.req_id not in self.tokens
            self.tokens[data.req_id] = list(data.prompt_token_ids)
            self.computed[data.req_id] = data.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self.computed[req_id] = computed
        if self.steps == self.fail_at:
            raise self.failure
        sampled = []
        for req_id, count in plan.num_scheduled_tokens.items():
            tokens = self.tokens[req_id]
            complete = self.computed[req_id] + count == len(tokens)
            sampled.append([self.successor[tokens[-1]]] if complete else [])
            tokens += sampled[-1]
        ids = list(plan.num_scheduled_tokens)
        return ModelRunnerOutput(ids, {req_id: row for row, req_id in enumerate(ids)}, sampled)
