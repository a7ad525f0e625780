"""Programmatic dependent launch: who waits and who gives leave, in source and machine code; where it is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.kernels import kernels, variant  # noqa: E402
from tilefold.backends.triton import dependent  # noqa: E402
from tilefold.backends.triton.build import DIVISOR, Target, has_dependent_launch  # noqa: E402
from tilefold.backends.triton.compile import compiled  # noqa: E402
from tilefold.backends.triton.dependent import ALONE, Place, enabled, places  # noqa: E402
from tilefold.backends.triton.launch import TritonKernel, Variant  # noqa: E402
from tilefold.errors import BackendError  # noqa: E402

HOPPER, AMPERE, MI300 = Target("cuda", 90), Target("cuda", 80), Target("hip", "gfx942", 64)
WAIT, LEAVE = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"
#: Programs of two kernels, and one of three.
SPLIT = ("grouped decode", "latent", "routing", "performer")
#: Machine instructions that read or write global memory, by their first letters.
MEMORY = ("LDG.", "STG.", "LD.", "ST.", "LDGSTS", "UTMALDG", "UTMASTG", "UBLKCP", "ATOMG", "RED.")


@pytest.fixture(autouse=True)
def settings(own_cache, monkeypatch):
    monkeypatch.delenv("TILEFOLD_PDL", raising=False)


def variants(name: str) -> list[Variant]:
    """The kernels of a program as one call launches them."""
    found = kernels(name)
    return [variant(k, place=p) for k, p in zip(found, places([True] * len(found)), strict=True)]


def built(v: Variant, target: Target = HOPPER):
    return compiled(v.kernel, v.rendered, v.config, [DIVISOR] * len(v.rendered.arguments), wide=False, target=target)


def statements(v: Variant) -> list[str]:
    """The kernel's lines without its comment."""
    lines = v.rendered.source[v.rendered.source.index(f"def {v.rendered.name}(") :].splitlines()[1:]
    return [line.strip() for line in lines if not line.strip().startswith("#")]


def instructions(sass: str) -> list[str]:
    """Machine instructions in order, as `control codes TAB @predicate NAME operands`, without predicates."""
    words = [line.split("\t")[-1].split() for line in sass.splitlines() if "\t" in line]
    return [w[w[0].startswith("@")] for w in words]


@pytest.mark.parametrize("count", range(6))
def test_every_kernel_but_the_first_launched_waits(count):
    """Whichever kernels have nothing to do: what is launched with the attribute is a chain without gaps."""
    for launched in itertools.product([False, True], repeat=count):
        found = places(launched)
        assert all(p == ALONE for p, on in zip(found, launched, strict=True) if not on)
        chain = [p for p, on in zip(found, launched, strict=True) if on]
        assert [p.follows for p in chain] == [n > 0 for n in range(len(chain))]
        assert [p.followed for p in chain] == [n + 1 < len(chain) for n in range(len(chain))]


@pytest.mark.parametrize("name", SPLIT)
def test_waits_and_leave_are_the_first_statements(name):
    first, *middle, last = [statements(v) for v in variants(name)]
    assert first[0] == LEAVE and WAIT not in first
    assert last[0] == WAIT and LEAVE not in last
    assert all(m[:2] == [WAIT, LEAVE] for m in middle)
    assert len(middle) == (name == "performer")


def test_single_kernels_and_kernels_on_their_own_do_neither():
    for name in (*SPLIT, "softmax"):
        assert all("gdc" not in variant(k).rendered.source for k in kernels(name))
    (only,) = variants("softmax")
    assert "gdc" not in only.rendered.source


def test_the_rest_of_a_kernel_is_the_same_and_so_is_its_configuration():
    for name in SPLIT:
        for k, v in zip(kernels(name), variants(name), strict=True):
            plain = variant(k)
            assert [s for s in statements(v) if s not in (WAIT, LEAVE)] == statements(plain)
            assert v.config == plain.config and v is not plain


@pytest.mark.parametrize("name", SPLIT)
def test_on_hopper_the_wait_comes_before_any_access(name):
    """In the assembler's order too: it must not move a load over the wait."""
    for v in variants(name):
        done, place = built(v), v.rendered.place
        assert done.metadata.launch_pdl == place.follows
        assert ("griddepcontrol.wait" in done.asm["ptx"]) == place.follows
        assert ("griddepcontrol.launch_dependents" in done.asm["ptx"]) == place.followed
        code = instructions(done.asm["sass"])
        touches = [n for n, c in enumerate(code) if c.startswith(MEMORY)]
        waits = [n for n, c in enumerate(code) if c.startswith("ACQBULK")]
        leaves = [n for n, c in enumerate(code) if c.startswith("PREEXIT")]
        assert touches and len(waits) == place.follows and len(leaves) == place.followed
        assert all(n < touches[0] for n in waits + leaves)


@pytest.mark.parametrize("target", [AMPERE, MI300], ids=lambda t: str(t.arch))
def test_other_architectures_compile_without_and_refuse_with(target):
    plain, _ = (variant(k) for k in kernels("grouped decode"))
    text = built(plain, target).asm["ptx" if target is AMPERE else "amdgcn"]
    assert "griddepcontrol" not in text
    for v in variants("grouped decode"):
        with pytest.raises(BackendError, match="no programmatic dependent launch"):
            built(v, target)


@pytest.mark.parametrize("options", [{"interpreted": True}, {"nvidia": False}], ids=str)
def test_rendering_refuses_where_there_is_no_such_instruction(options):
    (k, _) = kernels("grouped decode")
    units = tuple(len(i.shape) - 1 for i in k.block.inputs) + tuple(len(r.dims) - 1 for r in k.block.results)
    k.variant(units, k.sizes({}), **options)
    with pytest.raises(BackendError, match="cannot wait"):
        k.variant(units, k.sizes({}), place=Place(follows=True), **options)


def test_kernels_of_specialised_warps_are_launched_plainly():
    """The wait would stand in one group of warps; others load."""
    (k, _) = kernels("grouped decode")
    config = replace(variant(k).config, specialize=True)
    v = variant(TritonKernel(k.block, lambda block, sizes: config), place=Place(follows=True, followed=True))
    assert v.rendered.place == ALONE and "gdc" not in v.rendered.source


def test_targets():
    assert all(has_dependent_launch(Target("cuda", arch)) for arch in (90, 100, 120))
    assert not any(has_dependent_launch(t) for t in (Target("cuda", 89), AMPERE, MI300))


def test_devices_and_the_switch(monkeypatch):
    asked = {"capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked["capability"])
    cuda = torch.device("cuda", 0)
    assert enabled(cuda) and not enabled(torch.device("cpu"))
    monkeypatch.setenv("TILEFOLD_PDL", "0")
    assert not enabled(cuda)
    monkeypatch.setenv("TILEFOLD_PDL", "1")
    assert enabled(cuda)
    asked["capability"] = (8, 9)
    assert not enabled(cuda)
    asked["capability"] = (9, 4)  # what torch says of an MI300
    monkeypatch.setattr(dependent.torch.version, "hip", "6.2")
    assert not enabled(cuda)
