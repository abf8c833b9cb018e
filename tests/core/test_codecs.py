"""Codecs by name: bytes by hand, words that a user writes, and which steps may be coded."""

import pytest

from autoddl.core.codecs import CLASSES, checked_codecs, codecs_of, coded_bytes, coded_kind, parse_codecs
from autoddl.core.conversion import Step
from autoddl.core.errors import InputError
from autoddl.core.layout import B, Mesh, P, Split

MESH = Mesh.parse("net=2,node=4")


def test_bytes_are_those_of_values_and_scales() -> None:
    assert coded_bytes("int8", 4, 4 * 4 * 3000, 4) == 4 * (3000 + 3 * 4)
    assert coded_bytes("int4", 4, 4 * 4 * 3000, 4) == 4 * (1500 + 3 * 4)
    assert coded_bytes("bfloat16", 4, 4 * 4 * 1000, 4) == 4 * 2 * 1000
    assert coded_bytes("int4", 2, 4 * 3, 4) == 2 * (1 + 4)
    assert coded_bytes("int16", 2, 2 * 4 * 2000, 4) == 2 * (2 * 2000 + 2 * 4)
    assert coded_bytes("zfp8", 2, 2 * 4 * 4001, 4) == 2 * 4004 and coded_bytes("zfp16", 2, 2 * 4 * 4001, 4) == 2 * 8008
    assert coded_bytes("lossless", 2, 2 * 4 * 4800, 4) == 2 * (3 * 4800 + 2400 + 5 + 100 * 5 + 4)
    assert coded_bytes("lossless", 2, 2 * 2 * 4800, 2) == 2 * (1 * 4800 + 2400 + 5 + 100 * 5 + 4)


def test_a_reduction_is_an_exchange_of_coded_pieces() -> None:
    assert (coded_kind("reduce-scatter"), coded_kind("all-gather")) == ("all-to-all", "all-gather")
    step = Step((0,), P, Split(0))
    assert step.sends(2, 4096, 4) == ("reduce-scatter", 4096)
    assert step.coded("int8").sends(2, 4096, 4) == ("all-to-all", 2 * (512 + 4))
    assert Step((0,), Split(0), Split(1), "int8").sends(2, 4096, 4) == ("all-to-all", 2 * (512 + 4))


def test_a_coded_step_round_trips() -> None:
    step = Step((0, 1), P, Split(1), "int4")
    assert step.text(MESH) == "net+node: P->S(1) as int4"
    assert Step.parse(step.text(MESH), MESH) == step
    assert Step.parse("net: P->S(0)", MESH).coded("int8").coded("") == Step((0,), P, Split(0))


@pytest.mark.parametrize(("source", "target", "codec"), [(P, B, "int8"), (B, Split(0), "int8"), (P, Split(0), "int3")])
def test_what_cannot_be_coded_is_refused(source: object, target: object, codec: str) -> None:
    with pytest.raises(InputError, match="reduce-scatter, all-gather, all-to-all can, as bfloat16"):
        Step((0,), source, target, codec)  # type: ignore[arg-type]


def test_words_are_put_in_order_and_checked() -> None:
    assert parse_codecs("weights=int8, gradients=int4") == ("gradients=int4", "weights=int8")
    assert parse_codecs(["weights=int8", ""]) == ("weights=int8",)
    for words, message in (("gradients", "'gradients' compresses nothing: write MESSAGES=CODEC"),
                           ("gradients=zfp", "codecs bfloat16, float16, int16, int8, int4, lossless"),
                           ("losses=int8", "messages of gradients, weights, activations, pipeline"),
                           ("weights=int8/int3", "'weights=int8/int3' compresses nothing"),
                           ("pipeline=lossless", "has a fixed size, which lossless may exceed"),
                           ("weights=int8,weights=int4", "weights are compressed as int8 and as int4")):
        with pytest.raises(InputError, match=message):
            parse_codecs(words)


def test_names_stand_for_words_and_words_go_before_them() -> None:
    assert parse_codecs("lossless") == ("gradients=lossless", "weights=lossless", "activations=lossless")
    assert parse_codecs("hybrid")[0] == "gradients=int8"
    assert parse_codecs("gradients=int4,hybrid") == ("gradients=int4", *parse_codecs("hybrid")[1:])
    assert parse_codecs(parse_codecs("hybrid")) == parse_codecs("hybrid")


def test_a_codec_is_for_values_that_it_makes_smaller() -> None:
    words = parse_codecs("activations=bfloat16/lossless/int8")
    assert codecs_of(words, "activations", "float32") == ("bfloat16", "lossless", "int8")
    assert codecs_of(words, "activations", "bfloat16") == ("lossless", "int8")
    assert codecs_of(words, "activations", "float16") == ("int8",)
    for dtype in ("float64", "int64", "bool", "complex64"):
        assert not codecs_of(words, "activations", dtype)
    assert not codecs_of(words, "weights", "float32") and not codecs_of(words, "", "float32")


def test_an_error_allows_codecs_within_it_alone() -> None:
    within = [f"{name}=int16{'/lossless' * (name != 'pipeline')}" for name in CLASSES]
    assert checked_codecs((), 1e-3) == parse_codecs(within)
    assert checked_codecs((), 0.0) == parse_codecs("lossless")
    assert checked_codecs(("gradients=int8",), 4e-3) == ("gradients=int8",)
    assert parse_codecs("gradients=bfloat16/int16/int8/int4/lossless")[0] in checked_codecs((), 0.5)
    for words, error, message in (
            (("gradients=int8",), 1e-3, "'gradients=int8' is not within an error of 0.001: int8 errs by up to 0.0039"),
            (("weights=float16",), 0.5, "float16 has no bound on its error"), ((), -1.0, "an error of -1 is none"),
            ((), float("nan"), "an error of nan is none")):
        with pytest.raises(InputError, match=message):
            checked_codecs(words, error)
