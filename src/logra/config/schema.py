"""The schema: strict pydantic models. An unknown key is refused, every value has a type and bounds."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from logra.config.sizes import parse_size


def nearest(key: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(sorted(valid))}"


class Section(BaseModel):
    """A section of the configuration: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False, serialize_by_alias=True)

    @classmethod
    def yaml_keys(cls) -> dict[str, str]:
        """Every key as it is written in YAML, and the attribute that holds it (other only where Python reserves the word)."""
        return {field.alias or name: name for name, field in cls.model_fields.items()}


class Model(Section):
    """Which model: a Hugging Face name, a folder, or `builtin:tiny-llama` / `builtin:tiny-gpt2`."""

    name_or_path: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype: weights are always float32; bfloat16 computes under autocast."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    """Keep the inputs of checkpointed layers in host memory until the backward pass (accelerators)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    chat_template: str | None = None
    """A Jinja chat template, or the path of a file that holds one; replaces the tokenizer's own."""

    @model_validator(mode="after")
    def _offloading_needs_checkpoints(self) -> Model:
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError(
                "offload_activations keeps the inputs of checkpointed layers in host memory: set gradient_checkpointing=true too"
            )
        return self


class Method(Section):
    """How weights are trained. `logra`: sketches; `dense`: AdamW on the same weights; `lora`: peft on them; the others: the
    optimizer of that name on the same weights (docs/optimizers.md)."""

    name: Literal[
        "logra", "dense", "lora", "galore", "galore_8bit", "apollo", "apollo_mini", "fira", "lora_pre", "lora_pre_muon",
        "muon", "blockllm",
    ] = "logra"  # fmt: skip
    lr: float | None = Field(default=None, gt=0)
    """None: 1e-5; for logra 8e-5 with an aligned basis, 1.0 with variant paper, whose step is set by update_ratio."""
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    targets: list[str] | str | None = None
    rank: int | None = Field(default=None, ge=1)
    """None: 64, and 16 for logra with an aligned basis."""
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=0.0, ge=0)
    """Clip the gradient norm (for logra its estimate from the sketches); 0 is off."""
    eps: float = Field(default=1e-8, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas for dense and lora, and those of logra's adam; its row_adam uses the second."""
    basis: Literal["random", "gaussian", "aligned"] | None = None
    """aligned: tracked from the layers' inputs, so that a small rank sees most of the gradient. None: aligned, or random with
    variant=paper, refresh=false or bits=15, which it is not made for."""
    optimizer: Literal["row_adam", "adam", "sgd"] | None = None
    """logra's optimizer of sketches: one second moment a row, or both of Adam's moments of every element, or none. None: adam
    with an aligned basis, else row_adam."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Decay of logra's first moment; None: betas[0] for adam, 0 for the others. Needs a basis that stays."""
    variant: Literal["simplified", "paper"] = "simplified"
    update_ratio: float = Field(default=6e-5, gt=0)
    refresh: bool = True
    """random, gaussian: a new basis after every update."""
    refresh_every: int = Field(default=8, ge=1)
    """aligned: updates between two refreshes of one layer's basis; layers take turns."""
    explore: int = Field(default=0, ge=0)
    """aligned: how many of the rank's directions are random, orthogonal to the others."""
    bits: Literal[8, 15] = 8
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """galore, apollo, fira, lora_pre and the like: the optimizer's own options, such as update_proj_gap, scale or projection."""
    lora_alpha: float | None = None
    """LoRA's alpha; the default is the rank, so that the adapter's scale is 1."""
    weights: Literal["fp32", "split"] = "fp32"
    """split: bfloat16 weights for the forward pass, an int16 residual for the rest of the float32; needs model.dtype bfloat16."""
    residual: Literal["device", "cpu"] = "device"
    """Where the residual of split weights lives."""
    dense_params: list[str] = Field(default_factory=list)
    """logra: what AdamW trains beside the targets: norms, embeddings, head, biases, or ends of module names."""
    dense_lr: float = Field(default=1e-6, gt=0)

    @model_validator(mode="after")
    def _only_logra(self) -> Method:
        if self.name != "logra" and (self.weights == "split" or self.dense_params):
            what = "weights=split" if self.weights == "split" else "dense_params"
            raise ValueError(f"{what} belongs to method logra, not to {self.name}: leave it out")
        if self.options and self.name in ("logra", "dense", "lora"):
            raise ValueError(
                f"options are those of an optimizer such as galore, not of method {self.name}: leave them out"
            )
        for key in set(self.options) & {"lr", "rank", "betas", "eps", "weight_decay"}:
            raise ValueError(f"options.{key} is method.{key}: set it there")
        if self.name == "galore_8bit" and "state_bits" in self.options:
            raise ValueError("galore_8bit has state_bits=8: for 32 use name=galore")
        if self.name == "blockllm" and self.options.get("trigger", "interval") != "interval":
            raise ValueError(
                "trigger must be interval here: the other triggers need a loss that says how well the policy does"
            )
        if self.residual == "cpu" and self.weights != "split":
            raise ValueError("residual=cpu needs weights=split: float32 weights have no residual")
        return self

    @model_validator(mode="after")
    def _basis_and_optimizer(self) -> Method:
        if self.basis is None:
            suits = self.name == "logra" and self.variant == "simplified" and self.refresh and self.bits == 8
            self.basis = "aligned" if suits else "random"
        if self.optimizer is None:
            is_adam = self.name == "logra" and self.basis == "aligned" and self.variant == "simplified"
            self.optimizer = "adam" if is_adam else "row_adam"
        return self

    @model_validator(mode="after")
    def _defaults_of_the_basis(self) -> Method:
        stays = self.basis == "aligned" or not self.refresh
        if self.name == "logra" and (self.optimizer == "adam" or self.momentum) and not stays:
            raise ValueError(
                f"optimizer={self.optimizer} with momentum={self.momentum} keeps moments of single coordinates, and a "
                f"{self.basis} basis is drawn anew after every update: use basis=aligned (or refresh=false), or "
                "optimizer=row_adam without momentum"
            )
        if self.name == "logra" and self.basis == "aligned" and not self.refresh:
            raise ValueError(
                "an aligned basis is refreshed every refresh_every updates: set that instead of refresh=false, or basis=random"
            )
        if self.name == "logra" and self.explore and self.basis != "aligned":
            raise ValueError(f"explore belongs to basis=aligned, not to {self.basis}: leave it out")
        if self.name == "logra" and self.variant == "paper" and self.optimizer == "adam":
            raise ValueError("variant=paper is defined for row_adam and sgd: use one of them, or variant=simplified")
        return self

    @model_validator(mode="after")
    def _default_lr_and_rank(self) -> Method:
        is_aligned = self.name == "logra" and self.basis == "aligned"
        if self.rank is None:
            self.rank = 16 if is_aligned else 64
        if self.lr is None:
            is_paper = self.name == "logra" and self.variant == "paper"
            self.lr = 1.0 if is_paper else 8e-5 if is_aligned else 1e-5
        if is_aligned and self.explore >= self.rank:
            raise ValueError(f"explore={self.explore} must be below rank={self.rank}")
        largest = ((1 << 24) - 1) // ((2 ** (self.bits - 1) - 1) * (127 if is_aligned else 1))
        if self.name == "logra" and self.basis != "gaussian" and self.rank > largest:
            raise ValueError(
                f"rank={self.rank} is above {largest}, the limit of exact sums with bits={self.bits} and basis={self.basis}: "
                "use a smaller rank, bits=8 or basis=random"
            )
        return self


class Trust(Section):
    """The trust region of logra: the step is scaled so that its predicted KL stays within the budget."""

    enabled: bool = True
    budget: Literal["constant", "cosine"] = "cosine"
    start: float = Field(default=2e-4, gt=0)
    final: float = Field(default=2e-5, gt=0)
    steps: int = Field(default=300, ge=1)
    largest_scale: float = Field(default=3.0, gt=0)
    mode: Literal["auto", "forward", "finite_difference"] = "auto"
    probe_rollouts: int = Field(default=2, ge=1)
    probe_max_tokens: int = Field(default=4096, ge=2)
    mismatch: bool = True
    measure_every: int = Field(default=10, ge=0)
    verify: bool = False
    tolerance: float = Field(default=1.5, ge=1)


class Data(Section):
    """Prompts: `reasoning_gym:TASK`, a .jsonl/.json/.parquet file, a saved data set folder, or a hub data set."""

    name: str
    subset: str | None = None
    split: str = "train"
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a reasoning-gym task."""
    size: int | None = Field(default=None, ge=1)
    """How many items to generate (reasoning-gym) or to use at most."""
    seed: int | None = None
    """Seed of generated items; default: the run's seed."""
    prompt_column: str | None = None
    answer_column: str | None = None
    system_prompt: str | None = None
    prompt_prefix: str = ""
    prompt_suffix: str = ""
    chat: bool | None = None
    """None: use the chat template where there is one; true: require it; false: plain text."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_prompt_tokens: int = Field(default=1024, ge=1)
    shuffle: bool = True


class Reward(Section):
    """One reward function: a built-in name, `package.module.function` or `path/to/file.py:function`."""

    function: str
    name: str = ""
    """The metric's name; empty: the function's own. Give one where a function is used twice."""
    weight: float = Field(default=1.0, ge=-1e9, le=1e9)
    params: dict[str, Any] = Field(default_factory=dict)
    kind: Literal["trl", "verl"] = "trl"


class Rewards(Section):
    """How rewards are computed: worker processes with a wall-clock limit."""

    functions: list[Reward] = Field(min_length=1)
    workers: int = Field(default=2, ge=1)
    timeout_s: float = Field(default=10.0, gt=0)
    error_limit: float = Field(default=0.5, ge=0, le=1)


class Vllm(Section):
    """The vLLM rollout engine (rollout.engine: vllm). It starts from the base model and follows the trainer by Updates."""

    url: str | list[str] | None = None
    """A `vllm serve`, or several, to use instead of an engine in this process; the key is in the environment variable
    VLLM_API_KEY."""
    patience_s: float = Field(default=300.0, gt=0)
    """How long to wait, at the start and whenever no server is left, for one to be there."""
    fetch: bool = False
    """The server fetches updates from sync.serve instead of getting them inside requests."""
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    """None: as model.dtype."""
    max_model_len: int | None = Field(default=None, ge=1)
    memory: float = Field(default=0.5, gt=0, le=1)
    """Share of the accelerator's memory that vLLM may take."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    enforce_eager: bool = False
    colocated: bool = False
    """Sleep outside rollouts, so that the trainer has the accelerator's memory."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `vllm.LLM`."""

    @field_validator("url")
    @classmethod
    def _are_addresses(cls, url: str | list[str] | None) -> str | list[str] | None:
        urls = [url] if isinstance(url, str) else url
        if urls is not None and (not urls or len({each.rstrip("/") for each in urls}) != len(urls)):
            raise ValueError("give one server's address, or a list of different ones; null: an engine in this process")
        for each in urls or ():
            if not each.startswith(("http://", "https://")):
                raise ValueError(f"a vLLM server's address begins with http:// or https://, not {each!r:.80}")
        return url

    @property
    def urls(self) -> list[str]:
        """All servers; none: an engine in this process."""
        return [self.url] if isinstance(self.url, str) else list(self.url or ())


class RolloutSection(Section):
    """One step samples prompts_per_step x rollouts_per_prompt responses."""

    engine: Literal["hf", "vllm"] = "hf"
    prompts_per_step: int = Field(default=8, ge=1)
    rollouts_per_prompt: int = Field(default=8, ge=1)
    max_new_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int | None = Field(default=None, ge=1)
    """Rows generated at once; None: all."""
    mismatch_limit: float | None = Field(default=0.1, gt=0)
    """Stop where the log-probs of engine and trainer differ by more, in mean nats a token; None: never."""
    ahead: int = Field(default=0, ge=0, alias="async")
    """Batches sampled ahead while the trainer computes; 0: strictly on-policy. Written `async`."""
    on_update: Literal["finish", "keep", "restart"] = "finish"
    """What becomes of rollouts in flight when the policy moves: finished first, kept and gone on with, or sampled anew."""
    vllm: Vllm = Field(default_factory=Vllm)


class Algorithm(Section):
    """Advantage, loss, normalisation and corrections."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++", "running_baseline"] = "grpo"
    advantage_params: dict[str, Any] = Field(default_factory=dict)
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    aggregation: Literal["token", "sequence", "prompt", "constant"] | None = None
    """Denominator of the loss; None: token, and sequence for gspo, which makes it the paper's objective."""
    clip_low: float | None = Field(default=None, gt=0)
    clip_high: float | None = Field(default=None, gt=0)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; None: the loss's published values (_CLIPS)."""
    dual_clip: float | None = Field(default=None, gt=1)
    importance_cap: float | None = Field(default=2.0, gt=0)
    """Truncated importance sampling of trainer against rollout log-probs; None: off."""
    importance_level: Literal["token", "sequence"] = "token"
    kl_coef: float = Field(default=0.0, ge=0)
    """k3 KL to the starting policy; 0: no reference is loaded."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates per batch of rollouts; above 1 the clipped ratio matters."""
    mask_truncated: bool = False

    @model_validator(mode="after")
    def _defaults_of_the_loss(self) -> Algorithm:
        low, high = _CLIPS[self.loss]
        self.clip_low = low if self.clip_low is None else self.clip_low
        self.clip_high = high if self.clip_high is None else self.clip_high
        self.aggregation = self.aggregation or ("sequence" if self.loss == "gspo" else "token")
        return self


# DAPO (arXiv 2503.14476), GSPO (arXiv 2507.18071), CISPO without a lower bound (arXiv 2506.13585, cap 5)
_CLIPS = {"ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0), "reinforce": (0.2, 0.28)}


class Train(Section):
    steps: int = Field(default=100, ge=1)
    microbatch_size: int = Field(default=8, ge=1)
    """Rollouts per forward and backward pass."""
    head_chunk: int | None = Field(default=None, ge=0)
    """Tokens whose logits exist at once; None: as many as fit 64 MiB (256 MiB on an accelerator), 0: all."""
    packed: bool = True
    """Compute a microbatch's tokens in one row, without padding and each prompt once, where that saves work."""


class Evaluation(Section):
    """Held-out evaluation with its own sampling; `data` gives what differs from the training data section."""

    every: int = Field(default=0, ge=0)
    before: bool = True
    after: bool = True
    data: dict[str, Any] = Field(default_factory=dict)
    num_prompts: int | None = Field(default=None, ge=1)
    rollouts_per_prompt: int = Field(default=1, ge=1)
    ks: list[int] = Field(default_factory=lambda: [1], min_length=1)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int | None = Field(default=None, ge=1)
    hold_out: bool = True
    """Leave prompts out of training that are held-out ones too (equal token ids)."""
    success_threshold: float = 1.0
    seed: int = 0

    @field_validator("data")
    @classmethod
    def _known_keys(cls, data: dict[str, Any]) -> dict[str, Any]:
        for key in data:
            if key not in Data.model_fields:
                raise ValueError(f"{key}: unknown key; {nearest(key, list(Data.model_fields))}")
        return data

    @model_validator(mode="after")
    def _enough_rollouts(self) -> Evaluation:
        count = self.rollouts_per_prompt
        bad = [k for k in self.ks if not 1 <= k <= count]
        if bad:
            raise ValueError(f"pass@{bad[0]} of ks needs 1 <= {bad[0]} <= rollouts_per_prompt, which is {count}")
        if self.temperature == 0.0 and count > 1:
            raise ValueError(
                f"temperature 0 is greedy, so all {count} rollouts of a prompt would be equal: "
                "use rollouts_per_prompt 1 or a temperature above 0"
            )
        return self


class Checkpoint(Section):
    every: int = Field(default=25, ge=0)
    """Steps between checkpoints; 0: only the final export."""
    keep: int = Field(default=2, ge=1)
    final_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the final export; checkpoints always hold the float32 weights."""


class Journal(Section):
    """Every applied Update on disk (method logra): the policy at any step, and resuming at the very last one."""

    enabled: bool = True
    digest_every: int = Field(default=10, ge=0)
    """Updates between digests of the weights, which every holder then checks; 0: none."""
    anchor_every: int = Field(default=0, ge=0)
    """Updates between anchors, full float32 copies of what moves; 0: none."""
    keep_anchors: int | None = Field(default=None, ge=1)
    """Drop the history before the oldest of so many anchors; None: keep all."""


class Sync(Section):
    """Serve the journal over HTTP, so that engines and replicas elsewhere follow the run."""

    serve: bool = False
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0: any free port; the address and the token's file are printed."""
    token_file: str | None = None
    """A file with the bearer token; None: one is made in the run folder. A host that is not loopback needs one given."""
    subscribers: int = Field(default=0, ge=0)
    """How many must acknowledge the starting version before the first step."""
    timeout_s: float = Field(default=600.0, gt=0)


class Log(Section):
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    project: str = "logra"
    completions: bool = True
    memory: bool = True
    """Measure every step's memory by kind."""
    memory_timelines: list[int] = Field(default_factory=lambda: [1, 2])
    """Steps whose memory over time is written to memory/step_NNNNNN.json (CPU)."""


class Distributed(Section):
    """Several ranks (torchrun): docs/distributed.md."""

    # groups of ranks that each hold all shards of the model (HSDP); 1: one group
    replicas: int = Field(default=1, ge=1)
    offload: bool = False
    # most seconds that a rank waits for another, rollouts included
    timeout_s: float = Field(default=1800.0, gt=0)


class Memory(Section):
    """Is there enough memory? Planned before the weights are loaded (`logra plan` shows the same)."""

    check: Literal["error", "warn", "off"] = "error"
    """What to do if the plan for the longest rows exceeds the limit."""
    limit: str | None = None
    """Such as 24GiB or 80GB; None: what is free on the device."""

    @field_validator("limit")
    @classmethod
    def _is_a_size(cls, limit: str | None) -> str | None:
        if limit is not None:
            parse_size(limit)
        return limit


class Config(Section):
    """A whole run."""

    output_dir: str = "runs/run"
    resume: str = "never"
    """never, auto (newest complete checkpoint of output_dir, if any), or the path of a checkpoint."""
    seed: int = 42
    threads: int | None = Field(default=None, ge=1)
    model: Model
    data: Data
    reward: Rewards
    method: Method = Field(default_factory=Method)
    trust: Trust = Field(default_factory=Trust)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    train: Train = Field(default_factory=Train)
    eval: Evaluation | None = None
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    journal: Journal = Field(default_factory=Journal)
    sync: Sync = Field(default_factory=Sync)
    log: Log = Field(default_factory=Log)
    memory: Memory = Field(default_factory=Memory)
    distributed: Distributed = Field(default_factory=Distributed)

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> Config:
        rollout, updates = self.rollout, self.algorithm.updates_per_step
        if rollout.top_p != 1.0 or rollout.top_k != 0:
            raise ValueError(
                "rollout.top_p and rollout.top_k change the sampling distribution but not the log-probs that are "
                "trained: leave top_p at 1 and top_k at 0 (shape evaluation with eval.top_p instead)"
            )
        if rollout.prompts_per_step % updates:
            raise ValueError(
                f"rollout.prompts_per_step={rollout.prompts_per_step} is not divisible by "
                f"algorithm.updates_per_step={updates}"
            )
        total = rollout.prompts_per_step * rollout.rollouts_per_prompt
        if rollout.rollouts_per_prompt == 1 and self.algorithm.advantage in ("grpo", "dr_grpo", "rloo"):
            raise ValueError(
                f"algorithm.advantage={self.algorithm.advantage} compares rollouts of one prompt: use "
                "rollout.rollouts_per_prompt >= 2, or advantage reinforce++ or running_baseline"
            )
        if self.method.weights == "split" and self.model.dtype != "bfloat16":
            raise ValueError(
                "method.weights=split computes with bfloat16 weights: set model.dtype to bfloat16 (or use weights fp32)"
            )
        if self.rollout.engine == "vllm" and not self.keeps_journal:
            raise ValueError(
                "rollout.engine=vllm follows the trainer by Updates: it needs method logra, a basis other than gaussian and "
                "journal.enabled"
            )
        self._check_async()
        if self.rollout.vllm.fetch and not (self.rollout.vllm.url and self.sync.serve):
            raise ValueError("rollout.vllm.fetch lets a server fetch updates: it needs rollout.vllm.url and sync.serve")
        if self.sync.serve and not self.keeps_journal:
            raise ValueError(
                "sync.serve serves the journal: it needs method logra, a basis other than gaussian and journal.enabled"
            )
        if self.journal.keep_anchors is not None and not self.journal.anchor_every:
            raise ValueError("journal.keep_anchors keeps the newest anchors: it needs journal.anchor_every")
        if self.sync.serve and self.sync.token_file is None and self.sync.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(
                f"sync.host={self.sync.host} opens the run to other machines: give a token of your own (sync.token_file), and "
                "put a reverse proxy with TLS before it; or listen on 127.0.0.1"
            )
        if self.sync.subscribers and not self.sync.serve:
            raise ValueError("sync.subscribers waits for subscribers over HTTP: set sync.serve to true")
        if self.train.microbatch_size > total // updates:
            self.train.microbatch_size = total // updates
        return self

    def _check_async(self) -> None:
        rollout = self.rollout
        if not rollout.ahead:
            if rollout.on_update != "finish":
                raise ValueError(
                    f"rollout.on_update={rollout.on_update} is about rollouts in flight when the policy moves: it needs "
                    "rollout.async >= 1"
                )
            return
        if rollout.engine != "vllm" or not rollout.vllm.urls:
            what = "the trained model itself" if rollout.engine == "hf" else "vLLM in the trainer's process"
            raise ValueError(
                f"rollout.async={rollout.ahead} samples while the trainer computes, and rollout.engine={rollout.engine} is "
                f"{what}: use a vLLM server (rollout.engine=vllm and rollout.vllm.url), or rollout.async=0"
            )
        if rollout.on_update == "keep" and len(rollout.vllm.urls) > 1:
            raise ValueError(
                "rollout.on_update=keep changes a server's weights while it samples, which is made for one server only: give "
                "one rollout.vllm.url, or use finish or restart"
            )
        if self.algorithm.importance_cap is None:
            raise ValueError(
                f"rollout.async={rollout.ahead} trains on rollouts of older policies, whose log-probs the loss must be weighed "
                "by: set algorithm.importance_cap (2.0 is usual), or rollout.async=0"
            )

    @property
    def keeps_journal(self) -> bool:
        """Only logra makes Updates, and those of a gaussian basis cannot be written exactly."""
        return self.journal.enabled and self.method.name == "logra" and self.method.basis != "gaussian"
