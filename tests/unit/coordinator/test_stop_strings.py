"""Stop strings are found wherever chunks are cut, and nothing that may belong to one is let out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.coordinator.text.stop_strings import StopMatch, StopStringScanner

LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first match to be completed, the longest of those."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def scan(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    scanner = StopStringScanner(stops)
    emitted = ""
    for chunk in chunks:
        step = scanner.push(chunk)
        if isinstance(step, StopMatch):
            return emitted + step.text, step.stop_string
        emitted += step
    return emitted + scanner.finish(), None


@given(LETTERS, STOPS)
def test_the_match_does_not_depend_on_where_chunks_are_cut(text: str, stops: list[str]) -> None:
    assert scan(list(text), stops) == scan([text], stops) == reference(text, stops)


@given(LETTERS, STOPS)
def test_held_back_text_is_the_least_that_may_start_a_match(text: str, stops: list[str]) -> None:
    scanner = StopStringScanner(stops)
    step = scanner.push(text)
    if isinstance(step, str):
        held = text[len(step) :]
        assert text.startswith(step)
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(text[i:]) for stop in stops for i in range(len(step)))


def test_a_kept_stop_string_ends_the_text() -> None:
    scanner = StopStringScanner(["END"], keep_match=True)
    assert scanner.push("one E") == "one "
    assert scanner.push("ND two") == StopMatch("END", "END")


def test_text_held_back_comes_out_at_the_end() -> None:
    scanner = StopStringScanner(["STOP"])
    assert scanner.push("it is ST") == "it is "
    assert scanner.finish() == "ST"


PIECES = st.lists(
    st.one_of(st.text(alphabet="ab", min_size=1, max_size=3), st.sampled_from(["<a>", "<b>"])), max_size=8
)
NAMING = st.lists(
    st.lists(st.sampled_from(["a", "b", "<a>", "<b>"]), min_size=1, max_size=4).map("".join), min_size=1, max_size=3
)


def hidden_reference(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """Token by token: the visible text, or all text between two borders of tokens or characters, ends with a match."""
    units = [unit for piece in pieces for unit in ([piece] if piece[0] == "<" else piece)]
    for end in range(1, len(units) + 1):
        found = []
        for start in range(end):
            part = units[start:end]
            shown = [unit for unit in part if len(unit) == 1]
            before = sum(len(unit) == 1 for unit in units[:start])
            found += [(before, stop) for stop in stops if stop in ("".join(part), "".join(shown)) and part]
        if found:
            start, stop = min(found)
            return "".join(unit for unit in units if len(unit) == 1)[:start], stop
    return "".join(unit for unit in units if len(unit) == 1), None


@given(PIECES, NAMING)
def test_a_hidden_token_is_part_of_a_match_or_not_there(pieces: list[str], stops: list[str]) -> None:
    scanner = StopStringScanner(stops)
    emitted = ""
    for piece in pieces:
        step = scanner.push_hidden(piece) if piece[0] == "<" else scanner.push(piece)
        if isinstance(step, StopMatch):
            assert (emitted + step.text, step.stop_string) == hidden_reference(pieces, stops)
            return
        emitted += step
    assert (emitted + scanner.finish(), None) == hidden_reference(pieces, stops)


def test_a_kept_stop_string_shows_its_hidden_token() -> None:
    scanner = StopStringScanner(["x<|end|>"], keep_match=True)
    assert scanner.push("six") == "si"
    assert scanner.push_hidden("<|end|>") == StopMatch("x<|end|>", "x<|end|>")
