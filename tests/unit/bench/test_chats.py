"""Chats that are made by code, and the tasks and drafters that come of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bench import chat_drafters, pairs
from bench.chat_drafters import drafter_folder, made_drafter, write_first_layers
from bench.chats import KINDS, chats, speaks_chats
from bench.pairs import NoSuchPair, Pair, resolve_model
from bench.prompts import held_out_prompts
from bench.systems.workloads import workloads
from specdec.commands.shipped_pair import shipped_pair

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """A folder with the shipped tokenizer, of another digest, and a chat template of its own."""
    pair = shipped_pair()
    assert pair is not None
    folder = tmp_path / "chat"
    folder.mkdir()
    content = json.loads((pair / "target" / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_bytes((pair / "target" / "tokenizer_config.json").read_bytes())
    (folder / "config.json").write_bytes((pair / "target" / "config.json").read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_chats_differ_come_in_turns_and_are_the_same_again() -> None:
    found = chats(64, held_out=False)
    assert [chat.kind for chat in found] == list(KINDS) * 16
    assert len({chat.question for chat in found}) == 64
    assert chats(64, held_out=False) == found
    assert chats(8, held_out=False, seed=1) != found[:8]


def test_no_material_of_training_is_measured_with() -> None:
    learned, held_out = ({chat.question for chat in chats(400, held_out=each)} for each in (False, True))
    assert len(held_out) > 200
    subjects = [
        {text.rstrip(".?").split(" about ")[-1] for text in each if " poem about " in text}
        for each in (learned, held_out)
    ]
    assert all(subjects)
    assert not subjects[0] & subjects[1]
    bodies = [{text.partition("\n\n")[2] for text in each if "\n\n" in text} for each in (learned, held_out)]
    assert not bodies[0] & bodies[1]


def test_an_edit_says_what_its_answer_repeats() -> None:
    for chat in chats(80, held_out=True):
        assert bool(chat.prediction) == (chat.kind == "edit")
        assert chat.prediction in chat.question


def test_a_chat_model_is_measured_with_chats_in_its_own_template(chat_model: Path) -> None:
    pair = shipped_pair()
    assert pair is not None
    assert speaks_chats(chat_model)
    assert not speaks_chats(pair / "target")
    tasks = workloads(chat_model, 3)
    assert {kind: len(found) for kind, found in tasks.items()} == dict.fromkeys(KINDS, 3)
    assert all(task.stops for found in tasks.values() for task in found)
    assert all(task.prediction for task in tasks["edit"])
    assert held_out_prompts(chat_model, 4) == [tasks[kind][0].prompt for kind in KINDS]
    assert set(workloads(pair / "target", 2)) == {"code", "edit", "quote"}


def test_another_recipe_does_not_continue_the_run_of_the_former(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_drafters, "packaged_model", lambda name, cache: chat_model)
    monkeypatch.setattr(chat_drafters, "NUM_PROMPTS", 4)
    monkeypatch.setattr(chat_drafters, "NUM_HELD_OUT", 4)
    state = tmp_path / "smollm2-work-4-4" / "state-eagle3.pt"
    monkeypatch.setattr("subprocess.run", lambda command, **_: state.write_bytes(b"state"))
    chat_drafters.make_drafter("eagle3", tmp_path)
    found: list[bool] = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: found.append(state.is_file()))
    chat_drafters.make_drafter("eagle3", tmp_path)
    monkeypatch.setattr(chat_drafters, "RECIPES", {"eagle3": ("--steps", "1")})
    chat_drafters.make_drafter("eagle3", tmp_path)
    assert found == [True, False]


def test_a_draft_begins_with_layers_of_its_target(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=5, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    write_first_layers(tmp_path / "target", (0, 4), tmp_path / "draft")
    source = load_file(tmp_path / "target" / "model.safetensors")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    assert draft.config.num_hidden_layers == 2
    assert torch.equal(draft.model.layers[1].mlp.up_proj.weight, source["model.layers.4.mlp.up_proj.weight"])
    assert torch.equal(draft.lm_head.weight, source["model.embed_tokens.weight"])


def test_drafters_that_have_not_been_made_are_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoSuchPair, match="make smollm2-drafters"):
        resolve_model("smollm2-draft", "cpu", tmp_path)
    folder = drafter_folder("draft_model", tmp_path)
    folder.mkdir()
    assert made_drafter("draft_model", tmp_path) is None  # a run that has not ended
    (folder / "training_report.json").write_text("{}")
    assert resolve_model("smollm2-draft", "cpu", tmp_path).folder == folder
    monkeypatch.setattr(chat_drafters, "NUM_PROMPTS", 7)
    assert drafter_folder("draft_model", tmp_path) != folder


def test_a_pair_knows_its_head_and_how_its_draft_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "made_drafter", lambda kind: tmp_path / kind)
    chat = pairs.PairMember(name="smollm2-135m-instruct", folder=tmp_path)
    other = pairs.PairMember(name="folder", folder=tmp_path)
    draft = pairs.PairMember(name="smollm2-draft", folder=tmp_path)
    assert Pair(name="smollm2", target=chat, draft=draft).head == tmp_path / "eagle3"
    assert Pair(name="other", target=other, draft=other).head is None
    assert Pair(name="smollm2", target=chat, draft=draft).draft_settings == {"weight_quantization": "int8"}
    assert Pair(name="other", target=chat, draft=other).draft_settings == {}
