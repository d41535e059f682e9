"""`specdec demo`: start the shipped pair, complete a prompt with and without speculation, stop."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.text import Text

from specdec.client import ClientSettings, chat_messages
from specdec.commands.errors import ClusterFailed, reported_errors
from specdec.commands.generate.command import Display, run_request
from specdec.commands.shipped_pair import shipped_pair
from specdec.commands.up.command import (
    Device,
    DraftModel,
    TargetModel,
    running_cluster,
    stop_on_signals,
    tell_of_gateway,
    watch,
)
from specdec.commands.up.devices import device_kind
from specdec.commands.up.drafters import drafter_settings
from specdec.commands.up.mps import mps_is_wanted
from specdec.commands.up.plan import (
    PORTS,
    LocalPlan,
    gateway_is_installed,
    require_engine,
    shipped_model,
    usual_placement,
)
from specdec.commands.up.supervision import Supervision
from specdec.v1 import coordinator_pb2

_QUESTION = """Add type annotations to this function, and change nothing else:

def average(values):
    total = 0.0
    for value in values:
        total = total + value
    return total / len(values)
"""


def demo(
    target: TargetModel = None,
    draft: DraftModel = None,
    device: Device = "auto",
    placement: Annotated[
        Literal["apart", "together"] | None,
        typer.Option(
            help="apart: a draft service; together: the target runs the draft (default: together on one or two CPU "
            "cores, else apart).",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Prompt to complete (default: Python that the pair was not trained on).", show_default=False),
    ] = None,
    prompt_id: Annotated[str | None, typer.Option(help="Id of a prompt in the pair's prompts.json.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most output tokens.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.", min=0)] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the noise.", min=0)] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message to a target that can chat; needs --target.")
    ] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Start a gateway too, and keep its page open until Ctrl-C.")
    ] = False,
) -> None:
    """Start the shipped pair on free ports, complete a prompt with and without speculation, and stop."""
    console = Console(stderr=True, highlight=False)
    with reported_errors(console), stop_on_signals():
        require_engine({})
        if chat and target is None:
            raise ClusterFailed(
                "--chat needs --target: the shipped pair cannot chat (make demo DEMO_ARGS=--chat has a model)"
            )
        plan = LocalPlan(
            target_model=target or shipped_model("target"),
            draft_model=draft or ("" if chat else shipped_model("draft")),
            num_drafts=int(draft is not None or not chat),
            target_settings=drafter_settings(["ngram"], target=target) if chat else {},
            device=device,
            free_ports=True,
            gateway=page,
            placement=placement or usual_placement(device_kind(device), sorted(os.sched_getaffinity(0))),
        )
        if chat:
            question = chat_messages([{"role": "user", "content": prompt or _QUESTION}])
            request = coordinator_pb2.GenerateRequest(messages=question)
        else:
            request = coordinator_pb2.GenerateRequest(prompt=prompt or held_out_prompt(prompt_id))
        request.sampling.temperature = temperature
        request.sampling.seed = seed
        request.sampling.max_tokens = max_tokens
        with running_cluster(plan, console, mps=mps_is_wanted(os.environ)) as cluster:
            console.print(Rule("prompt", style="dim"))
            console.print(Text(request.prompt or prompt or _QUESTION, style="dim"), soft_wrap=True)
            console.print(Rule("completion", style="dim"))
            display = Display(show_origin=True, compare=True)
            asyncio.run(run_request(cluster.address, ClientSettings(timeout_s=300), request, display))
            if temperature > 0:
                console.print(
                    "At a lower temperature more draft tokens are accepted: try --temperature 0.", style="dim"
                )
            if page:
                tell_of_gateway(console, cluster, is_wanted=True)
                watch(Supervision(cluster, lambda line: console.print(escape(line), soft_wrap=True)), None)
            elif gateway_is_installed():
                url = f"http://127.0.0.1:{PORTS['gateway']}/"
                console.print(
                    f"To see it in a browser, run specdec up and open {url}, or run specdec demo --page.", style="dim"
                )


def held_out_prompt(prompt_id: str | None = None) -> str:
    """Return a prompt that the pair was not trained on: the first, or the one with this id. Raises ClusterFailed."""
    pair = shipped_pair()
    if pair is None:
        raise ClusterFailed("the pair's prompts are not installed: give one with --prompt")
    for entry in json.loads((pair / "prompts.json").read_text(encoding="utf-8")):
        if prompt_id is None or entry["id"] == prompt_id:
            return str(entry["text"])
    raise ClusterFailed(f"no prompt {prompt_id!r} in {pair / 'prompts.json'}")
