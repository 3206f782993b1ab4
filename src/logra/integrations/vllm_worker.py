"""The worker's side of the vLLM engine: takes Updates through vLLM's own weight-transfer plug-in point (vLLM 0.32).

`LograWeightTransferEngine` runs in every worker process. A transfer is start_weight_update, update_weights with a packet (or an
anchor), finish_weight_update. Two ways to hold the weights:

- in place (accelerators): each matrix is a `Block` whose value is a view of vLLM's own parameter, fused and sharded as it is,
  with an int16 residual kept here where the parameter is bfloat16, so that it stays exactly round(float32 master).
- reload (CPU, where vLLM repacks linear weights after loading; quantised or otherwise unknown layouts): whole float32 matrices
  kept here in host memory, handed to vLLM's loader again (layerwise reload) when a transfer finishes.

Either way a block holds its columns of the aligned basis in force, under the unfused name: Updates that go on with a basis leave
it out. Whatever does not follow on what is here is refused before anything moves; what fails midway leaves this worker unusable
until an anchor is loaded. `LograWorker` adds the calls by which the trainer asks where each worker stands.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from logra.errors import ModelError, UpdateError, WrongBaseError
from logra.integrations.vllm_plugin import register
from logra.integrations.vllm_weights import Place, Shape, fits, locate
from logra.sketch.block import Block
from logra.sketch.split import split
from logra.sync.anchors import Anchor, AnchorInfo
from logra.sync.packet import Packet
from logra.sync.replica import Replica

URL_VARIABLE, TOKEN_VARIABLE = "LOGRA_SYNC_URL", "LOGRA_SYNC_TOKEN"
_LISTED = 20

register()  # this module is imported before any engine is made, also where vLLM's plug-ins are filtered (VLLM_PLUGINS)


@dataclass
class LograInitInfo(WeightTransferInitInfo):
    """run, base: as in every packet. targets: [name, out, in] of all that can move. transposed: those that the checkpoint
    stores in x out. residual: "device" or "cpu". loading: "auto", "in_place" or "reload"."""

    run: str
    base: str
    targets: list[list[Any]]
    transposed: list[str] = field(default_factory=list)
    residual: str = "device"
    loading: str = "auto"


@dataclass
class LograUpdateInfo(WeightTransferUpdateInfo):
    """A packet or an anchor, and where it is: in `data` (bytes, or base64 text), in the file `path`, or (packets) by its number
    `index` at the server that the environment names in LOGRA_SYNC_URL, with the token in LOGRA_SYNC_TOKEN.

    info: what `AnchorInfo` holds, for an anchor."""

    kind: str
    data: bytes | str | None = None
    path: str | None = None
    index: int | None = None
    info: dict[str, Any] | None = None


class LograWeightTransferEngine(WeightTransferEngine[LograInitInfo, LograUpdateInfo]):
    """See the module. One in each worker; made after vLLM has loaded the model."""

    init_info_cls = LograInitInfo
    update_info_cls = LograUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: VllmConfig, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.replica: Replica | None = None
        self.reloader: Reloader | None = None
        self.is_pending = False
        self.problem: str | None = None
        self.report: dict[str, Any] = {"applied": 0, "missing": [], "unexpected": []}

    def init_transfer_engine(self, init_info: LograInitInfo) -> None:
        """Take hold of everything that can move. The weights are those of the model folder: version 0."""
        if self.replica is not None and self.replica.run == init_info.run:
            raise UpdateError(
                f"this vLLM already follows run {init_info.run}: a run is begun once for each start of vLLM"
            )
        if self.replica is not None:
            raise UpdateError(
                f"this vLLM has followed run {self.replica.run}, so its weights are no base any more: restart it for a new run"
            )
        blocks, self.reloader = take_hold(self.vllm_config, self.model, self.device, init_info)
        try:
            self.replica = Replica(blocks, version=0, run=init_info.run, base=init_info.base)
        except (
            WrongBaseError
        ) as error:  # the trainer may mend it with an anchor; until then no Update follows on version -1
            self.replica = Replica(blocks, version=-1, run=init_info.run, base=init_info.base)
            self.problem = str(error)

    def start_weight_update(self) -> None:
        """Begin a transfer."""
        self._held()

    def receive_weights(self, update_info: LograUpdateInfo) -> None:
        """Apply a packet to, or load an anchor over, what is held here. Several packets may come in one transfer."""
        replica = self._held()
        if update_info.kind == "packet":
            packet = Packet.from_bytes(_read(update_info))
            self._note(packet.update.names)
            self._check_unharmed()
            replica.apply(packet)  # refuses before anything moves, or knows that it is unusable
            self.is_pending = True
            self.report["applied"] = len(packet.update.names)
        elif update_info.kind == "anchor":
            with closing(_open_anchor(update_info)) as anchor:
                self._note(anchor.names)
                replica.load_anchor(anchor)
                self.problem, self.is_pending = None, True
                self.report["applied"] = len(anchor.names)
        else:
            raise UpdateError(f"a transfer holds a packet or an anchor, not {update_info.kind!r:.40}")

    def finish_weight_update(self) -> None:
        """Make vLLM compute with what arrived. After a failure a second call only ends the transfer, for an anchor to follow."""
        self._held()
        if self.problem is not None:
            return
        if self.is_pending and self.reloader is not None:
            self.problem = "vLLM's loader failed while it took the new weights"
            self.reloader.run()
            self.problem = None
        self.is_pending = False

    def shutdown(self) -> None:
        """Nothing to release: no connection is held."""

    def status(self) -> dict[str, Any]:
        """Where this worker stands: run, head (checksum of the last packet), version, problem (None: usable), how weights are
        held, vLLM's settings, last report."""
        settings = {
            "logprobs_mode": self._default_model_config.logprobs_mode,
            "max_model_len": self._default_model_config.max_model_len,
        }
        if self.replica is None:
            return {
                "run": "",
                "head": None,
                "version": -1,
                "problem": "no run was begun here",
                "loading": "",
                **settings,
                **self.report,
            }
        problem, version = self.problem, -1
        try:
            version = self.replica.version
        except UpdateError as error:
            problem = str(error)
        if problem is None and self.is_pending:
            problem = "a transfer was begun and not finished"
        loading = "in_place" if self.reloader is None else "reload"
        stand = {"run": self.replica.run, "head": self.replica.head, "version": version}
        stand |= {"problem": problem, "loading": loading}
        return {**stand, **settings, **self.report}

    def sums(self) -> list[list[Any]]:
        """The digest's parts of every block: [name, out, in, row, rows, column, columns, sum, sum], sums as text."""
        return [
            [name, *b.shape, b.row_start, len(b.rows), b.column_start, len(b.columns), *map(str, b.sums())]
            for name, b in self._held().blocks.items()
        ]

    def _held(self) -> Replica:
        if self.replica is None:
            raise UpdateError("no run was begun on this vLLM: call init_weight_transfer_engine first")
        return self.replica

    def _check_unharmed(self) -> None:
        if self.problem is not None:
            raise UpdateError(f"this worker is unusable ({self.problem}): load an anchor first")

    def _note(self, names: list[str]) -> None:
        """Keep what arrived against what is held, for the acknowledgement."""
        held = self._held().blocks.keys()
        self.report = {
            "applied": 0,
            "missing": sorted(set(names) - held)[:_LISTED],
            "unexpected": sorted(held - set(names))[:_LISTED],
        }


class LograWorker:
    """Calls that vLLM's workers gain (`worker_extension_cls`); the trainer reaches them by `collective_rpc`."""

    weight_transfer_engine: Any

    def logra_status(self) -> dict[str, Any]:
        return _engine(self).status()

    def logra_sums(self) -> list[list[Any]]:
        return _engine(self).sums()


def _engine(worker: LograWorker) -> LograWeightTransferEngine:
    engine = worker.weight_transfer_engine
    if not isinstance(engine, LograWeightTransferEngine):
        raise UpdateError('vLLM was started without weight_transfer_config={"backend": "logra"}')
    return engine


def _read(info: LograUpdateInfo) -> bytes:
    if info.path is not None:
        return Path(info.path).read_bytes()
    if info.index is not None:
        return _fetch(info.index)
    if isinstance(info.data, str):
        return base64.b64decode(info.data, validate=True)
    if info.data is None:
        raise UpdateError("a transfer names no data, no path and no index")
    return info.data


def _open_anchor(info: LograUpdateInfo) -> Anchor:
    described = AnchorInfo.from_dict(info.info)
    if info.path is not None:
        return Anchor.from_file(described, Path(info.path))
    return Anchor.from_bytes(described, _read(info))


def _fetch(index: int) -> bytes:
    """A packet from the trainer's log. Only the environment names the server: the token goes to no other address."""
    from logra.sync.http_source import HttpSource

    url, token = os.environ.get(URL_VARIABLE), os.environ.get(TOKEN_VARIABLE)
    if not url or not token:
        raise UpdateError(
            f"Updates are to be fetched by number: set {URL_VARIABLE} and {TOKEN_VARIABLE} where vLLM is started"
        )
    with HttpSource(url, token) as source:
        return source.read(index)


def take_hold(
    vllm_config: VllmConfig, model: nn.Module, device: torch.device, info: LograInitInfo
) -> tuple[dict[str, Block], Reloader | None]:
    """Blocks of all targets: views of vLLM's parameters, or (with a `Reloader`) whole float32 matrices in host memory."""
    shapes = {name: (rows, columns) for name, rows, columns in info.targets}
    checkpoint = Checkpoint(vllm_config, model, shapes, frozenset(info.transposed))
    reason = "vLLM repacks weights on this device"
    if info.loading == "in_place" or (info.loading == "auto" and device.type != "cpu"):
        blocks, reason = in_place_blocks(model, checkpoint, info.residual)
        if reason is None:
            return blocks, None
        if info.loading == "in_place":
            raise ModelError(f"the weights cannot be updated in place: {reason}. Use loading='auto'")
    if info.loading not in ("auto", "in_place", "reload"):
        raise ModelError(f"loading is 'auto', 'in_place' or 'reload', not {info.loading!r:.40}")
    blocks = {name: Block(name, master) for name, master in checkpoint.masters()}
    return blocks, Reloader(vllm_config, model, checkpoint, blocks)


def in_place_blocks(model: nn.Module, checkpoint: Checkpoint, residual: str) -> tuple[dict[str, Block], str | None]:
    """Views of vLLM's parameters, each compared with the checkpoint; or the reason why there can be none."""
    fused = getattr(model, "packed_modules_mapping", {})
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places: dict[str, Place] = {}
    for name, shape in checkpoint.shapes.items():
        place = locate(model, name, shape, fused)
        if place is None:
            return {}, f"{name} has no place in vLLM's parameters that logra understands"
        places[name] = place
    blocks: dict[str, Block] = {}
    for name, master in checkpoint.masters():
        if not fits(places[name], parameters, master):
            return {}, f"vLLM holds {name} in another layout or type than the checkpoint"
        blocks[name] = places[name].block(name, parameters, residual)
        # the checkpoint may be finer than the parameter: keep all of it, rounded by the rule that Updates are applied with
        blocks[name].load(places[name].part(master).to(blocks[name].value.device))
    return blocks, None


class Checkpoint:
    """The files that vLLM loaded the model from, read through vLLM's loader.

    shapes: of what can move, logical (out, in). transposed: which of it is stored in x out.
    """

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, shapes: Mapping[str, Shape], transposed: frozenset[str]
    ) -> None:
        self.vllm_config, self.model, self.shapes, self.transposed = vllm_config, model, shapes, transposed
        # files saved from a bare base model lack the first part of the names: transformer.h.0 is h.0 there
        self._names = {name.partition(".")[2]: name for name in shapes} | {name: name for name in shapes}

    def name(self, key: str) -> str | None:
        """What the trainer calls a tensor of the files; None if it never moves."""
        return self._names.get(key)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the files."""
        load_config = replace(self.vllm_config.load_config, use_tqdm_on_load=False)
        loader: Any = get_model_loader(load_config)
        yield from loader.get_all_weights(self.vllm_config.model_config, self.model)

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Float32 values in host memory, logical (out, in), of everything that can move. Raises `ModelError` if some lack."""
        missing = set(self.shapes)
        for key, tensor in self.items():
            name = self.name(key)
            if name is None or name not in missing:
                continue
            stored = tensor if tensor.ndim == 2 else tensor.reshape(-1, 1)
            master = (
                (stored.t() if name in self.transposed else stored).to("cpu", torch.float32, copy=True).contiguous()
            )
            if tuple(master.shape) != self.shapes[name]:
                raise ModelError(
                    f"{name} is {tuple(master.shape)} in the model folder, the trainer has {self.shapes[name]}"
                )
            missing.discard(name)
            yield name, master
        if missing:
            raise ModelError(
                f"the model folder of vLLM lacks {len(missing)} of the trainer's weights, {', '.join(sorted(missing)[:3])} "
                "first: start both from the same folder"
            )

    def stored(self, key: str, tensor: Tensor, blocks: Mapping[str, Block], dtype: torch.dtype) -> Tensor:
        """A tensor as the loader expects it: that of the files, or what it has become."""
        name = self.name(key)
        if name is None:
            return tensor
        master = blocks[name].value
        value = split(master)[0] if dtype == torch.bfloat16 else master
        return (value.t() if name in self.transposed else value).reshape(tensor.shape)


class Reloader:
    """Hands the current weights to vLLM's loader again; untouched tensors come from the model folder."""

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, checkpoint: Checkpoint, blocks: Mapping[str, Block]
    ) -> None:
        self.model_config, self.model = vllm_config.model_config, model
        self.checkpoint, self.blocks = checkpoint, blocks

    def run(self) -> None:
        """One layerwise reload. The loader is always brought back to rest, so that an anchor can mend a failure."""
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(self._weights())  # type: ignore[operator]
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        _process_tied(self.model)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        dtype = self.model_config.dtype
        for key, tensor in self.checkpoint.items():
            yield key, self.checkpoint.stored(key, tensor, self.blocks, dtype)


def _process_tied(model: nn.Module) -> None:
    """A layerwise reload processes a tied parameter in the first of its layers only; a repacked head would keep old values."""
    seen: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        method = getattr(module, "quant_method", None)
        if weight is not None and id(weight) in seen and method is not None:
            method.process_weights_after_loading(module)
        seen.add(id(weight))
