"""Weights of Hugging Face are read slice by slice into any plan, and written so that transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import alone
from planmaker import cluster_of
from ranks import on_ranks, shared
from safetensors.torch import load_file, save_file
from staged_plans import even_cuts, staged_plan
from torch import nn

import autoddl
from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import InputError, MachineError, MismatchError
from autoddl.core.plan import Plan
from autoddl.runtime import parallelize as runtime

SAMPLE = {"input_ids": torch.arange(32).view(4, 8), "labels": torch.arange(32).view(4, 8), "use_cache": False}


def built(seed: int = 0, device: str = "cpu") -> Any:
    """A GPT-2 with a tied head."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0)
    if device == "cpu":
        return transformers.GPT2LMHeadModel(config)
    model = transformers.GPT2LMHeadModel(config)
    for part in model.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().to(device))
    model.tie_weights()
    return model


@shared
def planned() -> Plan:
    return autoddl.plan(built(), cluster_of("a=2"), SAMPLE, mesh="a=2",
                        pins=("transformer.wte.weight: a=S(1)", "transformer.h.*.mlp.*.weight: a=S(0)"))


def exchanged(plan: Plan, folder: str) -> list[Any]:
    """Reads a folder into a model without values, writes it again in one file and in several."""
    parallel = autoddl.parallelize(built(1, "meta"), plan, weights=f"{folder}/given")
    loss = float(parallel(SAMPLE))
    autoddl.save_safetensors(parallel, f"{folder}/one")
    autoddl.save_safetensors(autoddl.planned_module(parallel), f"{folder}/several", file_bytes=6_000)
    with pytest.raises(InputError, match="this Linear runs no plan"):
        autoddl.save_safetensors(torch.nn.Linear(1, 1), folder)
    other = autoddl.parallelize(built(2), plan)
    autoddl.load_safetensors(other, f"{folder}/several")
    said = []
    for bad in ("none", "short", "wrong", "more", "broken"):
        with pytest.raises(MismatchError) as error:
            autoddl.load_safetensors(other, f"{folder}/{bad}")
        said.append(str(error.value))
    autoddl.load_safetensors(other, f"{folder}/more", strict=False)
    with pytest.raises(MachineError) as failed:
        autoddl.save_safetensors(parallel, f"{folder}/given/model.safetensors")
    return [loss, float(other(SAMPLE)), said, str(failed.value)]


@pytest.mark.ranks
def test_weights_go_straight_into_pieces_and_back(tmp_path: Path) -> None:
    import transformers

    model = built(5)
    with alone():
        model.save_pretrained(tmp_path / "given")
    state = load_file(tmp_path / "given" / "model.safetensors")
    first = "transformer.h.0.mlp.c_fc.weight"
    for name, bad in (("short", {k: v for k, v in state.items() if k != first}),
                      ("wrong", {**state, first: state[first][1:].clone()}),
                      ("more", {**state, "extra": torch.ones(1)})):
        (tmp_path / name).mkdir()
        save_file(bad, tmp_path / name / "model.safetensors")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no tensors")
    truth = float(model(**SAMPLE).loss.detach())
    for loss, again, said, failed in on_ranks(2, exchanged, planned(), str(tmp_path)):
        assert loss == pytest.approx(truth, rel=1e-6) and again == pytest.approx(truth, rel=1e-6)
        words = ("has no model.safetensors", f"has no tensor {first}", f"{first} is [15, 64]", "has extra, which",
                 "cannot be read as safetensors")
        assert all(word in line for word, line in zip(words, said, strict=True)), said
        assert "not written to" in failed
    assert len(json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())["weight_map"]) == len(
        state)
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    for folder in ("one", "several"):
        for part in (model.config, model.generation_config):
            part.save_pretrained(tmp_path / folder)
        read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / folder)
        plain = built(3)
        autoddl.load_safetensors(plain, tmp_path / folder)  # in one process, without a plan
        for name, value in model.state_dict().items():
            assert torch.equal(value, read.state_dict()[name]) and torch.equal(value, plain.state_dict()[name])
    modes = {file.stat().st_mode & 0o777 for file in tmp_path.glob("*/*.safetensors") if file.parent.name == "several"}
    (tmp_path / "new").touch()
    assert modes == {(tmp_path / "new").stat().st_mode & 0o777}
    with pytest.raises(MismatchError, match="has extra, which the model does not"):
        autoddl.load_safetensors(plain, tmp_path / "more")


@shared
def captured() -> Captured:
    return capture(built(), {name: value[:2] if isinstance(value, torch.Tensor) else value
                             for name, value in SAMPLE.items()})


def staged(plan: Plan, folder: str) -> float:
    parallel = runtime.parallelize(built(1), plan, captured=captured())
    autoddl.load_safetensors(parallel, f"{folder}/given")
    autoddl.save_safetensors(parallel, f"{folder}/again")
    return float(parallel(SAMPLE))


@pytest.mark.ranks
def test_stages_read_their_own_weights_and_all_are_written(tmp_path: Path) -> None:
    model = built(5)
    with alone():
        model.save_pretrained(tmp_path / "given")
    one = staged_plan(captured(), even_cuts(captured().graph, 2), "1f1b", "one=1", 2, 0, False)
    for loss in on_ranks(2, staged, one, str(tmp_path)):
        assert loss == pytest.approx(float(model(**SAMPLE).loss.detach()), rel=1e-6)
    given, again = (load_file(tmp_path / name / "model.safetensors") for name in ("given", "again"))
    assert given.keys() == again.keys() and all(torch.equal(given[name], again[name]) for name in given)


def test_an_index_that_is_none_is_named(tmp_path: Path) -> None:
    from autoddl.adapters.safetensors import _files

    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(InputError, match="is no index of safetensors"):
        _files(tmp_path)
