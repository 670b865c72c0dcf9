"""Instructions say what they do, and whoever goes through a Program knows each of them, or refuses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from null.graphs import OWNER, lower, two_layers, two_layers_backward
from null.hosted import programs
from null.instructions import program_of, spec_of

from zero_compiler.cost.simulate import simulate
from zero_compiler.errors import TransferError, VerifyError
from zero_compiler.ir.instructions import KINDS, Effects, Instruction, Step, Work
from zero_compiler.ir.transfers import HOST, LINK
from zero_compiler.memory import peak_check
from zero_compiler.memory.verify import verify_program
from zero_compiler.runtime.reference import Rank, Reference


@dataclass(frozen=True)
class Unknown(Instruction):
    """Of no transfer."""

    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    op: str = "unknown"

    def work(self, of) -> Work:
        return Work("unknown", us=3.0)


@dataclass(frozen=True)
class Sent(Instruction):
    """Starts a transfer."""

    index: int = 0
    op: str = "sent"

    effects: ClassVar[Effects] = Effects("offloads", starts=0)


def test_the_verifier_knows_every_instruction():
    assert all(peak_check.known(kind.__new__(kind)) for name, kind in KINDS.items())


def test_an_instruction_that_the_verifier_does_not_know_is_refused():
    b = two_layers()
    program, _ = b.program(lower(b, "forward"), "forward")
    program.instrs.insert(0, Unknown())
    with pytest.raises(
        VerifyError, match=r"the verifier does not know what memory it takes \(peak_check.py\)"
    ):
        verify_program(program, {OWNER: 2})


def test_the_simulator_takes_what_an_instruction_says_of_itself():
    assert simulate(program_of([Unknown(), Unknown()]), spec_of(), world=2).total_us == 6.0


def test_the_reference_reads_what_an_instruction_reads_and_refuses_what_it_does_not_know():
    def run(*instrs):
        return Reference(program_of(instrs), [], {}, [Rank({})]).run([[]])

    assert run(Unknown()) == [[]]
    with pytest.raises(TransferError, match="the reference does not know what a 'unknown' does"):
        run(Unknown(outs=(0,)))
    with pytest.raises(TransferError, match="the reference does not know what a 'sent' does"):
        run(Sent())


@pytest.mark.parametrize("build", [two_layers, two_layers_backward])
def test_every_step_that_is_started_is_waited_for_once(build):
    b, phase = build(), "backward" if build is two_layers_backward else "forward"
    program, _ = b.program(lower(b, phase), phase)
    started = [s for i in program.instrs if (s := i.starts(program)) is not None]
    ended = [s for i in program.instrs if (s := i.ends(program)) is not None]
    assert sorted(started) == sorted(ended)
    assert len(set(started)) == len(started) == len(program.gathers) + len(program.reduces)
    lanes = {t.lane for i in program.instrs if (t := i.transfer(program)) is not None}
    assert lanes == {LINK}


@pytest.mark.usefixtures("on_accelerator")
def test_a_reduction_whose_result_goes_to_the_host_has_two_steps():
    program = programs(offload_grads="host")["backward"]
    lanes = {t.step: t.lane for i in program.instrs if (t := i.transfer(program)) is not None}
    assert lanes[Step("reduces", 0, 0)] == LINK
    assert lanes[Step("reduces", 0, 1)] == HOST
    assert {s for i in program.instrs if (s := i.ends(program)) is not None} == set(lanes)
