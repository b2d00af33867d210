"""Break the handling of one column, or one effect of one operation, and the naive comparison must see it.

Two kinds of mutant, made from what is declared and defined, so that a column or an operation added later is broken too:

- by column: ``update_states``, ``record_sampled`` or a swap does everything except for one column (or table, or array
  of rows), at the indices that entered, that were freed, that grew;
- by operation: each function of ``jaxrunner.batch`` that is seen to change an array in the scenarios leaves it as it
  was, wholly or in the last entry it changed.
"""

import copy
import hashlib
import importlib
import pkgutil
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import jaxrunner.batch
from jaxrunner.batch import BlockTable, InputBatch
from jaxrunner.batch.columns import declared_columns
from tests.jaxrunner.batch import books
from tests.jaxrunner.batch.books import Driver
from tests.jaxrunner.batch.naive import Limits
from tests.jaxrunner.batch.scenarios import SCENARIOS

State = dict[str, Any]
ROW_ARRAYS = ("idx_mapping", "row_of_index", "req_ids", "req_id_to_index", "num_scheduled", "num_computed")


def state_of(batch: InputBatch) -> State:
    """What the batch says it holds: declared columns, tables, the order of rows."""
    state: State = {f"column {c.name}": batch.columns[c.name] for c in batch.columns.columns}
    for group, table in enumerate(batch.block_table.tables):
        state |= {f"table {group}": table.table, f"num_blocks {group}": table.num_blocks}
    return state | {name: getattr(batch, name) for name in ROW_ARRAYS}


def put_back(now: Any, before: Any, where: Any = slice(None)) -> bool:
    """``now`` becomes ``before`` again, at ``where``, in place; whether that changed anything."""
    changed = not (np.array_equal(now[where], before[where]) if isinstance(now, np.ndarray) else now == before)
    if isinstance(now, np.ndarray):
        now[where] = before[where]
    elif isinstance(now, list):
        now[:] = before
    else:
        now.clear()
        now.update(before)
    return changed


def killed(scenarios: Callable[[], object]) -> bool:
    """Some check, or the code itself, stumbles."""
    try:
        scenarios()
    except Exception:
        return True
    return False


def run_all() -> None:
    for scenario in SCENARIOS:
        scenario()


def test_the_scenarios_pass_as_they_are() -> None:
    run_all()


# ---------------------------------------------------------------------- by column
def indices(batch: InputBatch) -> dict[str, int]:
    """Request indices by id, as far as there are any."""
    return {r: int(s.request_index) for r, s in batch.requests.items() if s.request_index >= 0}


def at_entered(before: dict[str, int], after: dict[str, int], entered: set[str]) -> list[int]:
    return [i for r, i in after.items() if before.get(r) != i or r in entered]


def at_freed(before: dict[str, int], after: dict[str, int], entered: set[str]) -> list[int]:
    return sorted(set(before.values()) - set(after.values()))


def at_kept(before: dict[str, int], after: dict[str, int], entered: set[str]) -> list[int]:
    return [i for r, i in after.items() if before.get(r) == i and r not in entered]


COLUMNS = [c.name for c in declared_columns(8, 1)]
CLEARED = [c.name for c in declared_columns(8, 1) if c.valid is None]
TABLES = ["table 0", "num_blocks 0", "table 1", "num_blocks 1"]
EFFECTS = [
    *(("update_states", at_entered, f"column {name}") for name in COLUMNS),
    *(("update_states", at_freed, f"column {name}") for name in CLEARED),
    *(("update_states", at_entered, name) for name in TABLES),
    *(("update_states", at_freed, name) for name in TABLES),
    *(("update_states", at_kept, name) for name in TABLES),
    *(
        ("update_states", at_kept, f"column {name}")
        for name in ("num_computed_tokens", "num_draft_tokens", "token_ids")
    ),
    *(("record_sampled", at_kept, f"column {name}") for name in ("num_tokens", "token_ids")),
]


@pytest.mark.parametrize(
    ("function", "where", "name"), EFFECTS, ids=[f"{f}-{w.__name__}-{n}".replace(" ", "-") for f, w, n in EFFECTS]
)
def test_a_column_that_is_forgotten(function: str, where: Callable, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, changes = getattr(books, function), [0]

    def wrong(batch: InputBatch, *arguments: Any, **options: Any) -> Any:
        state = state_of(batch)
        before, held = copy.deepcopy(state.get(name)), indices(batch)
        result = right(batch, *arguments, **options)
        if before is not None:
            plan = arguments[0]
            entered = {d.req_id for d in getattr(plan, "scheduled_new_reqs", ())}
            at = where(held, indices(batch), entered)
            changes[0] += put_back(state[name], before, at)
        return result

    monkeypatch.setattr(books, function, wrong)
    assert killed(run_all), "the batch is right without it"
    assert changes[0], "no scenario has the effect"


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        *(("swap_states", name) for name in ROW_ARRAYS),
        *(("reorder", name) for name in ROW_ARRAYS),
        *(("condense", name) for name in ROW_ARRAYS[:4]),  # a plan's counts come later
    ],
)
def test_rows_that_move_without(operation: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killed(mutant(InputBatch, operation, name, monkeypatch)), "the batch is right without it"


# ---------------------------------------------------------------------- by operation
class Watched(Driver):
    """A driver whose batch can be found while it runs, and which keeps what was there at each comparison."""

    batch_of: InputBatch | None = None
    trace: list[str] = []

    def __init__(self, limits: Limits) -> None:
        Watched.batch_of = None
        super().__init__(limits)
        Watched.batch_of = self.batch
        check = self.checker.check_batch

        def check_and_keep(*arguments: Any, **options: Any) -> None:
            check(*arguments, **options)
            Watched.trace.append(picture(self.batch))

        self.checker.check_batch = check_and_keep  # type: ignore[method-assign]


def picture(batch: InputBatch) -> str:
    """Everything that is valid in a batch, as a digest."""
    state = state_of(batch)
    for c in batch.columns.columns:
        if c.valid is not None:
            behind = np.arange(c.shape[0]) >= batch.columns[c.valid][:, None]
            state[f"column {c.name}"] = np.where(behind, 0, batch.columns[c.name])
    parts = [v.tobytes() if isinstance(v, np.ndarray) else repr(v).encode() for v in state.values()]
    return hashlib.blake2b(b"|".join(parts), digest_size=16).hexdigest()


def traced() -> list[str]:
    """The scenarios, and what was there at each comparison."""
    Watched.trace = []
    for scenario in SCENARIOS:
        scenario(Watched)
    return Watched.trace


def mutant(owner: Any, function: str, name: str, monkeypatch: pytest.MonkeyPatch, last: bool = False) -> Callable:
    """The scenarios with ``function`` leaving the array ``name`` as it was."""
    right = vars(owner)[function]

    def wrong(*arguments: Any, **options: Any) -> Any:
        batch = Watched.batch_of
        before = copy.deepcopy(state_of(batch).get(name)) if batch is not None else None
        result = right(*arguments, **options)
        if batch is not None and before is not None:
            now = state_of(batch)[name]
            if not last:
                put_back(now, before)
            elif isinstance(now, np.ndarray) and (now != before).any():
                put_back(now, before, tuple(at[-1] for at in np.nonzero(now != before)))
        return result

    for holder in holders_of(owner, right):
        monkeypatch.setattr(holder, function, wrong)
    return traced


def batch_modules() -> Iterator[types.ModuleType]:
    yield jaxrunner.batch
    for info in pkgutil.iter_modules(jaxrunner.batch.__path__, "jaxrunner.batch."):
        yield importlib.import_module(info.name)


def holders_of(owner: Any, function: Callable) -> list[Any]:
    """Where a function is looked up: its class, or every module that imported it."""
    if isinstance(owner, type):
        return [owner]
    return [m for m in (*batch_modules(), books) if getattr(m, function.__name__, None) is function]


def operations() -> list[tuple[Any, str]]:
    """Every function and method of ``jaxrunner.batch``, by where it is defined."""
    found: list[tuple[Any, str]] = []
    for module in batch_modules():
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", None) != module.__name__:
                continue
            if isinstance(thing, types.FunctionType):
                found.append((module, name))
            elif isinstance(thing, type):
                methods = (n for n, f in vars(thing).items() if isinstance(f, types.FunctionType))
                found += [(thing, n) for n in methods if not n.startswith("__")]
    return found


def observed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str, str]]:
    """(where, function, array) for every array that the function changes in the scenarios."""
    seen: dict[tuple[Any, str, str], None] = {}

    def spy(owner: Any, name: str) -> None:
        right = vars(owner)[name]

        def watched(*arguments: Any, **options: Any) -> Any:
            batch = Watched.batch_of
            before = copy.deepcopy(state_of(batch)) if batch is not None else {}
            result = right(*arguments, **options)
            if batch is not None and before:
                for array, now in state_of(batch).items():
                    if not np.array_equal(now, before[array]) if isinstance(now, np.ndarray) else now != before[array]:
                        seen[owner, name, array] = None
            return result

        for holder in holders_of(owner, right):
            monkeypatch.setattr(holder, name, watched)

    for owner, name in operations():
        spy(owner, name)
    traced()
    monkeypatch.undo()
    return list(seen)


def test_every_effect_of_every_operation_is_seen() -> None:
    """A mutant may only survive if nothing was different at any comparison: what comes after writes it anew."""
    with pytest.MonkeyPatch.context() as patch:
        found = observed(patch)
    assert len(found) > 40, "few operations were seen to do anything: does the search find them?"
    right, survivors = list(traced()), []
    for owner, function, array in found:
        for last in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                if not killed(mutant(owner, function, array, patch, last)) and Watched.trace != right:
                    survivors.append((owner.__name__, function, array, "its last entry" if last else "all"))
    assert not survivors


def test_a_table_whose_rows_do_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's own operations, some of which the batch has no use for since its columns don't move."""

    def scenario() -> None:
        table, lists = BlockTable(3, 24, 8, 4), [[1, 2], [3], [4, 5, 6]]
        device = np.zeros_like(table.table)

        def check() -> None:
            cells, values = table.take_updates()
            device.reshape(-1)[cells] = values
            for row, ids in enumerate(lists):
                kernel = [2 * i + j for i in ids for j in range(2)]
                assert table.table[row].tolist() == kernel + [0] * (table.width - len(kernel))
                assert table.row(row).tolist() == kernel == device[row, : len(kernel)].tolist()

        for row, ids in enumerate(lists):
            table.add_row(ids, row)
        check()
        table.append_row([7], 1)
        lists[1] = [3, 7]
        check()
        table.append_rows([[8], [9]], np.array([1, 0], np.intp))
        lists = [[1, 2, 9], [3, 7, 8], [4, 5, 6]]
        check()
        table.clear_row(2)
        lists[2] = []
        check()
        table.add_row([5], 2)
        lists[2] = [5]
        table.swap_row(1, 2)
        lists = [lists[0], lists[2], lists[1]]
        check()
        table.move_row(2, 0)
        lists = [lists[2], lists[1], []]
        check()
        table.add_row([6], 0)
        lists[0] = [6]
        check()

    scenario()
    for operation in ("add_row", "append_row", "append_rows", "clear_row", "move_row", "swap_row"):
        for array in ("table", "num_blocks"):
            right = vars(BlockTable)[operation]

            def wrong(self: BlockTable, *arguments: Any, right: Callable = right, array: str = array) -> None:
                before = getattr(self, array).copy()
                right(self, *arguments)
                getattr(self, array)[...] = before

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BlockTable, operation, wrong)
                assert killed(scenario), f"{operation} may forget {array}"
