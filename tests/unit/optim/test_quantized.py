"""Block-wise bytes: error within half a code, exact ends, and blocks that do not know each other."""

import pytest
import torch

from logra.optim.quantized import BLOCK, dequantize, num_blocks, quantize


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (16, 16), (7, 300), (1, 256)])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e12])
def test_the_nearest_code_by_brute_force(is_signed, shape, size):
    x = size * torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = (x if is_signed else x.square() / size).float()
    codes, scales = quantize(x, is_signed)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and scales.shape == (num_blocks(x.numel()),)
    back = dequantize(codes, scales, is_signed).flatten()
    levels = torch.arange(-127, 128, dtype=torch.float64) / 127 if is_signed else torch.arange(256.0).double() / 255
    table = levels.sign() * levels**4
    for block, part in enumerate(x.flatten().split(BLOCK)):
        roots = (
            part.double() / scales[block].double()
        ).abs() ** 0.25 * part.sign()  # nearest on the scale of the roots
        nearest = (levels[None] - roots[:, None]).abs().argmin(1)
        expected = table[nearest] * scales[block].double()
        torch.testing.assert_close(back[block * BLOCK :][: len(part)].double(), expected, rtol=1e-5, atol=0)


def test_zeros_and_the_largest_are_exact():
    x = torch.zeros(2, BLOCK)
    x[1, 7], x[1, 9] = -3.0, 1e-11
    codes, scales = quantize(x, True)
    back = dequantize(codes, scales, True)
    assert torch.equal(back[0], x[0]) and back[1, 7] == -3.0 and back[1, 9] == 0.0
    assert torch.isfinite(dequantize(*quantize(torch.full((4,), 1e-44), False), False)).all()


def test_relative_error_of_ordinary_numbers():
    x = torch.rand(4096, generator=torch.Generator().manual_seed(1)) * 0.999 + 1e-3
    for is_signed, most in ((True, 0.11), (False, 0.06)):
        back = dequantize(*quantize(x, is_signed), is_signed)
        assert float(((back - x) / x).abs().max()) < most
