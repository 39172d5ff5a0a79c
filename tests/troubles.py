"""GPUs that are pulled out, lost, sick, cordoned, cut and made whole by chance, under a plugin."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from plugin.life import DevicePlugin
from rte.model import Fault, FaultClass, Faults, Gpu, Machine, MigSlice
from tests.small_machine import address, slices, uuid

PROFILES = {"3g.40gb": 2, "1g.10gb": 4}
"""Of MIG, and how many slices a GPU is cut into."""


def parts(number: int, profile: str) -> tuple[MigSlice, ...]:
    """UUIDs follow from GPU and instance, so other profiles bring the same ones again."""
    return slices(number, *[profile] * PROFILES[profile])


class Troubles:
    """The hardware of a node, and what can happen to it; the plugin sees each change."""

    plugin: DevicePlugin

    def __init__(self, whole: Machine, dice: Random) -> None:
        self.whole = whole
        self.dice = dice
        self.all_well()

    def all_well(self) -> None:
        self.plugged = set(range(len(self.whole.gpus)))
        self.lost: set[int] = set()
        self.sick: set[int] = set()
        self.cordoned: set[int] = set()
        self.cut: dict[int, str] = {}  # GPU → the profile of its slices

    # As it is

    def gpu(self, gpu: Gpu) -> Gpu:
        if gpu.number in self.lost:
            return replace(gpu, uuid=None, index=None, lost="GPU is lost")
        if gpu.number in self.cut:
            made = parts(gpu.number, self.cut[gpu.number])
            return replace(gpu, mig_enabled=True, slices=made)
        return gpu

    def machine(self) -> Machine:
        whole = self.whole
        return replace(
            whole,
            pci=tuple(f for n, f in enumerate(whole.pci) if n in self.plugged),
            gpus=tuple(self.gpu(g) for n, g in enumerate(whole.gpus) if n in self.plugged),
        )

    def faults(self) -> Faults:
        ill = (Fault(severity=FaultClass.WITHHOLD, reason="xid-79"),)
        return {address(n): ill for n in self.sick}

    def withheld(self) -> Mapping[str, str]:
        return {address(n): "test" for n in self.cordoned}

    def parent(self) -> dict[str, str]:
        """The GPU of each slice that there is, pulled out or not."""
        return {str(s.id): uuid(n) for n, profile in self.cut.items() for s in parts(n, profile)}

    def __str__(self) -> str:
        return (
            f"plugged {self.plugged} lost {self.lost} sick {self.sick} cordoned {self.cordoned} "
            f"cut {self.cut}"
        )

    def look(self) -> None:
        """The plugin sees the hardware as it is."""
        self.plugin.update(self.machine(), self.faults())

    # What can happen

    def change(self, ill: set[int]) -> set[int]:
        """One more or one less; well is what most are, most of the time."""
        if ill and self.dice.random() < 0.65:
            return ill - {self.dice.choice(sorted(ill))}
        return ill | {self.dice.randrange(len(self.whole.gpus))}

    def fault(self) -> None:
        self.sick = self.change(self.sick)
        self.look()

    def lose(self) -> None:
        self.lost = self.change(self.lost)
        self.look()

    def plug(self) -> None:
        every = set(range(len(self.whole.gpus)))
        self.plugged = every - self.change(every - self.plugged)
        self.look()

    def cordon(self) -> None:
        self.cordoned = self.change(self.cordoned)
        self.plugin.withhold(self.withheld())

    def reshape(self) -> None:
        """MIG: cut, cut otherwise, or made whole; also while pods have it."""
        if self.cut and self.dice.random() < 0.5:
            del self.cut[self.dice.choice(sorted(self.cut))]
        else:
            profile = self.dice.choice(sorted(PROFILES))
            self.cut[self.dice.randrange(len(self.whole.gpus))] = profile
        self.look()
