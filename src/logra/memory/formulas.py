"""What each low-rank method keeps and needs per weight matrix, in bytes: for those that plans do not rehearse.

p x q = (out features, in features), r: rank. State is float32 unless said otherwise. The golden values of the tests are those
of the papers' formulas worked out by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

Matrix = tuple[int, int]
_QUANT_BLOCK = 256  # elements with one float32 scale, in block-wise 8-bit AdamW
_BLOCKLLM_SPARSITY = 0.9  # of BlockLLM's code


def adamw(p: int, q: int, r: int = 0) -> int:
    """Both moments of every element."""
    return 8 * p * q


def adamw_8bit(p: int, q: int, r: int = 0) -> int:
    """Both moments in a byte, and their scales (arXiv 2110.02861, blocks of 256)."""
    return 2 * p * q + 8 * -(-p * q // _QUANT_BLOCK)


def logra(p: int, q: int, r: int) -> int:
    """The paper's: S (p x r) and A (r x q) in float32, and a second moment a row (arXiv 2610.06647)."""
    return 4 * (p * r + r * q) + 4 * p


def lora_pre(p: int, q: int, r: int) -> int:
    """Both moments as products of rank r (arXiv 2602.24283); AdamW where the rank is no less than a side."""
    return adamw(p, q) if min(p, q) <= r else 8 * r * (p + q)


def lora_pre_muon(p: int, q: int, r: int) -> int:
    """The momentum as a product of rank r; whole where the rank is no less than a side."""
    return muon(p, q) if min(p, q) <= r else 4 * r * (p + q)


def galore(p: int, q: int, r: int) -> int:
    """Moments of the projected gradient, and the projector (arXiv 2403.03507)."""
    r = min(r, p, q)
    return 4 * (2 * r * max(p, q) + r * min(p, q))


def galore_8bit(p: int, q: int, r: int) -> int:
    """Moments in a byte and their scales, projector in float32 (published figures leave scales out, and have it in bfloat16)."""
    r = min(r, p, q)
    seen = r * max(p, q)
    return 2 * seen + 8 * -(-seen // _QUANT_BLOCK) + 4 * r * min(p, q)


def apollo(p: int, q: int, r: int) -> int:
    """GaLore's with a random projector, and the norm that limits growth (arXiv 2412.05270, which leaves the projector out:
    it could be drawn again from its seed at every step)."""
    return galore(p, q, r) + 4


def apollo_mini(p: int, q: int, r: int = 1) -> int:
    return apollo(p, q, 1)


def fira(p: int, q: int, r: int) -> int:
    """GaLore's, and the norm that limits growth (arXiv 2410.01623)."""
    return galore(p, q, r) + 4


def muon(p: int, q: int, r: int = 0) -> int:
    return 4 * p * q


def lora(p: int, q: int, r: int) -> int:
    """Both moments of both factors."""
    return 8 * r * (p + q)


def lora_all(p: int, q: int, r: int) -> int:
    """Adapter, its gradient and both moments."""
    return 16 * r * (p + q)


def dora(p: int, q: int, r: int) -> int:
    return lora(p, q, r) + 8 * p


def total(state: Callable[[int, int, int], int], matrices: Iterable[Matrix], rank: int) -> int:
    """Of a whole model."""
    return sum(state(p, q, rank) for p, q in matrices)


# -- what an update needs while it runs, beyond state and gradient; one matrix at a time -----------------------------------


def _nothing(p: int, q: int, r: int) -> int:
    return 0


def _back_projected(p: int, q: int, r: int) -> int:
    """GaLore's refresh decides: a float32 copy of the gradient and its thin SVD, and the step p x q afterwards."""
    return 4 * p * q + 4 * min(p, q) * (p + q)


def _with_residual(p: int, q: int, r: int) -> int:
    """Fira: the residual p x q beside the step; its refresh is GaLore's."""
    return max(_back_projected(p, q, r), 8 * p * q)


def _scaled_gradient(p: int, q: int, r: int) -> int:
    return 4 * p * q


def _reconstructed(p: int, q: int, r: int) -> int:
    """LoRA-Pre: m whole, which becomes the step; v is made some rows at a time."""
    return 4 * p * q


def _orthogonalised(p: int, q: int, r: int) -> int:
    """Muon: the momentum's float32 update, and two bfloat16 matrices of Newton and Schulz."""
    return 8 * p * q


@dataclass(frozen=True)
class Formula:
    """state, workspace: bytes of one matrix. share: of the matrices that are trained at a time (BlockLLM)."""

    label: str
    state: Callable[[int, int, int], int]
    workspace: Callable[[int, int, int], int] = _nothing
    share: float = 1.0

    def state_bytes(self, matrices: Iterable[Matrix], rank: int) -> int:
        return round(self.share * total(self.state, matrices, rank))

    def workspace_bytes(self, matrices: Iterable[Matrix], rank: int) -> int:
        return max((self.workspace(p, q, rank) for p, q in matrices), default=0)


# All on the dense gradient.
STATE = {
    "adamw_8bit": Formula("8-bit AdamW", adamw_8bit),
    "galore": Formula("GaLore", galore, _back_projected),
    "galore_8bit": Formula("8-bit GaLore", galore_8bit, _back_projected),
    "apollo": Formula("APOLLO", apollo, _scaled_gradient),
    "apollo_mini": Formula("APOLLO-Mini", apollo_mini, _scaled_gradient),
    "fira": Formula("Fira", fira, _with_residual),
    "blockllm": Formula("BlockLLM", adamw, share=1.0 - _BLOCKLLM_SPARSITY),
    "lora_pre": Formula("LoRA-Pre", lora_pre, _reconstructed),
    "lora_pre_muon": Formula("LoRA-Pre Muon", lora_pre_muon, _orthogonalised),
    "muon": Formula("Muon", muon, _orthogonalised),
}
