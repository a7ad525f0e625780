"""Machine code in which one group of warps reads what another one computed is found, and not run."""

from __future__ import annotations

from dataclasses import replace

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'tilefold[gpu]'")

from tests.backends.triton.test_compile import HOPPER, built  # noqa: E402
from tests.backends.triton.test_groups import variant, wide_kernel  # noqa: E402
from tilefold.backends.triton import build as build_  # noqa: E402
from tilefold.backends.triton import machine_code  # noqa: E402
from tilefold.backends.triton.machine_code import _instruction, disassembled, strays  # noqa: E402
from tilefold.errors import BackendError  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_cache")

#: Two groups after an indirect jump, and a loop in the first; {first}, {second}: what they do.
CODE = """
.text.fold:
        /*0000*/                   S2UR UR4, SR_CTAID.X ;
        /*0010*/                   UIADD3 UR6, UR4, 0x1, URZ ;
.L_x_0:
        /*0020*/               @P0 BRA `(.L_x_4) ;
        /*0030*/                   BRX R2 -0x40              (*"BRANCH_TARGETS .L_x_1,.L_x_3"*);
.L_x_1:
        /*0040*/                   {first} ;
.L_x_2:
        /*0050*/                   UIADD3 UR9, UR8, 0x2, URZ ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/                   BRA `(.L_x_0) ;
.L_x_3:
        /*0080*/                   {second} ;
        /*0090*/                   HGMMA.64x128x16.F32 R24, gdesc[UR8].tnspB, R24 ;
        /*00a0*/                   BRA `(.L_x_0) ;
.L_x_4:
        /*00b0*/                   EXIT ;
"""


def found(first: str, second: str) -> list[tuple[int, int, int | None]]:
    return [(s.address, s.register, s.written) for s in strays(CODE.format(first=first, second=second))]


def test_groups_that_compute_for_themselves_are_right():
    assert found("UMOV UR8, 0x1", "ULDC.64 UR8, c[0x0][0x208]") == [(0x90, 10, None), (0x90, 11, None)]
    code = CODE.format(first="UIMAD UR8, UR6, UR4, URZ", second="NOP").replace("gdesc[UR8]", "R2, UR6")
    assert strays(code) == ()  # what stands before the jump is everybody's


def test_a_register_of_another_group_is_found():
    assert (0x90, 8, 0x40) in found("UMOV UR8, 0x1", "UMOV UR10, 0x1")
    assert (0x90, 9, 0x50) in found("UMOV UR8, 0x1", "UMOV UR8, 0x1")
    said = [str(s) for s in strays(CODE.format(first="UMOV UR8, 0x1", second="UMOV UR10, 0x1"))]
    assert any("HGMMA" in s and "UR8 is written by another group at 0x40" in s for s in said)


def test_a_vote_writes_a_uniform_register():
    assert (0x90, 8, 0x40) in found("VOTEU.ALL UR8, UPT, PT", "UMOV UR10, 0x1")
    code = CODE.format(first="NOP", second="VOTEU.ANY UR8, UPT, PT").replace("gdesc[UR8].tnspB", "R2, UR8")
    assert not any(s.address == 0x90 for s in strays(code))


@pytest.mark.parametrize(
    "first, same", [("ULEA UR8, UR4, UR6, 0x18", True), ("ULEA UR8, UR4, UR6, 0x17", False), ("R2UR UR8, R2", False)]
)
def test_whose_value_it_is_does_not_matter_where_all_are_one(first, same):
    """A group computes anew what stands before the jump; another one reads it, as on its own way it has that value."""
    before = "S2UR UR4, SR_CTAID.X ;\n        /*0004*/                   ULEA UR8, UR4, UR6, 0x18"
    start = "UMOV UR6, 0x400 ;\n        /*0002*/                   "
    code = CODE.replace("S2UR UR4, SR_CTAID.X", start + before).replace("UIADD3 UR6, UR4, 0x1, URZ", "NOP")
    code = code.format(first=first, second="NOP").replace("gdesc[UR8].tnspB", "R2, UR8")
    assert any(s.address == 0x90 and s.register == 8 for s in strays(code)) != same


def test_what_is_kept_and_restored_is_no_use():
    code = CODE.format(first="UMOV UR8, 0x1", second="MOV R7, UR8").replace("gdesc[UR8].tnspB", "R2")
    assert strays(code) == ()
    assert strays(code.replace("MOV R7, UR8", "UMOV UR3, UR8")) != ()


@pytest.mark.parametrize(
    "between, same",
    [
        ("UMOV UR8, 0x1", True),
        ("UMOV UR8, 0x1 ;\n        /*0048*/                   IADD3 R7, R7, 0x1, RZ", False),
        ("UMOV UR8, 0x1 ;\n        /*0048*/                   IMAD.WIDE R6, R2, 0x4, R4", False),
        ("UMOV UR8, 0x1 ;\n        /*0048*/                   SHFL.IDX PT, R7, R2, RZ, 0x1f", False),
        ("UMOV UR8, 0x1 ;\n        /*0048*/                   IADD3 R5, R7, 0x1, RZ", True),
    ],
)
def test_what_is_restored_is_what_was_kept(between, same):
    """By one group, of what stood before the jump: the other one still reads that, unless the keeper was written."""
    code = CODE.replace("UIADD3 UR6, UR4, 0x1, URZ", "UMOV UR8, 0x400")
    lines = [
        "MOV R7, UR8",
        f"        /*0044*/                   {between}",
        "        /*004c*/                   R2UR UR8, R7",
    ]
    kept = " ;\n".join(lines)
    code = code.format(first=kept, second="NOP").replace("gdesc[UR8].tnspB", "R2, UR8")
    assert any(s.address == 0x90 and s.register == 8 for s in strays(code)) != same


def test_code_without_groups_has_no_strays():
    assert strays("") == ()
    assert strays("\n".join(line for line in CODE.splitlines() if "BRX" not in line)) == ()


def test_an_indirect_jump_to_unknown_places_is_an_error():
    with pytest.raises(BackendError, match="does not say"):
        strays(CODE.replace("BRANCH_TARGETS .L_x_1,.L_x_3", ""))


def old_form():
    """A kernel whose groups take the place of the probabilities from before they branch off."""
    v = variant(wide_kernel("no softmax"), hopper=True)
    source = v.rendered.source
    assert "made.index(tf_apart())" in source
    return replace(v, rendered=replace(v.rendered, source=source.replace("made.index(tf_apart())", "made.index(0)")))


def test_what_the_assembler_does_wrong_is_found(monkeypatch):
    """On a device this kernel had half of its columns wrong, and then an illegal address."""
    with pytest.raises(BackendError, match=r"assembled wrongly: 0x.* by another group"):
        built(old_form(), HOPPER)
    monkeypatch.setattr(build_, "strays", lambda sass: ())
    done = built(old_form(), HOPPER)
    assert {s.register for s in strays(disassembled(done.assembly["cubin"]))} >= {4, 5}


def test_a_missing_disassembler_is_an_error_that_leads_to_the_usual_form(monkeypatch):
    done = built(variant(wide_kernel("causal"), hopper=True), HOPPER).assembly["cubin"]
    assert "HGMMA" in disassembled(done)
    with pytest.raises(BackendError, match="cannot be disassembled"):
        disassembled(b"no machine code")
    monkeypatch.setattr(machine_code, "knobs", None)
    with pytest.raises(BackendError, match="not installed"):
        disassembled(done)


def test_a_left_operand_in_registers_has_no_descriptor():
    """The two uniform registers where it would stand are anybody's."""
    product = "HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR8].tnspB, R24 ;"
    assert _instruction(0, product, product, ()).reads == {10, 11}
    both = product.replace("R120, ", "")
    assert _instruction(0, both, both, ()).reads == {8, 9, 10, 11}
