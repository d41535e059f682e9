"""Deployments that are measured beside each other leave each other room."""

from bench.deployment import MeasuredDeployment, _plan
from bench.pairs import resolve_pair

_PER_TOKEN = 2 * 10 * 2 * 64
"""Keys and values, layers, heads, their size: of the shipped target."""


def test_deployments_on_one_gpu_take_no_more_than_their_requests_need() -> None:
    pair = resolve_pair("shipped", "cpu")
    small = _plan(MeasuredDeployment(pair=pair, cores=(0, 1), device="cuda", most_tokens=1000))
    assert small.target_settings["kv_cache_memory_bytes"] == small.draft_settings["kv_cache_memory_bytes"] == 1 << 30
    large = _plan(MeasuredDeployment(pair=pair, cores=(0, 1), device="cuda", most_tokens=1_000_000))
    assert large.target_settings["kv_cache_memory_bytes"] == 2 * _PER_TOKEN * (1_000_000 + 4096)
    alone = _plan(MeasuredDeployment(pair=pair, cores=(0, 1), device="cuda", is_plain=True))
    assert (alone.num_drafts, dict(alone.draft_settings)) == (0, {})
    on_cpu = _plan(MeasuredDeployment(pair=pair, cores=(0, 1), most_tokens=1_000_000))
    assert on_cpu.target_settings["kv_cache_memory_bytes"] == 4 * _PER_TOKEN * (1_000_000 + 4096)
    assert dict(on_cpu.draft_settings) == {}
