"""Faults of a model's files are told in one line, with the file and what to do, before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.commands.errors import ClusterFailed
from specdec.commands.up.devices import weights_bytes
from specdec.commands.up.plan import LocalPlan, check_models, plan_services
from specdec.engine.checkpoints.files import find_model_files
from specdec.engine.checkpoints.folder import check_weights
from specdec.engine.errors import ModelLoadError
from specdec.engine.model.loader import load_model
from specdec.engine.settings import EngineSettings
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.zoo.cases import Case
from tests.support.zoo.play import save_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "model", num_layers=1)


def adapter(folder: Path) -> Path:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "meta/base"}))
    return folder


def gguf(folder: Path) -> Path:
    (folder / "config.json").unlink()
    (folder / "q4.gguf").write_bytes(b"GGUF")
    return folder


def gguf_file(folder: Path) -> Path:
    return gguf(folder) / "q4.gguf"


def other_file(folder: Path) -> Path:
    return folder / "config.json"


def without_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def pickled(folder: Path) -> Path:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    return folder


def without_weights(folder: Path) -> Path:
    (folder / WEIGHTS).unlink()
    return folder


def pointer(folder: Path) -> Path:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return folder


def cut_off(folder: Path) -> Path:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-9])
    return folder


def cut_in_the_header(folder: Path) -> Path:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:20])
    return folder


def no_json(folder: Path) -> Path:
    (folder / WEIGHTS).write_bytes((4).to_bytes(8, "little") + b"nope")
    return folder


def missing_shard(folder: Path) -> Path:
    index = {"weight_map": {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def other_shape(folder: Path) -> Path:
    return with_tensors(folder, {"model.norm.weight": torch.ones(7)})


def with_tensors(folder: Path, others: dict[str, torch.Tensor]) -> Path:
    save_file({**load_file(folder / WEIGHTS), **others}, folder / WEIGHTS, {"format": "pt"})
    return folder


def cut_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text('{"model": {')
    return folder


def cut_tokenizer_config(folder: Path) -> Path:
    (folder / "tokenizer_config.json").write_text("{")
    return folder


def no_object(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text("[]")
    return folder


def cut_generation_config(folder: Path) -> Path:
    (folder / "generation_config.json").write_text("{")
    return folder


def named_end(folder: Path) -> Path:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    return folder


def scaled_weights(folder: Path) -> Path:
    scaled = {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn), "model.norm.weight_scale": torch.ones(1)}
    return with_tensors(folder, scaled)


def whole_numbers(folder: Path) -> Path:
    return with_tensors(folder, {"model.norm.weight": torch.ones(64, dtype=torch.int8)})


def rotated(folder: Path) -> Path:
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    described = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "transform_config": {"config_groups": {"R4": {"type": "hadamard", "apply": []}}},
    }
    return configured(quantization_config=described)(folder)


def gguf_beside_config(folder: Path) -> Path:
    (folder / WEIGHTS).rename(folder / "Q4.GGUF")
    return folder


def nameless_gguf(folder: Path) -> Path:
    (folder / "sha256-0f0f").write_bytes(b"GGUF" + bytes(20))
    return folder / "sha256-0f0f"


def adapter_with_config(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "meta/base"}))
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    return folder


def authors_format(folder: Path) -> Path:
    (folder / "config.json").rename(folder / "params.json")
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")
    return folder


def diffusers(folder: Path) -> Path:
    (folder / "config.json").rename(folder / "model_index.json")
    return folder


def one_level_too_high(folder: Path) -> Path:
    return folder.parent


def hub_cache(folder: Path) -> Path:
    (folder.parent / "models--a--b" / "snapshots").mkdir(parents=True)
    folder.rename(folder.parent / "models--a--b" / "snapshots" / "0af1")
    return folder.parent / "models--a--b"


def shards_without_index(folder: Path) -> Path:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    return folder


def link_to_nothing(folder: Path) -> Path:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / "blobs" / "gone")
    return folder


def pointed_config(folder: Path) -> Path:
    (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return folder


def configured(**changes: object) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    change.__name__ = "_".join(changes)
    return change


FAULTS: list[tuple[Callable[[Path], Path], str]] = [
    (adapter, r"is a LoRA adapter of meta/base; merge them"),
    (gguf, r"q4.gguf is a GGUF file; only safetensors are read: .*gguf_file='q4.gguf'"),
    (gguf_file, r"q4.gguf is a GGUF file"),
    (other_file, r"config.json is a file; give the folder"),
    (without_config, r"has no config.json; it holds .*model.safetensors"),
    (pickled, r"only pickled weights \(pytorch_model.bin\).* save_pretrained"),
    (without_weights, r"has no \*.safetensors; it holds config.json"),
    (pointer, r"model.safetensors is a pointer of Git LFS.* git lfs pull"),
    (cut_off, r"model.safetensors is cut off: \d+ of \d+ bytes; download it again"),
    (cut_in_the_header, r"model.safetensors is cut off or no safetensors file \(20 bytes\)"),
    (no_json, r"model.safetensors is no safetensors file"),
    (missing_shard, r"lacks model-00002-of-00002.safetensors, which .* names"),
    (cut_tokenizer, r"tokenizer.json cannot be read: .*; download it again"),
    (cut_tokenizer_config, r"tokenizer_config.json cannot be read: .*; download it again"),
    (no_object, r"tokenizer.json is no JSON object; download it again"),
    (cut_generation_config, r"generation_config.json cannot be read: .*; download it again"),
    (gguf_beside_config, r"Q4.GGUF is a GGUF file"),
    (nameless_gguf, r"sha256-0f0f is a GGUF file"),
    (adapter_with_config, r"is a LoRA adapter of meta/base"),
    (authors_format, r"its author's own format \(params.json\); download the files of transformers' format"),
    (diffusers, r"is a pipeline of diffusers"),
    (one_level_too_high, r"has no config.json; it holds model; give .*/model, which has one"),
    (hub_cache, r"give .*/snapshots/0af1, which has one"),
    (shards_without_index, r"parts such as model-00001-of-00002.safetensors, and no model.safetensors.index.json"),
    (link_to_nothing, r"model.safetensors cannot be read: No such file or directory; download it again"),
    (pointed_config, r"config.json is a pointer of Git LFS"),
    (configured(model_type="llama9"), r"model_type llama9, which transformers .* does not know; install"),
    (configured(model_type="own", auto_map={"AutoConfig": "a.B"}), r"set trust_remote_code if you trust its own code"),
    (configured(model_type=None), r"has no usable config.json: "),
    (configured(hidden_size="64"), r"has no usable config.json: .*hidden_size"),
    (configured(num_attention_heads=0), r"transformers cannot build it from its config|no usable config.json"),
    (configured(dtype=[]), r"has no usable config.json"),
    (configured(dtype="torch.bfloat16"), r"dtype torch.bfloat16 in its config.json, which torch does not know; write"),
    (configured(rope_parameters={"rope_type": "ntk", "rope_theta": 1e4}), r"does not know the rope_type 'ntk'"),
    (named_end, r"generation_config.json has eos_token_id '</s>', which is neither an id nor a list of ids"),
    (scaled_weights, r"has model.norm.weight in 8 bits \(F8_E4M3\), and its config.json has no quantization_config"),
    (whole_numbers, r"has model.norm.weight in 8 bits \(I8\), and its config.json has no quantization_config"),
    (rotated, r"quantization_config has a transform_config: rotations of activations are not implemented"),
    (configured(vocab_size=0), r"its config's vocab_size is 0; sizes from 1 to"),
    (other_shape, r"has model.norm.weight of shape \[7\], and its config.json means \[64\]"),
]


@pytest.mark.parametrize(("spoil", "why"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_is_one_line_with_the_file_and_the_remedy(
    spoil: Callable[[Path], Path], why: str, folder: Path
) -> None:
    with pytest.raises(ModelLoadError, match=why) as refusal:
        load_model(EngineSettings(model=str(spoil(folder)), device="cpu"))
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 600


def test_whole_files_pass(folder: Path) -> None:
    check_weights(folder)
    assert find_model_files(str(folder), None) == (folder, "")


def test_up_refuses_models_before_it_starts_a_service(folder: Path) -> None:
    with pytest.raises(ClusterFailed, match=r"has no tokenizer.json.* it holds config.json"):
        check_models(LocalPlan(target_model=str(folder), draft_model="", num_drafts=0))
    with pytest.raises(ClusterFailed, match="is a pointer of Git LFS"):
        check_models(LocalPlan(target_model=str(pointer(folder)), draft_model="", num_drafts=0))
    with pytest.raises(ClusterFailed, match="no such directory: /nowhere"):
        check_models(LocalPlan(target_model="/nowhere", draft_model="", num_drafts=0))
    check_models(LocalPlan(target_model="somebody/a-hub-id", draft_model="", num_drafts=0))


@pytest.mark.parametrize("num_cores", [2, 4, 8])
def test_without_a_draft_the_target_has_the_drafts_cores_too(num_cores: int) -> None:
    plan = LocalPlan(target_model="T", draft_model="", num_drafts=0, device="cpu")
    target, coordinator = plan_services(plan, environment={}, cores=range(num_cores))
    most = num_cores - (num_cores > 2)
    assert target.environment["SPECDEC_TARGET_NUM_THREADS"] == str(most)
    assert target.environment["SPECDEC_TARGET_ENGINE_CORES"] == ",".join(map(str, range(most)))
    assert coordinator.cores == ((num_cores - 1,) if num_cores > 2 else (0, 1))


def test_unread_weights_of_an_encoder_take_no_memory_in_the_plan(tmp_path: Path) -> None:
    model = save_model(Case("llava", "LlavaForConditionalGeneration"), tmp_path)
    total = sum(parameter.numel() for name, parameter in model.named_parameters() if "vision_tower" not in name)
    assert weights_bytes(str(tmp_path)) == total * 4
    assert weights_bytes("somebody/a-hub-id") == 0
