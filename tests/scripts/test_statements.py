"""scripts/host_bench/statements.py: whose time it is, how often it ran, and what counts as a statement."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from scripts.host_bench.statements import Spent, Statement, StatementClock, source_of

PROGRAM = """\
now = 0


def wait(nanoseconds):
    global now
    now += nanoseconds


def outer():
    total = (
        inner(1)
        + inner(2)
    )
    return sum(slow(i) for i in range(3)) + total


def inner(n):
    wait(500)
    return n


def slow(i):
    wait(300)
    return i


def catches():
    fails()
    wait(1000)
    return 8


def fails():
    try:
        raise_it()
    except ValueError:
        return 7


def raise_it():
    raise_deeper()


def raise_deeper():
    raise ValueError
"""


@pytest.fixture
def program(tmp_path: Path) -> ModuleType:
    file = tmp_path / "watched_program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("watched_program", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clock(program: ModuleType) -> Iterator[StatementClock]:
    clock = StatementClock(Path(str(program.__file__)), clock=lambda: program.now)
    yield clock
    clock.close()


def run(clock: StatementClock, function) -> dict[str, Spent]:
    with clock.watching():
        first = clock.mark()
        function()
        last = clock.mark()
    return {source_of(s): spent for s, spent in clock.spent_between(first, last).items()}


def test_time_is_the_statements_own(program: ModuleType, clock: StatementClock) -> None:
    spent = run(clock, program.outer)
    assert {source: s.nanoseconds for source, s in spent.items() if s.nanoseconds} == {"now += nanoseconds": 1900}


def test_what_is_not_watched_is_its_callers(program: ModuleType, clock: StatementClock) -> None:
    def foreign(n: int) -> int:
        program.now += 70
        return n

    program.slow = foreign
    spent = run(clock, program.outer)
    times = {source: s.nanoseconds for source, s in spent.items() if s.nanoseconds}
    assert times == {"now += nanoseconds": 1000, "return sum(slow(i) for i in range(3)) + total": 210}


def test_statements_are_counted_whole(program: ModuleType, clock: StatementClock) -> None:
    spent = run(clock, program.outer)
    assert spent["total = ( inner(1) + inner(2) )"].times == 1
    assert (spent["wait(500)"].times, spent["wait(300)"].times, spent["return i"].times) == (2, 3, 3)
    # A generator's body is the statement's that runs through it.
    assert spent["return sum(slow(i) for i in range(3)) + total"].times == 1


def test_an_exception_leaves_the_functions_it_passes(program: ModuleType, clock: StatementClock) -> None:
    spent = run(clock, program.catches)
    assert spent["raise_deeper()"].times == spent["raise ValueError"].times == 1
    assert spent["return 7"].times == spent["return 8"].times == 1
    assert {source: s.nanoseconds for source, s in spent.items() if s.nanoseconds} == {"now += nanoseconds": 1000}


def test_readings_are_counted(program: ModuleType, clock: StatementClock) -> None:
    spent = run(clock, program.outer)
    assert (
        sum(s.readings for s in spent.values()) == clock.mark() // 3 - 1 - 1
    )  # three words each; not the call of outer
    assert spent["now += nanoseconds"].readings == 5


def test_nothing_is_read_outside(program: ModuleType, clock: StatementClock) -> None:
    program.outer()
    assert clock.mark() == 0
    run(clock, program.outer)
    end = clock.mark()
    program.outer()
    assert clock.mark() == end > 0
    clock.forget()
    assert clock.mark() == 0


def test_one_profiler_at_a_time(program: ModuleType, clock: StatementClock) -> None:
    with pytest.raises(ValueError, match="in use"):
        StatementClock(Path(str(program.__file__)))


def test_a_compound_statement_is_its_head(program: ModuleType) -> None:
    file, lines = str(program.__file__), PROGRAM.splitlines()
    assert source_of(Statement(file, lines.index("def inner(n):") + 1, "")) == "def inner(n):"
    assert source_of(Statement(file, lines.index("    try:") + 1, "")) == "try:"
