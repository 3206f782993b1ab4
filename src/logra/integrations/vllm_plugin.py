"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`): makes the backend "logra" known.

Light on purpose: vLLM loads every installed plug-in, also in servers that never train. `logra.integrations.vllm_worker` is
imported when an engine asks for the backend, with `WeightTransferConfig(backend="logra")` or
`--weight-transfer-config '{"backend": "logra"}'`.
"""

from __future__ import annotations

BACKEND = "logra"
_WORKER = "logra.integrations.vllm_worker"
_registered = False


def register() -> None:
    """Register the weight-transfer engine. May be called any number of times in a process."""
    global _registered
    if _registered:
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, _WORKER, "LograWeightTransferEngine")
    _registered = True
