"""The page of a trace in a real headless browser: it loads, moves, and a click shows the right formula."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrunner.batch import update_states
from jaxrunner.trace import open_trace
from jaxrunner.trace.experiment import HostRunner
from jaxrunner.trace.page import page_of
from tests.jaxrunner.trace.traffic import run_traffic, two_groups

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "t.jsonl"
    run_traffic(path, num_requests=12)
    return path


def open_page(browser, path: Path, folder: Path, **options):
    """A tab with the trace's page, and the list of what its console said."""
    file = folder / "page.html"
    file.write_text(page_of(open_trace(path), **options), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(file.as_uri())
    return page, said


def test_it_loads_moves_and_explains(browser, traffic: Path, tmp_path: Path):
    lines = list(open_trace(traffic).steps())
    at = next(n for n, line in enumerate(lines) if len(line["req_ids"]) > 1 and any(line["discard"]))
    line = lines[at]
    page, said = open_page(browser, traffic, tmp_path)
    assert page.locator("#where").inner_text().startswith("step 0 of")
    page.locator("#slider").fill(str(at))
    assert page.locator("#where").inner_text().startswith(f"step {at} of")
    assert page.locator(".token").count() == line["bucket"]["tokens"]
    assert page.locator(".token.padding").count() == line["bucket"]["tokens"] - line["num_tokens"]
    assert page.locator(".token.pick").count() == line["num_logits"]
    assert page.locator(".token.discarded").count() == sum(line["discard"])
    assert page.locator(".page").count() == sum(map(len, line["block_rows"][0]))

    token = line["num_tokens"] - 1
    page.locator(f"[data-token='{token}']").click()
    row, position, slot = line["req_indices"][token], line["positions"][token], line["slot_mapping"][0][token]
    text = page.locator("#explanation").inner_text()
    assert f"slot_mapping[{token}] = {slot}" in text
    assert f"block_table[{row}][{position // 4}] * 4 + {position % 4}" in text and f"= {slot}" in text
    assert f"keys 0 to {position} of {line['req_ids'][row]}" in text
    assert page.locator("#arrows path").count() == line["scheduled"][row]
    assert page.locator(".page.seen").count() == position // 4 + 1

    discarded = line["discard"].index(True)
    page.locator(f"[data-field='discard'][data-row='{discarded}']").click()
    text = page.locator("#explanation").inner_text()
    assert f"{line['seq_lens'][discarded]} < {line['known'][discarded]} = true" in text
    fields = ("request_indices", "scheduled", "computed", "known", "prompt", "drafts", "query_start_loc", "seq_lens")
    for field in (*fields, "logits", "sampled"):
        page.locator(f"[data-field='{field}'][data-row='0']").click()
        assert page.locator("#explanation strong").inner_text().startswith(f"{field}[0]")
    for field in ("token", "query_pos", "token_ids", "req_indices", "positions", "logical block", "slot_mapping"):
        page.locator(f"#tokens [data-field='{field}']").first.click()
        assert page.locator("#explanation strong").inner_text().startswith(field)
    page.screenshot(path=tmp_path / "step.png", full_page=True)
    assert said == []
    page.close()


def test_the_second_cache_group_can_be_chosen(browser, traffic: Path, tmp_path: Path):
    """Blocks of 8 beside those of 4; with one group there is nothing to choose."""
    page, said = open_page(browser, traffic, tmp_path)
    assert not page.locator("#group").is_visible()
    page.close()
    path = two_groups(tmp_path)
    line = open_trace(path).step(1)
    page, said = open_page(browser, path, tmp_path)
    page.locator("#slider").fill("1")
    page.locator("[data-token='2']").click()
    for group, (size, held) in enumerate([(2, 5), (8, 3)]):
        page.locator("#group").select_option(str(group))
        assert page.locator(".page").all_inner_texts() == [str(b) for row in line["block_rows"][group] for b in row]
        slot, position = line["slot_mapping"][group][2], line["positions"][2]
        text = page.locator("#explanation").inner_text()
        assert f"slot_mapping[2] = {slot}" in text and f"* {size} + {position % size}" in text
        assert page.locator("#poolText").inner_text().startswith(f"{held} of 19 blocks held")
        assert f"blocks of {size}" in page.locator("#title").inner_text()
    page.locator("#group").press("ArrowUp")  # the list's key, not the page's: the token stays
    assert page.locator("[data-token='2']").get_attribute("aria-pressed") == "true"
    page.screenshot(path=tmp_path / "groups.png", full_page=True)
    assert said == []
    page.close()


def test_the_keyboard_moves_it(browser, traffic: Path, tmp_path: Path):
    lines = list(open_trace(traffic).steps())
    page, said = open_page(browser, traffic, tmp_path)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#where").inner_text().startswith("step 1 of")
    page.keyboard.press("End")
    assert page.locator("#where").inner_text().startswith(f"step {len(lines) - 1} of")
    page.keyboard.press("Home")
    busy = next(n for n, line in enumerate(lines) if line.get("num_tokens", 0) > 2)
    for _ in range(busy):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator("[data-token='1']").get_attribute("aria-pressed") == "true"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") in ("BUTTON", "INPUT")
    page.locator("[data-token='2']").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.token") == "2"  # though all cells were drawn anew
    cell = page.locator("#tokens [data-field='positions']").nth(1)
    cell.focus()
    number = cell.get_attribute("data-cell")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.cell") == number
    assert page.locator("#explanation strong").inner_text().startswith(f"positions[{number}]")
    assert said == []
    page.close()


def test_a_thousand_tokens_and_many_requests_stay_usable(browser, tmp_path: Path):
    """256 requests at once and a step of over 1,000 tokens: moving takes no second."""
    path = tmp_path / "big.jsonl"
    run_traffic(path, num_requests=300, num_blocks=4000, max_num_reqs=256, budget=1024, arrivals_a_step=128)
    lines = list(open_trace(path).steps())
    at = max(range(len(lines)), key=lambda n: lines[n].get("num_tokens", 0))
    assert lines[at]["num_tokens"] >= 1000 and max(len(line["req_ids"]) for line in lines) == 256
    page, said = open_page(browser, path, tmp_path)
    took = page.evaluate(f"(() => {{ const t = performance.now(); show({at}); return performance.now() - t; }})()")
    assert page.locator(".token").count() == lines[at]["bucket"]["tokens"]
    box = page.locator("[data-token='0']").bounding_box()
    assert box["width"] >= 20 and box["height"] >= 20
    assert took < 3000, f"moving to the largest step took {took:.0f} ms"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(path=tmp_path / "big.png")
    assert said == []
    page.close()


def test_a_name_cannot_end_the_script(traffic: Path, tmp_path: Path):
    hostile = "</script><script>alert(1)</script>"
    text = traffic.read_text().replace('"r3"', json.dumps(hostile))
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    page = page_of(open_trace(path))
    assert hostile not in page and page.count("</script>") == 2
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        page_of(open_trace(path), most_steps=0)
    with pytest.raises(ValueError, match="none from step"):
        page_of(open_trace(path), first=10_000)
    assert '"skipped":' in page_of(open_trace(path), most_steps=2)


def test_a_slot_behind_a_cut_row_is_explained_too(browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxrunner.trace.encode.MOST_BLOCKS", 1)
    path = tmp_path / "t.jsonl"
    run_traffic(path, 3)
    lines = list(open_trace(path).steps())
    at = next(n for n, line in enumerate(lines) if any(p >= 4 for p in line.get("positions", ())))
    token = next(t for t, p in enumerate(lines[at]["positions"]) if p >= 4)
    page, said = open_page(browser, path, tmp_path)
    page.locator("#slider").fill(str(at))
    page.locator(f"[data-token='{token}']").click()
    slot = lines[at]["slot_mapping"][0][token]
    assert f"= {slot // 4} * 4 + {slot % 4} = {slot}" in page.locator("#explanation").inner_text()
    assert said == []
    page.close()


def data_of(page: str) -> dict:
    return json.loads(page.split('type="application/json">')[1].split("</script>")[0])


def test_a_trace_with_a_wrong_plan_can_be_looked_at(tmp_path: Path):
    """Such a trace above all."""

    def wrong_total(plan):
        return replace(plan, total_num_scheduled_tokens=plan.total_num_scheduled_tokens + 1)

    class Unchecked(HostRunner):
        def settle(self, plan) -> None:
            update_states(self.batch, plan, check=False)

    path = tmp_path / "t.jsonl"
    with suppress(Exception):  # it ends at the first step already
        run_traffic(path, 3, make_runner=Unchecked, change_plan=wrong_total)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    if len(lines) == 1:
        pytest.fail("nothing was recorded")
    assert len(data_of(page_of(open_trace(path)))["steps"]) == len(lines) - 1


def test_blocks_held_are_counted_as_the_pool_counts_them(traffic: Path, tmp_path: Path):
    """Kernel blocks of half the size are two to a block of the pool."""
    (held,) = data_of(page_of(open_trace(traffic)))["occupancy"]
    header, rest = traffic.read_text().split("\n", 1)
    halved = json.loads(header)
    halved["geometry"] |= {"block_sizes": [2], "widths": [2 * n for n in halved["geometry"]["widths"]]}
    path = tmp_path / "halved.jsonl"
    path.write_text(json.dumps(halved) + "\n" + rest)
    assert max(held) > 5 and data_of(page_of(open_trace(path)))["occupancy"] == [held]
