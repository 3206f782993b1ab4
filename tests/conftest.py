"""Shared set-up: one torch thread (tiny models, shared machines), no progress bars, no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets
import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
datasets.disable_progress_bars()


@pytest.fixture
def ids() -> torch.Tensor:
    """(8, 20) token ids of the tiny models' vocabulary, without special ones."""
    return torch.randint(4, 51, (8, 20), generator=torch.Generator().manual_seed(0))
