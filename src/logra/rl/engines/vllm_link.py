"""The trainer's side of vLLM's weight transfer, whatever carries it: in process or over HTTP.

Order of a transfer: pause, start_weight_update, update_weights, finish_weight_update with the version's label, prefix cache
dropped, resume. Each worker counts its own Updates; `Link.check` asks all of them before anything is sampled, so an Update that
was lost, refused or half applied is found before its rollouts are used. After any failure nothing is sampled until `publish`
with None has loaded an anchor.
"""

from __future__ import annotations

import base64
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from logra.errors import ConfigError, UpdateError, UpdateOrderError, WrongBaseError
from logra.rl.engines.vllm_route import Route, plan_route
from logra.sketch.block import Block
from logra.sketch.digest import combine
from logra.sketch.update import Update
from logra.sync.acknowledge import Acknowledgement
from logra.sync.anchors import AnchorInfo, encode_tensors
from logra.sync.log import Log
from logra.sync.packet import Packet

_WRAPPED = re.compile(r"Worker failed with error '(?P<words>.*)', please check the stack trace", re.DOTALL)
INLINE_BYTES = 16 << 20  # larger messages go through a file


class TransferError(UpdateError):
    """vLLM refused a call of the weight transfer, or could not be reached. The text is the worker's."""


def worker_words(text: str) -> str:
    """A worker's own message, out of what vLLM's processes wrap around it."""
    found = _WRAPPED.search(text)
    return found["words"] if found else text


class Control(Protocol):
    """What a transfer needs of vLLM. Each call raises `TransferError`.

    takes_bytes: whether update info may hold bytes (in process), or text only (JSON).
    """

    takes_bytes: bool

    def init(self, info: dict[str, Any]) -> None: ...
    def pause(self) -> None: ...
    def start(self) -> None: ...
    def update(self, info: dict[str, Any]) -> None: ...
    def finish(self, label: str) -> None: ...
    def drop_caches(self) -> None: ...
    def resume(self) -> None: ...

    def call(self, method: str) -> list[Any]:
        """A method of `LograWorker` on every worker."""
        ...


class Link:
    """Keeps vLLM's workers at the trainer's version, and knows when they are not.

    run: hex id of the run. masters: everything that can move, by unfused name, logical (out, in) float32; `Block`s are best, as
    they are read one at a time, and needed where Updates are of aligned bases, as they hold those in force. digest: of the same,
    now. transposed: names that the checkpoint stores in x out (Conv1D).
    base: the digest at version 0; None takes `digest()`, right only where the trainer is at version 0.
    residual, loading: see `logra.integrations.vllm_worker`. folder: where messages above `inline_bytes` are handed over; the
    workers must see it under the same path. None: a temporary one (in process), or everything inline (JSON).
    head: checksum of the newest packet, for callers who publish packets of a log of their own. by_index: workers fetch packets by
    their number from that log (`logra.sync.serve`; see `vllm_worker`).
    digest_every: an Update whose version is a multiple of it carries the trainer's digest, which is compared; 0: none does.
    """

    def __init__(
        self,
        control: Control,
        *,
        run: str,
        masters: Callable[[], Mapping[str, Tensor | Block]],
        digest: Callable[[], str],
        head: Callable[[], str] | None = None,
        transposed: Collection[str] = (),
        base: str | None = None,
        residual: str = "device",
        loading: str = "auto",
        folder: Path | None = None,
        inline_bytes: int = INLINE_BYTES,
        by_index: bool = False,
        digest_every: int = 0,
    ) -> None:
        self.control, self.run, self.masters, self.digest = control, run, masters, digest
        self.base = digest() if base is None else base
        self.folder, self.inline_bytes, self.digest_every = folder, inline_bytes, digest_every
        self.by_index = by_index
        self.transposed, self.residual, self.loading = tuple(transposed), residual, loading
        self.version, self.max_model_len = 0, 0
        self.problem: str | None = "the workers have not acknowledged version 0"
        self._newest, self._head = head, self.base
        self._session = secrets.token_hex(8)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def begin(self) -> None:
        """Version 0: every worker takes hold of its weights and answers with the run, its version and the parts of its digest.

        Weights that are not the trainer's are replaced by an anchor if the trainer is at version 0; if it is further on (a
        resumed run), nothing can be sampled before `publish(version, None)`.
        """
        table = [[name, *_shape(value)] for name, value in self.masters().items()]
        self.control.init(
            {
                "run": self.run,
                "base": self.base,
                "targets": table,
                "transposed": list(self.transposed),
                "residual": self.residual,
                "loading": self.loading,
            }
        )
        self.max_model_len = self._check_settings()
        if self.worker_digest() == self.base:
            self._transfer(None, 0)
            self._settle(0, self.base)
        elif self.digest() == self.base:
            self._load_anchor(0, self.base)
        else:
            self.problem = "its weights are not those that the run began with"

    def join(self) -> None:
        """Take up whatever the workers are: fresh ones begin (`begin`), those of this run must be brought to our version.

        Raises `WrongBaseError` if they have followed another run. See `catch_up`.
        """
        runs = {status["run"] for status in self.control.call("logra_status")}
        if runs == {""}:
            self.begin()
            return
        if runs != {self.run}:
            raise WrongBaseError(
                f"this vLLM has followed run {max(runs)}, so its weights are no base any more: restart it for run {self.run}"
            )
        self.max_model_len = self._check_settings()
        self.problem = "its connection was lost, and no anchor loaded since"
        with suppress(TransferError):  # a transfer that was open when the connection broke; mostly there is none
            self.control.finish("none")

    def publish(self, version: int, update: object | None) -> None:
        """Bring the workers to `version` with an Update or a packet; None: to the trainer's weights, by an anchor if need be.

        Raises `UpdateError`; from then on nothing can be sampled until an anchor has been loaded.
        """
        try:
            if update is None:
                self._anchor(version)
            else:
                self._send(version, self._packet(version, update))
        except Exception as error:
            self.problem = str(error)
            raise

    def catch_up(self, version: int, log: Log | None, *, is_live: bool) -> None:
        """Join the workers and bring them to `version`: by what the run's log holds, where it leads there and (if is_live) is
        less than an anchor; if is_live, then compare digests, and load an anchor where they differ.

        is_live: whether the trainer's weights are those of `version`, and stay so during this call. If not, they are not read.
        Raises `UpdateError`.
        """
        self.join()
        try:
            if log is not None:
                self._follow(version, log, is_live)
        except UpdateError as error:
            self.problem = str(error)
            if not is_live:
                raise
        if is_live:
            self.publish(version, None)
        elif self.problem is not None:
            raise UpdateError(f"vLLM cannot be brought to version {version}: {self.problem}")

    def check(self) -> None:
        """Raise unless every worker is at this version of this run, whole. To be called before anything is sampled."""
        if self.problem is not None:
            raise UpdateOrderError(
                f"vLLM cannot sample the policy: {self.problem}. Load an anchor with publish(version, None), or restart vLLM"
            )
        for rank, status in enumerate(self.control.call("logra_status")):
            found = self._describe(rank, status)
            if found is not None:
                self.problem = found
                raise UpdateOrderError(
                    f"{found}: its rollouts would not be those of the policy, so none was sampled. Load an anchor with "
                    "publish(version, None), or restart vLLM"
                )

    def label(self, version: int | None = None) -> str:
        """What vLLM stamps on what it samples now, or sampled at `version`."""
        return f"{self.run}:{self.version if version is None else version}"

    def acknowledgements(self) -> list[Acknowledgement]:
        """Each worker's word, as a subscriber of a log would give it."""
        return [
            Acknowledgement(
                name=f"vllm-{rank}",
                run=status["run"] or "0",
                session=self._session,
                version=max(0, status["version"]),
                applied=status["applied"],
                missing_count=len(status["missing"]),
                missing=tuple(status["missing"]),
                unexpected_count=len(status["unexpected"]),
                unexpected=tuple(status["unexpected"]),
                error=status["problem"],
            )
            for rank, status in enumerate(self.control.call("logra_status"))
        ]

    def worker_digest(self) -> str:
        """The digest of the workers' float32 weights, put together from their shards. Raises `WrongBaseError` for gaps."""
        return combine_parts([part for parts in self.control.call("logra_sums") for part in parts])

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _check_settings(self) -> int:
        """The longest prompt and response together; `ConfigError` if vLLM would report other log-probs than we need."""
        settings = self.control.call("logra_status")[0]
        if settings["logprobs_mode"] != "processed_logprobs":
            raise ConfigError(
                f"vLLM reports {settings['logprobs_mode']}: start it with --logprobs-mode processed_logprobs, so that log-probs "
                "are those of the sampling temperature"
            )
        return settings["max_model_len"]

    def _packet(self, version: int, update: object) -> Packet:
        if self.problem is not None:
            raise UpdateOrderError(
                f"vLLM takes no Update: {self.problem}. Load an anchor with publish(version, None) first"
            )
        if isinstance(update, Update):
            digest = self.digest() if self.digest_every and version % self.digest_every == 0 else None
            update = Packet(update.incremental(), self.run, self.base, update.index + 1, digest, self._head)
        if not isinstance(update, Packet):
            raise UpdateError(f"the vLLM engine publishes Updates and packets, not {type(update).__name__}")
        if update.version != version:
            raise UpdateOrderError(f"update {update.index} leads to version {update.version}, not to {version}")
        return update

    def _send(self, version: int, packet: Packet) -> None:
        self._transfer(self._packet_message(packet.index, packet.to_bytes), version)
        if packet.digest is not None:
            self._compare(packet.digest, f"after update {packet.index}")
        self._settle(version, packet.checksum)

    def _anchor(self, version: int) -> None:
        digest = self.digest()
        stands = [self._describe(rank, s, version) for rank, s in enumerate(self.control.call("logra_status"))]
        if self.problem is None and not any(stands) and self.version == version and self.worker_digest() == digest:
            return
        self._load_anchor(version, digest)

    def _load_anchor(self, version: int, digest: str) -> None:
        masters = self.masters()
        table = [[name, *_shape(value)] for name, value in masters.items()]
        head = self._newest() if self._newest is not None else self.base if version == 0 else digest
        path = self._folder() / f"anchor-{version}-{secrets.token_hex(4)}.safetensors"
        try:
            with path.open("xb") as file:
                sha256, size = encode_tensors(file, masters, table)
            info = AnchorInfo(self.run, self.base, version, version, head, digest, sha256, size)
            self._transfer(self._anchor_message(info, path), version)
        finally:
            path.unlink(missing_ok=True)
        self._compare(digest, f"after the anchor of version {version}")
        self._settle(version, head)

    def _anchor_message(self, info: AnchorInfo, path: Path) -> dict[str, Any]:
        """path: the anchor's file, in our folder."""
        if self.folder is None and not self.control.takes_bytes:
            where = {"data": base64.b64encode(path.read_bytes()).decode()}
        else:
            where = {"path": str(path)}
        return {"kind": "anchor", "info": info.to_dict(), **where}

    def _follow(self, version: int, log: Log, is_live: bool) -> None:
        """By the log's anchors and Updates; nothing is done where a live anchor is smaller."""
        plan = plan_route(log, self.control.call("logra_status"), version)
        size = sum(4 * rows * columns for _, rows, columns in log.info().targets)
        if is_live and plan.bytes >= size:
            return
        self._transact(self._messages(log, plan), version)
        self._settle(version, plan.head)

    def _messages(self, log: Log, plan: Route) -> Iterator[dict[str, Any]]:
        """What the log holds, read as it is sent."""
        if (anchor := plan.anchor) is not None:
            path = self._folder() / f"anchor-{anchor.version}-{secrets.token_hex(4)}.safetensors"
            try:
                file, _ = log.stream_anchor(anchor.version)
                with file, path.open("xb") as copy:
                    shutil.copyfileobj(file, copy)
                yield self._anchor_message(anchor, path)
            finally:
                path.unlink(missing_ok=True)
        for index in plan.updates:
            yield self._packet_message(index, partial(log.read, index))

    def _packet_message(self, index: int, read: Callable[[], bytes]) -> dict[str, Any]:
        where = {"index": index} if self.by_index else self._payload(read(), f"update-{index}")
        return {"kind": "packet", **where}

    def _payload(self, data: bytes, name: str) -> dict[str, Any]:
        if self.control.takes_bytes and len(data) <= self.inline_bytes:
            return {"data": data}
        if not self.control.takes_bytes and (self.folder is None or len(data) <= self.inline_bytes):
            return {"data": base64.b64encode(data).decode()}
        path = self._folder() / f"{name}.logra"
        path.write_bytes(data)
        return {"path": str(path)}

    def _transfer(self, info: dict[str, Any] | None, version: int) -> None:
        """One transaction; None only labels the version."""
        self._transact([] if info is None else [info], version)

    def _transact(self, infos: Iterable[dict[str, Any]], version: int) -> None:
        """Several messages in one transaction; files that they name are removed."""
        self.control.pause()
        try:
            self.control.start()
            for info in infos:
                try:
                    self.control.update(info)
                finally:
                    if "path" in info:
                        Path(info["path"]).unlink(missing_ok=True)
            self.control.finish(f"{self.run}:{version}")
            self.control.drop_caches()
        except UpdateError:
            with suppress(TransferError):  # workers whose transfer is still open would refuse the next one
                self.control.finish("none")
            raise
        finally:
            self.control.resume()

    def _settle(self, version: int, head: str) -> None:
        """Take a version as reached, if every worker says so."""
        for rank, status in enumerate(self.control.call("logra_status")):
            if (found := self._describe(rank, status, version)) is not None:
                raise UpdateOrderError(found)
        self.version, self._head, self.problem = version, head, None

    def _compare(self, digest: str, when: str) -> None:
        if (actual := self.worker_digest()) != digest:
            raise UpdateError(f"{when} vLLM's weights have the digest {actual}, the trainer's have {digest}")

    def _describe(self, rank: int, status: Mapping[str, Any], version: int | None = None) -> str | None:
        """What is wrong with a worker, if anything."""
        version = self.version if version is None else version
        if status["run"] != self.run:
            return f"vLLM's worker {rank} follows run {status['run'] or 'none'}, not {self.run}"
        if status["problem"] is not None:
            return f"vLLM's worker {rank} is unusable ({status['problem']})"
        if status["version"] != version:
            return (
                f"vLLM's worker {rank} is at version {status['version']}, the trainer at {version}: it missed an Update"
            )
        return None

    def _folder(self) -> Path:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            return self.folder
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="logra-vllm-")
        return Path(self._temporary.name)


def combine_parts(parts: list[list[Any]]) -> str:
    """The digest of matrices whose blocks several workers hold, some of them more than once (replicated layers).

    parts: [name, out, in, row, rows, column, columns, sum, sum]. Raises `WrongBaseError` where copies differ or a part lacks.
    """
    blocks: dict[tuple[Any, ...], tuple[int, int]] = {}
    for name, rows, columns, *place, first, second in parts:
        sums = (int(first), int(second))
        if blocks.setdefault((name, rows, columns, *place), sums) != sums:
            raise WrongBaseError(f"vLLM's workers hold different copies of {name}")
    matrices: dict[str, list[Any]] = {}
    for (name, rows, columns, _, num_rows, _, num_columns), sums in blocks.items():
        entry = matrices.setdefault(name, [(rows, columns), 0, 0, 0])
        entry[1] += num_rows * num_columns
        entry[2] += sums[0]
        entry[3] += sums[1]
    for name, (shape, covered, *_) in matrices.items():
        if covered != shape[0] * shape[1]:
            raise WrongBaseError(f"vLLM's workers hold {covered} of the {shape[0] * shape[1]} values of {name}")
    mask = (1 << 64) - 1
    return combine({name: (shape, (a & mask, b & mask)) for name, (shape, _, a, b) in matrices.items()})


def _shape(value: Tensor | Block) -> tuple[int, ...]:
    return tuple(value.shape)
