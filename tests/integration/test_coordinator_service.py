"""The coordinator over real sockets, between replicas that follow a script: what a client gets when all goes well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdec.commands.views.tables import model_table
from specdec.coordinator.replicas.fleet import EjectionSettings, Fleet
from specdec.coordinator.replicas.router import PrefixRouter
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import IncompatibleReplica, InvalidRequest
from specdec.wire.tokenizer_files import tokenizer_digest
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.model import EOS, identity, make_tokenizer
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    collect,
    error_of,
    expected_ids,
    request,
    running,
)


async def test_a_request_without_a_draft_streams_the_targets_tokens() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(request()))
    assert result.ids() == expected_ids(target, 20)
    assert result.chunks[0] == "started"
    assert result.started is not None
    assert result.started.seed == 11
    assert result.started.model == target.identity
    assert result.started.resume_token
    assert result.started.num_prompt_tokens == 3
    assert result.chunks[-2:] == ["choice_finished", "finished"]
    assert result.ended[0].reason == pb.FINISH_REASON_LENGTH
    assert result.finished is not None
    assert result.finished.usage == api.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=20)
    assert result.texts[0] == make_tokenizer().decode(result.ids())
    assert result.origins() == [pb.ORIGIN_PREFILL] + [pb.ORIGIN_DECODE] * 19


async def test_a_draft_changes_origins_and_statistics_but_not_tokens() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft(num_ahead=4)
    target.needs_proposals = True
    async with running([target], [draft]) as harness:
        result = await collect(harness.stub.Generate(request(max_tokens=101)))
        num_drafted = result.origins().count(pb.ORIGIN_DRAFT)
        assert harness.metric("tokens_total", origin="draft") == num_drafted
    assert result.ids() == expected_ids(target, 101)
    assert num_drafted >= 75
    assert pb.ORIGIN_DECODE not in result.origins()
    stats = result.ended[0].stats
    assert stats.num_steps == stats.num_verify_steps
    assert stats.num_proposed == stats.num_accepted == num_drafted == sum(stats.accepted_by_depth)
    assert stats.mean_acceptance_length == 100 / stats.num_steps
    assert stats.hit_rate == 1.0
    assert stats.verify_ms == pytest.approx(0.1 * stats.num_steps)
    assert stats.prefill_ms == pytest.approx(0.3)


async def test_wrong_proposals_change_nothing_but_speed() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.needs_proposals = True
    draft.make_proposal = lambda session: pb.Proposal(
        start_position=len(session.token_ids), token_ids=[4, 4, 4]
    ).SerializeToString()
    async with running([target], [draft]) as harness:
        result = await collect(harness.stub.Generate(request(max_tokens=50)))
    assert result.ids() == expected_ids(target, 50)
    assert result.ended[0].stats.num_accepted <= 5


async def test_a_request_that_does_not_speculate_never_reaches_the_draft() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    async with running([target], [draft]) as harness:
        body = request(speculation=api.SpeculationParams(enabled=False))
        await collect(harness.stub.Generate(body))
    assert draft.opened == []


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tokens_per_verdict", [1, 7, 64])
async def test_a_stop_string_across_chunks_ends_the_choice_and_tokens_past_it_exist_nowhere(
    keep: bool, tokens_per_verdict: int
) -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.tokens_per_verdict = tokens_per_verdict
    draft.make_proposal = lambda session: None
    tokenizer = make_tokenizer()
    ids = expected_ids(target, 60)
    # From the middle of one token's text to the middle of a later one's, both plain characters.
    text = tokenizer.decode(ids)
    end = next(n for n in range(30, 60) if "\ufffd" not in tokenizer.decode(ids[n - 4 : n]))
    before, through = tokenizer.decode(ids[: end - 3]), tokenizer.decode(ids[:end])
    stop = text[len(before) - 1 : len(through)]
    cut = text.find(stop)
    async with running([target], [draft]) as harness:
        body = request(max_tokens=60, stop=["never there", stop], include_stop_in_output=keep)
        result = await collect(harness.stub.Generate(body))
        await target.until(lambda: not target.sessions)
        await draft.until(lambda: not draft.sessions)
    assert result.texts[0] == text[: cut + len(stop) if keep else cut]
    assert result.ended[0].reason == pb.FINISH_REASON_STOP
    assert result.ended[0].stop_string == stop
    assert result.ids() == ids[: len(result.ids())]
    assert len(result.ids()) <= end
    assert result.finished is not None
    assert result.finished.usage.completion_tokens == len(result.ids())
    committed = next(iter(draft.committed.values()), [])
    assert committed == ids[: len(committed)]
    assert len(committed) < end


async def test_an_end_of_sequence_token_is_named_and_has_no_text() -> None:
    target = ScriptedTarget()
    target.end_after = {0: 5}
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(request(skip_special_tokens=False)))
    assert result.ids() == [*expected_ids(target, 4), EOS]
    assert result.ended[0].stop_token_id == EOS
    assert result.texts[0] == make_tokenizer().decode(result.ids()[:4])


async def test_choices_have_their_own_noise_and_fork_the_first_one_in_the_same_frame() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(request(n=3)))
    for choice in range(3):
        assert result.ids(choice) == expected_ids(target, 20, choice=choice)
    frame = next(f for f in target.frames if any(e.HasField("open") for e in f.entries))
    opens = [entry.open for entry in frame.entries if entry.HasField("open")]
    first = frame.entries[0].session_id
    assert [o.fork_from for o in opens] == ["", first, first]
    assert [o.sampling.choice for o in opens] == [0, 1, 2]
    assert result.finished is not None
    assert result.finished.usage.completion_tokens == 60


async def test_logprobs_come_with_tokens_and_prompt_logprobs_before_them() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(request(logprobs=2, prompt_logprobs=0)))
    assert [len(t.logprobs.top) for t in result.tokens[0]] == [2] * 20
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs.positions) == 2
    assert result.chunks.index("prompt_logprobs") < result.chunks.index("delta")


async def test_text_prompts_are_tokenised_and_truncated_from_the_left() -> None:
    target = ScriptedTarget()
    ids = make_tokenizer().encode("the quick brown fox").ids
    async with running([target]) as harness:
        body = request(prompt="the quick brown fox", truncate_prompt_tokens=2)
        result = await collect(harness.stub.Generate(body))
    assert result.started is not None
    assert result.started.num_prompt_tokens == 2
    assert result.ids() == expected_ids(target, 20, prompt=ids[-2:])


async def test_conversations_are_rendered_by_the_chat_template() -> None:
    target = ScriptedTarget()
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    target.tokenizer_config = json.dumps({"chat_template": template})
    messages = api.ChatMessages(messages=[api.ChatMessage(role="user", content="hi")])
    async with running([target]) as harness:
        tokens = await harness.stub.Tokenize(api.TokenizeRequest(messages=messages))
        result = await collect(harness.stub.Generate(request(messages=messages)))
        info = await harness.stub.GetModelInfo(api.GetModelInfoRequest())
    ids = make_tokenizer().encode("<user>hi\n<a>").ids
    assert list(tokens.token_ids) == ids
    assert result.ids() == expected_ids(target, 20, prompt=ids)
    assert info.has_chat_template


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with running([ScriptedTarget()]) as harness:
        tokens = await harness.stub.Tokenize(api.TokenizeRequest(text="the 🙂 dog"))
        assert len(tokens.tokens) == len(tokens.token_ids)
        text = await harness.stub.Detokenize(api.DetokenizeRequest(token_ids=[*tokens.token_ids, EOS]))
        assert text.text == "the 🙂 dog"
        special = api.DetokenizeRequest(token_ids=[EOS], skip_special_tokens=False)
        assert (await harness.stub.Detokenize(special)).text == "<|eos|>"
        half = [*tokens.token_ids[:1], EOS, make_tokenizer().token_to_id("Ã")]  # the first byte of é, for one
        told = await harness.stub.Detokenize(
            api.DetokenizeRequest(token_ids=half, skip_special_tokens=False, with_tokens=True, is_prompt=True)
        )
        assert (told.text, list(told.special_token_ids)) == (tokens.tokens[0] + "<|eos|>", [EOS])
        error = await error_of(harness.stub.Detokenize(api.DetokenizeRequest(token_ids=[99999])))
        assert isinstance(error, InvalidRequest)
        assert error.field == "token_ids[0]"


async def test_requests_that_name_no_sampling_take_the_models_and_are_told_them() -> None:
    defaults = pb.SamplingDefaults(temperature=0.5, top_p=0.75, top_k=20, repetition_penalty=1.25, max_new_tokens=7)
    target = ScriptedTarget(identity(sampling_defaults=defaults))
    sent: list[pb.TokenSampling] = []
    on_open = target.on_open
    target.on_open = lambda session: (sent.append(session.body.sampling), on_open(session))  # type: ignore[method-assign,assign,return-value]
    async with running([target]) as harness:
        bare = api.GenerateRequest(prompt_token_ids=api.TokenIds(token_ids=[5, 6]))
        result = await collect(harness.stub.Generate(bare))
        assert result.started is not None
        assert result.started.model.sampling_defaults == defaults
        assert len(result.ids()) == 7
        own = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "max_tokens": 9}
        assert len((await collect(harness.stub.Generate(request(**own)))).ids()) == 9
        info = await harness.stub.GetModelInfo(api.GetModelInfoRequest())
    assert info.target.sampling_defaults == defaults
    told = [(one.temperature, one.top_p, one.top_k, one.repetition_penalty) for one in sent]
    assert told == [(0.5, 0.75, 20, 1.25), (1.0, 1.0, 0, 1.0)]
    output = Console(record=True, width=120)
    output.print(model_table(info))
    assert "temperature 0.5, top_p 0.75, top_k 20" in output.export_text()


async def test_model_info_and_status_tell_what_is_served() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    async with running([target], [draft]) as harness:
        info = await harness.stub.GetModelInfo(api.GetModelInfoRequest())
        status = await harness.stub.GetStatus(api.GetStatusRequest())
    assert info.target == target.identity
    assert info.draft == draft.identity
    assert info.default_verify_mode == pb.VERIFY_MODE_COUPLED
    assert [(r.role, r.state) for r in status.replicas] == [("target", "ready"), ("draft", "ready")]
    assert status.max_running == 64


async def test_a_draft_with_another_tokenizer_is_incompatible_and_decoding_goes_on_without_it() -> None:
    target = ScriptedTarget()
    draft = ScriptedDraft(identity("other", tokenizer_digest="t2"))
    async with running([target], [draft], wait_for_draft=False) as harness:
        status = await harness.replica_until("draft", "incompatible")
        assert "tokenizer" in status.detail
        result = await collect(harness.stub.Generate(request()))
        info = await harness.stub.GetModelInfo(api.GetModelInfoRequest())
    assert result.ids() == expected_ids(target, 20)
    assert draft.opened == []
    assert not info.HasField("draft")


async def test_swapped_addresses_are_named_as_such() -> None:
    async with running([ScriptedTarget()], [ScriptedTarget()], wait_for_draft=False) as harness:
        status = await harness.replica_until("draft", "incompatible")
    assert "`targets` and `drafts` are swapped" in status.detail


async def test_a_target_whose_tokenizer_is_not_the_coordinators_is_not_used(tmp_path: Path) -> None:
    own = make_tokenizer()
    own.save(str(tmp_path / "tokenizer.json"))
    digest = tokenizer_digest((tmp_path / "tokenizer.json").read_text())
    fits = ScriptedTarget(identity("target", tokenizer_digest=digest))
    async with running([fits], tokenizer=tmp_path) as harness:
        assert (await collect(harness.stub.Generate(request()))).ids() == expected_ids(fits, 20)
    fleet = Fleet(PrefixRouter(), tmp_path, EjectionSettings(3, 1.0, 1.0), allow_mixed_numerics=False)
    link: Any = None  # asked for nothing: the coordinator has its own tokenizer
    with pytest.raises(IncompatibleReplica, match=r"its tokenizer \(another\) differs from `tokenizer`"):
        await fleet.check_target(link, identity("target", tokenizer_digest="another"))
    assert fleet.served is None


async def test_a_draft_with_a_shorter_context_is_a_stated_limit() -> None:
    target = ScriptedTarget()
    draft = ScriptedDraft(identity("short", max_model_len=16))
    async with running([target], [draft]) as harness:
        result = await collect(harness.stub.Generate(request(max_tokens=100)))
        await draft.until(lambda: bool(draft.closed))
    assert result.started is not None
    assert "context of 16" in result.started.notices[0]
    assert result.ids() == expected_ids(target, 100)
    assert draft.closed[0][1] == "past the draft's context"


async def test_prefixes_are_kept_apart_by_tenant_and_by_the_requests_salt() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        for tenant, salt in (("a", ""), ("a", "x"), ("b", "x")):
            body = request()
            body.cache_salt = salt
            result = await collect(harness.stub.Generate(body, metadata=(("specdec-tenant", tenant),)))
            assert result.started is not None
            assert result.started.is_salted == bool(salt)
        body.cache_salt = "x" * 129
        error = await error_of(harness.stub.Generate(body))
    assert isinstance(error, InvalidRequest)
    assert error.field == "cache_salt"
    opened = [entry.open for frame in target.frames for entry in frame.entries if entry.HasField("open")]
    assert [each.cache_salt for each in opened] == [b"a", b"a\0x", b"b\0x"]
