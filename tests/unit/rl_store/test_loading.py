"""A model's files read row by row."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import logra
from logra.rl import loading
from logra.rl.loading import digest_of_files, skeleton
from logra.rl.tiny import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch, tied", [("llama", False), ("llama", True), ("gpt2", True)])
def test_the_digest_of_files_is_that_of_the_model(arch, tied, dtype, tmp_path, monkeypatch):
    """Of matrices, transposed ones, vectors and tied ones; from several files, a few rows at a time."""
    monkeypatch.setattr(loading, "_CHUNK", 500)
    model = tiny_model(arch, tied=tied, seed=5).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="80KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    made, rows = skeleton(tmp_path, "sdpa")
    assert all(parameter.is_meta for parameter in made.parameters())
    names = [name for name, _ in made.named_parameters()]
    assert digest_of_files(made, rows, names) == logra.digest(model.float(), names)
    assert digest_of_files(made, rows, names[3:5]) == logra.digest(model, names[3:5])


def test_a_changed_number_changes_it(tmp_path):
    tiny_model(seed=5).save_pretrained(tmp_path)
    made, rows = skeleton(tmp_path, "sdpa")
    names = [name for name, _ in made.named_parameters()]
    before = digest_of_files(made, rows, names)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][7] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    made, rows = skeleton(tmp_path, "sdpa")
    assert digest_of_files(made, rows, names) != before


def test_what_cannot_be_read_row_by_row_says_so(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 32, "head_dim": 8}))
    with pytest.raises(loading.SkeletonError, match="transformers makes it of others"):
        skeleton(tmp_path, "sdpa")
