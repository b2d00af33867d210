"""The fields of a step's upload tile the buffer: in order, without gap or overlap, each of its own length."""

from hypothesis import given
from hypothesis import strategies as st

from jaxrunner.shapes import StepLayout

SIZES = st.integers(1, 100)
SCALARS = {"num_reqs", "num_tokens", "num_logits", "flags"}
PER_ROW = {"idx_mapping", "num_computed", "num_known", "num_prompt", "num_draft", "use_device"}
PER_UPDATE = {"update_group", "update_cell", "update_value"}


@given(SIZES, SIZES, SIZES, SIZES)
def test_fields_tile_the_buffer(tokens: int, reqs: int, logits: int, updates: int) -> None:
    layout = StepLayout(tokens, reqs, logits, updates)
    owners = [0] * layout.size
    end = 0
    for at, length in layout.fields.values():
        assert at == end
        end = at + length
        for word in range(at, end):
            owners[word] += 1
    assert owners == [1] * layout.size


@given(SIZES, SIZES, SIZES, SIZES)
def test_lengths(tokens: int, reqs: int, logits: int, updates: int) -> None:
    expected = dict.fromkeys(SCALARS, 1) | dict.fromkeys(PER_ROW, reqs) | dict.fromkeys(PER_UPDATE, updates)
    expected |= {"query_start_loc": reqs + 1, "logits_indices": logits, "token_ids": tokens}
    fields = StepLayout(tokens, reqs, logits, updates).fields
    assert {name: length for name, (_, length) in fields.items()} == expected
