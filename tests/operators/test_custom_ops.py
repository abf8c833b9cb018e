"""Our operators: one mask whatever the layout, attention and losses as torch has them."""

import torch
from torch.nn import functional as F

from autoddl.operators.kernels.custom_ops import attention, dropout, keep_mask, token_loss, token_weight


def test_pieces_draw_their_part_of_one_mask() -> None:
    shape = (6, 5, 7)
    whole = keep_mask(shape, 0.3, key=3, seed=11)
    for offsets, sizes in (((0, 0, 0), (6, 5, 7)), ((2, 0, 3), (4, 5, 4)), ((5, 4, 6), (1, 1, 1))):
        piece = keep_mask(sizes, 0.3, key=3, seed=11, index=(offsets, shape))
        at = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        assert torch.equal(piece, whole[at])


def test_masks_look_random() -> None:
    n = 1 << 18
    masks = [keep_mask((n,), 0.25, key, seed).double() for key, seed in ((0, 0), (1, 0), (0, 1), (1, 1))]
    sigma = (0.75 * 0.25 / n) ** 0.5
    for k, mask in enumerate(masks):
        assert abs(mask.mean() - 0.75) < 5 * sigma
        for lag in (1, 2, 64, 1024):
            assert abs(torch.corrcoef(torch.stack([mask[lag:], mask[:-lag]]))[0, 1]) < 5 / n**0.5
        for other in masks[:k]:
            assert abs(torch.corrcoef(torch.stack([mask, other]))[0, 1]) < 5 / n**0.5


def test_positions_beyond_two_to_the_32() -> None:
    whole = (1 << 20, 1 << 14)
    far = [keep_mask((1, 4096), 0.5, 0, index=((row, 0), whole)) for row in (0, 1 << 18, 1 << 19, (1 << 20) - 1)]
    assert all(not torch.equal(far[0], other) and abs(other.double().mean() - 0.5) < 0.05 for other in far[1:])


def test_dropout_scales_what_it_keeps() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = dropout(x, 0.5, key=0)
    y.sum().backward()
    assert set(y.tolist()) == {0.0, 2.0} and torch.equal(x.grad, y.detach())  # type: ignore[arg-type]
    assert not dropout(x, 1.0, key=0).any()


def test_attention_is_torchs() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    masks = (None, torch.rand(2, 1, 6, 6) > 0.2, torch.randn(6, 6))
    for mask in masks:
        ours = attention(q, k, v, mask, enable_gqa=True, scale=0.3)
        theirs = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, scale=0.3)
        assert torch.allclose(ours, theirs, atol=1e-5)
    causal = attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(causal, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), atol=1e-5)


def test_a_query_that_may_see_nothing_sees_zeros() -> None:
    q, k, v = (torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[0] = False
    for given in (mask, torch.zeros(4, 4, dtype=torch.float64).masked_fill(~mask, float("-inf"))):
        ours, theirs = attention(q, k, v, given), F.scaled_dot_product_attention(q, k, v, given)
        assert (ours[:, :, 0] == 0).all() and torch.allclose(ours, theirs)
        found, wanted = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (ours, theirs))
        assert all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


def test_heads_of_attention_draw_one_mask() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    whole = attention(q, k, v, dropout_p=0.5, dropout_key=2)
    part = attention(q[:, 2:], k[:, 2:], v[:, 2:], dropout_p=0.5, dropout_key=2, index=((0, 2, 0, 0), (2, 4, 6, 6)))
    assert torch.equal(part, whole[:, 2:])


def test_the_mean_is_the_sum_over_the_weight() -> None:
    torch.manual_seed(0)
    logits, target, weight = torch.randn(10, 5), torch.randint(0, 5, (10,)), torch.rand(5)
    target[3:6] = -100
    for w in (None, weight):
        mean = token_loss(logits, target, w, label_smoothing=0.1) / token_weight(target, w)
        assert torch.allclose(mean, F.cross_entropy(logits, target, w, label_smoothing=0.1))
    assert token_loss(logits.half(), target).dtype is torch.float32
