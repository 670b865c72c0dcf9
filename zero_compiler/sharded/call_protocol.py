"""The protocol of a call of a sharded model: its ranks do the same thing for the same model, or are told otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ..config import Config
from ..cost.hardware import HardwareSpec
from ..errors import CaptureError, TransferError, ZeroError
from ..ir.plan_file import digest_at
from ..ranks.call_handshake import meet, plain_torch, short_digest
from ..ranks.failing import Failure, is_known
from ..ranks.failure_broadcast import broke_off
from ..ranks.group import Group
from .managed_parameters import ParamInfo
from .model_identity import ModelIdentity

T = TypeVar("T")
NOTHING_CAPTURED = (
    "there is no plan of this call: torch.compile captures nothing of the model's forward before a parameter is read "
    "by code that runs eagerly (an RNN, say, or a graph break within a loop; TORCH_LOGS=graph_breaks says where)"
)

# Of each process group: whose eager collective it is that runs, with the header before it. Collectives that two threads
# begin at once gloo would not tell apart.
_turns: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()
_new_turn = threading.Lock()


def _turn(group: Group) -> threading.RLock:
    with _new_turn:
        return _turns.setdefault(group.everyone.pg, threading.RLock())


class CallProtocol:
    """What the ranks of one sharded model do before its collectives, and after a call that broke off.

    ``only_planned``: a capture looks for a plan, and nothing is to run. ``broken``: why no collective of the model can
    be trusted any more.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        group: Group,
        config: Config,
        hardware: HardwareSpec,
        params: Mapping[str, ParamInfo],
    ) -> None:
        self._identity = identity
        self._group = group
        self._config = config
        self._hardware = hardware
        self._params = params
        self._plan = digest_at(config.plan)  # as it is now: the file may be edited while a model trains
        self._digests: dict[tuple[str, str], bytes] = {}
        self.only_planned = False
        self.broken: str | None = None

    def plan_for(self, hardware: HardwareSpec) -> None:
        """What plans are made for from here on, the same on all ranks; before the first call."""
        self._hardware = hardware

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_digests": {}}  # a copy of the model has a title of its own

    def meet(self, operation: str, details: str, told: Callable[[str], str]) -> None:
        """Before an eager collective: every rank is about to do the same ``operation`` for the same model.

        Args:
            details: what else must be the same on every rank, a line each.
            told: makes of the text of a call what a message about it says.

        Raises:
            RankMismatchError: on every rank, naming the first difference.
            TransferError: a peer did not answer, or an earlier call broke off.
            CaptureError: only a plan was asked for, and this code runs without being captured.
        """
        if self.only_planned:
            raise CaptureError(NOTHING_CAPTURED)
        self.check_whole()
        if self._group.one_rank:
            return

        def text() -> str:
            return f"{operation}\n{self._identity.title()}\n{self.describe()}\n{details}"

        doing = self._digests.get((operation, details))
        if doing is None:
            doing = self._digests[operation, details] = short_digest(text())
        meet(self._group, doing, lambda: told(text()), operation)

    def transfer(self, meet: Callable[[], None], do: Callable[[], T]) -> T:
        """:meth:`meet`, and then ``do`` the collectives of which that was the beginning.

        Whatever ends that on this rank alone (no memory, Ctrl-C) is told to its peers, which may be in the collectives;
        and no rank can call the model again. It is no context manager, as Ctrl-C may come when one has been entered.
        """
        if self._group.one_rank:
            meet()
            return do()
        with _turn(self._group):
            try:
                meet()
                return do()
            except BaseException as error:
                told = isinstance(getattr(error, "failure", None), Failure)
                # All ranks have an error of ours, but for one that a peer has told this rank amid the collective.
                if not is_known(error) and (told or not isinstance(error, ZeroError)):
                    self.break_off(f"{type(error).__name__}: {error}")
                    with plain_torch():
                        broke_off(self._group, error, [self._identity.title()])
                raise

    def check_whole(self) -> None:
        """Raise where an earlier call of this model broke off among its collectives."""
        if self.broken is not None:
            raise TransferError(self.broken)

    def break_off(self, reason: str) -> None:
        """A call ended among its collectives: peers may be waiting, and no later one can be matched to theirs."""
        everyone = self._group.everyone
        if everyone.world > 1 and self.broken is None:
            who = everyone.name_of(everyone.rank)
            self.broken = f"an earlier call of the model broke off on {who}: {reason}"

    def describe(self) -> str:
        """What ranks must agree on: parameters, layout, configuration; one line each."""
        config = {k: v for k, v in self._config.to_dict().items() if k not in ("nvme_dir", "plan")}
        if self._config.nvme_dir is not None:
            config["nvme_dir"] = "given"  # each rank may have its own
        if self._plan:
            config["plan"] = f"a file with decisions {self._plan}"
        spec, group = self._hardware, self._group
        config["hardware"] = f"{spec.name}, {spec.date}, {spec.digest()}"
        dims = " x ".join(f"{role} {n}" for role, n in zip(group.roles, group.mesh.shape, strict=True))
        lines = [
            f"ranks = {dims} on {group.device.type}",
            *(f"{k} = {v}" for k, v in sorted(config.items())),
        ]
        for info in self._params.values():
            place = info.placed(group)
            lines.append(f"parameter {info.name}: {list(info.shape)} {info.layout.dtype} {place}")
        return "\n".join(lines)
