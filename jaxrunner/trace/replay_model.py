"""Running a recorded trace again on a model: its sampled tokens are compared too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxrunner.config import RunnerConfig
from jaxrunner.loading import load_model
from jaxrunner.protocol import SchedulerOutput
from jaxrunner.runner import ModelRunner
from jaxrunner.trace.encode import Geometry
from jaxrunner.trace.reader import Line
from jaxrunner.trace.recorder import MemoryRecorder


class ModelStepper:
    """A runner whose steps are recorded in memory."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._recorder = runner.recorder = MemoryRecorder(Geometry.of(runner.batch))

    @classmethod
    def load(cls, model: str, dtype: str, header: Mapping[str, Any]) -> ModelStepper:
        """A runner set up as the trace's header says.

        Raises:
            ValueError: the header has no runner's configuration, or the model cannot be loaded.
        """
        written = header.get("config")
        if not written:
            raise ValueError("the trace was not recorded by a ModelRunner: replay it without a model")
        known = {f.name for f in fields(RunnerConfig)} - {"trace", "executables"}
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in written.items() if name in known}
        # As many blocks as there were then, whatever memory there is now.
        config = RunnerConfig(**values | {"num_blocks": header["geometry"]["num_blocks"]})
        loaded = load_model(model, dtype=dtype)
        eos = tuple(header["geometry"]["eos_token_ids"])
        return cls(ModelRunner(loaded.decoder, config, eos_token_ids=eos))

    def run(self, plan: SchedulerOutput, recorded: Line) -> Line:
        self._runner.execute_model(plan)
        line = self._recorder.lines.pop()
        line["step"] = recorded["step"]
        return line

    def reset(self) -> None:
        self._runner.reset()
        self._recorder.lines.clear()
