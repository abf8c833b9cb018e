"""Any bit patterns, of any number, come back within the error of their codec, or are seen not to be finite."""

import pytest
import torch
from torch import Tensor

from autoddl.core.codecs import BLOCK, CODECS, ROOM, codecs_of
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph
from autoddl.runtime.collectives.coding import decode, encode, error_share
from autoddl.runtime.collectives.lossless_rows import exponents_of, lacks_exponents
from autoddl.runtime.step_graph import check_graph

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CASES = [(name, dtype) for name in CODECS for dtype in DTYPES if codecs_of((f"weights={name}",), "weights", dtype)]
SIZES = (0, 1, 2, 3, ROOM - 1, ROOM + 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)
ENDS = torch.tensor([sign * x for sign in (1, -1) for x in (
    0.0, 1.0, 1 / 3, 2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126, 2.0**-24, 65504.0, 65520.0, 3.3895e38, 2.0**127,
    torch.finfo(torch.float32).max)] + [float("nan"), float("inf"), -float("inf")])
"""Values at the ends of what float32, float16 and bfloat16 hold, and those that are not finite."""

LARGE = (64 * BLOCK, 64 * BLOCK + 1, 129 * BLOCK - 5)
"""Rows of more than one chunk."""


def drawn(seed: int, rows: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Rows of values of six kinds: any bits, finite ones, denormals, few that are not 0, alike ones, ends of ranges."""
    random = torch.Generator().manual_seed(seed)
    integers = torch.int32 if dtype.itemsize == 4 else torch.int16
    most = 2 ** (8 * dtype.itemsize - 1)
    x = torch.randint(-most, most, (rows, elements), generator=random).to(integers).view(dtype)
    if seed % 6 == 5:
        return ENDS[torch.randint(len(ENDS), (rows, elements), generator=random)].to(dtype)
    if seed % 6:
        x = torch.where(torch.isfinite(x.float()), x, torch.zeros((), dtype=dtype))
    if seed % 6 == 2:
        x = (x.view(integers) & 3 | -most).view(dtype)
    elif seed % 6 == 3:
        x = x * (torch.rand(rows, elements, generator=random) < 0.02)
    elif seed % 6 == 4:
        x = torch.randn(rows, elements, generator=random).to(dtype) * 3
    return x


def recoded(name: str, rows: Tensor) -> Tensor:
    """What comes back; exponents that find no room come besides."""
    data = encode(name, rows)
    assert data.shape == (len(rows), CODECS[name].row_bytes(rows.shape[1], rows.element_size()))
    besides = exponents_of(rows) if CODECS[name].lossless and lacks_exponents(data) else None
    return decode(name, data, rows.shape[1], rows.dtype, besides)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_any_values_come_back_within_the_error(name: str, dtype: str) -> None:
    for seed in range(6):
        for elements in (*SIZES[seed % 3::3], *LARGE[1:2] * (CODECS[name].lossless and seed == 4)):
            _comes_back(name, dtype, seed, elements)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_many_values_come_back_within_the_error(name: str, dtype: str) -> None:
    for seed in range(6, 42):
        for elements in (*SIZES, *LARGE):
            _comes_back(name, dtype, seed, elements)


def _comes_back(name: str, dtype: str, seed: int, elements: int) -> None:
    rows = drawn(seed, 1 + seed % 3, elements, DTYPES[dtype])
    found = recoded(name, rows)
    if CODECS[name].lossless:
        assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8)), f"{seed} {elements}"
    else:
        _is_near(name, rows.float(), found.float(), f"{name} {dtype} {seed} {elements}")


def _is_near(name: str, x: Tensor, found: Tensor, at: str) -> None:
    """Raises AssertionError where a finite value in a finite block is too far off, or one that is not comes back so."""
    blocks = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    largest = blocks.abs().amax(2, keepdim=True).expand_as(blocks).reshape(len(x), -1)[:, :x.shape[1]]
    finite = torch.isfinite(x) & (torch.isfinite(largest) | CODECS[name].is_cast)
    assert not torch.isfinite(found[~torch.isfinite(x)]).any(), at
    if CODECS[name].group > 1:  # the bound is that of its own four
        four = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 4)).view(len(x), -1, 4).abs().amax(2)
        largest = four.repeat_interleave(4, 1)[:, :x.shape[1]]
        finite = torch.isfinite(x) & torch.isfinite(largest)
    if name in ("bfloat16", "float16"):
        beyond = torch.isinf(found) & finite
        assert (x[beyond].abs() > (65504 if name == "float16" else 3.38e38)).all(), at
        relative, least = (2.0**-8, 2.0**-133) if name == "bfloat16" else (2.0**-11, 2.0**-25)
        bound, finite = x.double().abs() * relative + least, finite & ~beyond
    else:
        bound = largest * CODECS[name].error + 2.0**-126
    assert ((found.double() - x.double()).abs() <= bound)[finite].all(), at


def test_the_rate_of_each_codec_is_what_its_formula_says() -> None:
    """Bytes of a large row over those of its values, within 1 %."""
    rates = {"bfloat16": 1 / 2, "float16": 1 / 2, "int16": 1 / 2, "int8": 1 / 4, "int4": 1 / 8,
             "lossless": (3.5 + 5 / ROOM) / 4, "zfp16": 1 / 2, "zfp8": 1 / 4}
    assert rates.keys() == CODECS.keys()
    for name, rate in rates.items():
        for elements in (10_000, 123_457):
            data = encode(name, torch.randn(1, elements))
            assert data.numel() == pytest.approx(rate * 4 * elements, rel=0.01), name
    assert encode("lossless", torch.randn(1, 99_999).bfloat16()).numel() == pytest.approx(
        (1.5 + 5 / ROOM) * 99_999, rel=0.01)


@pytest.mark.parametrize("name", CODECS)
def test_a_row_that_was_changed_on_the_way_is_seen(name: str) -> None:
    for rows in (torch.randn(2, 3000), torch.randn(1, 100) * 1e-40, torch.randn(1, 0), drawn(1, 2, 3000,
                                                                                          torch.float32)):
        data = encode(name, rows)
        allowed = 1.0 if name != "float16" or rows.numel() == 0 or rows.abs().max() < 65504 else float("inf")
        assert error_share(name, rows, data) <= allowed
    rows = torch.randn(1, 3000)
    data = encode(name, rows)
    data[0, :500] ^= 0x55
    assert error_share(name, rows, data) > 1


@pytest.mark.parametrize("name", ["zfp8", "zfp16"])
def test_four_small_values_are_held_to_their_own_largest_beside_large_ones(name: str) -> None:
    rows = torch.randn(1, 1000) * 1e-3
    rows[0, 0] = 1e6
    data = encode(name, rows)
    assert error_share(name, rows, data) <= 1
    data[0, len(data[0]) // 2:] ^= 0x55
    assert error_share(name, rows, data) > 1


def test_only_exponents_that_find_no_room_are_sent_besides() -> None:
    usual = torch.randn(1, 50_000)
    assert not lacks_exponents(encode("lossless", usual))
    spread = usual * torch.logspace(-30, 30, 50_000)[torch.randperm(50_000)]
    data = encode("lossless", spread)
    assert lacks_exponents(data)
    with pytest.raises(ValueError, match="lists no exponents"):
        decode("lossless", data, 50_000)


def test_steps_with_lossless_messages_are_no_cuda_graph() -> None:
    check_graph(Graph((), (), ()), torch.device("cuda"), ("int8",))
    with pytest.raises(InputError, match="lossless messages wait for how many exponents find no room"):
        check_graph(Graph((), (), ()), torch.device("cuda"), ("int8", "lossless"))


@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if codec.scaled or codec.group > 1])
def test_the_largest_values_stay_finite(name: str) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[largest * (1 - k * 2.0**-24) * sign for k in range(64) for sign in (1, -1)]])
    assert ((recoded(name, x).double() - x.double()).abs() <= largest * CODECS[name].error).all()


def test_blocks_of_four_follow_what_is_small_beside_what_is_large_and_what_is_smooth() -> None:
    """A value may be off by a part of the largest of its own four, and smooth ones are off by less."""
    spread = (torch.randn(1, 4000) * torch.logspace(-8, 8, 1000).repeat_interleave(4)).double()
    for name in ("zfp8", "zfp16"):
        error = (recoded(name, spread.float()).double() - spread.float()).abs().view(-1, 4).amax(1)
        assert (error <= CODECS[name].error * spread.abs().view(-1, 4).amax(1) * (1 + 1e-6)).all()
    wave = torch.sin(torch.arange(8000) / 40).view(1, -1)
    off = [float((recoded("zfp8", x) - x).norm() / x.norm()) for x in (wave, torch.randn(1, 8000))]
    assert off[0] < 0.005 and 0.02 < off[1] < 0.04, "eight bits say more of what is smooth"
