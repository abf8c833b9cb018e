"""Codecs by name: bytes by hand, words that a user writes, and which steps may be coded."""

import pytest

from autoddl.core.codecs import coded_bytes, coded_kind, parse_codecs
from autoddl.core.conversion import Step
from autoddl.core.errors import InputError
from autoddl.core.layout import B, Mesh, P, Split

MESH = Mesh.parse("net=2,node=4")


def test_bytes_are_those_of_values_and_scales() -> None:
    assert coded_bytes("int8", 4, 4 * 4 * 3000, 4) == 4 * (3000 + 3 * 4)
    assert coded_bytes("int4", 4, 4 * 4 * 3000, 4) == 4 * (1500 + 3 * 4)
    assert coded_bytes("bfloat16", 4, 4 * 4 * 1000, 4) == 4 * 2 * 1000
    assert coded_bytes("int4", 2, 4 * 3, 4) == 2 * (1 + 4)


def test_a_reduction_is_an_exchange_of_coded_pieces() -> None:
    assert (coded_kind("reduce-scatter"), coded_kind("all-gather")) == ("all-to-all", "all-gather")
    step = Step((0,), P, Split(0))
    assert step.sends(2, 4096, 4) == ("reduce-scatter", 4096)
    assert step.coded("int8").sends(2, 4096, 4) == ("all-to-all", 2 * (512 + 4))


def test_a_coded_step_round_trips() -> None:
    step = Step((0, 1), P, Split(1), "int4")
    assert step.text(MESH) == "net+node: P->S(1) as int4"
    assert Step.parse(step.text(MESH), MESH) == step
    assert Step.parse("net: P->S(0)", MESH).coded("int8").coded("") == Step((0,), P, Split(0))


@pytest.mark.parametrize(("source", "target", "codec"), [(P, B, "int8"), (B, Split(0), "int8"), (P, Split(0), "int3")])
def test_what_cannot_be_coded_is_refused(source: object, target: object, codec: str) -> None:
    with pytest.raises(InputError, match="a reduce-scatter or an all-gather can, as bfloat16"):
        Step((0,), source, target, codec)  # type: ignore[arg-type]


def test_words_are_put_in_order_and_checked() -> None:
    assert parse_codecs("weights=int8, gradients=int4") == ("gradients=int4", "weights=int8")
    assert parse_codecs(["weights=int8", ""]) == ("weights=int8",)
    for words, message in (("gradients", "'gradients' compresses nothing: write MESSAGES=CODEC"),
                           ("gradients=zfp", "codecs bfloat16, float16, int8, int4"),
                           ("activations=int8", "messages of gradients, weights"),
                           ("weights=int8,weights=int4", "weights are compressed as int8 and as int4")):
        with pytest.raises(InputError, match=message):
            parse_codecs(words)
