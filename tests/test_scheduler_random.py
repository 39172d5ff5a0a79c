"""What a scheduler decides by our object of a node by chance, and the node's real kubelet.

Half of the nodes are those of tests/test_accounting_random.py, with every policy and option of the
kubelet's managers, half the small ones of tests/test_scheduler.py. Before each pod the object is
made of what the kubelet says, its figures are compared with a recount, and the plugin's model
(which tests/test_scheduler.py holds to the plugin) decides by it; then the kubelet does. Where the
two differ a row of docs/scheduler.md has to say why, and the kubelet to refuse for a reason that
the row knows.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rte.kubelet.admission import Admitted, admit
from rte.kubelet.node import Held, KubeletState, MemoryTables, kubelet_state
from rte.kubelet.spec import PodSpec, parse_pod
from rte.model import CpuId, DeviceId, NumaId, Observation, Policy, thousandths
from rte.publish.nrt import nrt
from tests import chance, generated
from tests.conftest import GoProgram
from tests.observed import observe
from tests.real_kubelet import Admission, Json
from tests.recount import memory_nodes
from tests.scheduling import kubelet_machine
from tests.test_accounting_random import World
from tests.topology_match import Seen, first, places, seen, why

STEPS = 40
SEEDS, LONG_SEEDS = 10, 150

ALIGNMENT = "TopologyAffinityError"
NO_WHOLE_CORES = "SMTAlignmentError"
AT_ALLOCATION = "UnexpectedAdmissionError"
REFUSALS: Mapping[str, set[str]] = {
    "restricted": {ALIGNMENT},
    "memory group": {ALIGNMENT, AT_ALLOCATION},
    "odd CPUs": {NO_WHOLE_CORES},
    "half cores": {NO_WHOLE_CORES},
    "node without CPUs": {ALIGNMENT, AT_ALLOCATION},
    "init container": {ALIGNMENT, AT_ALLOCATION, NO_WHOLE_CORES},
    "ended init container": {ALIGNMENT, AT_ALLOCATION, NO_WHOLE_CORES},
    "sidecar": {ALIGNMENT, AT_ALLOCATION},
    "request for none": {ALIGNMENT, AT_ALLOCATION},
    "device of several nodes": {ALIGNMENT, AT_ALLOCATION},
    "sick device unseen": {ALIGNMENT},
}
"""Row → how the kubelet refuses what the scheduler has placed."""


class Judged(World):
    """A node whose pods a scheduler decides about first."""

    def __init__(self, program: Path, random: Random) -> None:
        self.specs: dict[str, PodSpec] = {}
        self.tally = Counter[str]()
        super().__init__(program, random)
        self.node.asks_api = True

    def a_machine(self) -> list[Json]:
        """The small ones in one socket, for their NUMA nodes differ in size: of unlike sockets the
        kubelet takes one for free that has as many CPUs left as the average, and hands out what
        others hold."""
        self.small = chance.a_machine(self.chance) if self.chance.random() < 0.5 else None
        if self.small is None:
            return super().a_machine()
        return [{**node, "socket": 0} for node in kubelet_machine(self.small)]

    def some_devices(self) -> dict[str, dict[str, Any]]:
        if self.small is None:
            return super().some_devices()
        listed = chance.some_devices(self.chance, self.small)
        return {
            resource: {str(id): tuple(map(int, numa)) or None for id, numa in devices.items()}
            for resource, devices in listed.items()
        }

    def a_config(self) -> Json:
        if self.small is None:
            return self.any_config()
        made = chance.a_config(self.chance, self.small)
        if made["memoryManagerPolicy"] == "Static":
            node = next(node for node in self.machine if node["cores"] and node["memory"] != "0")
            made["reservedMemory"] = [{"numaNode": node["id"], "limits": {"memory": "100Mi"}}]
        return {**made, "featureGates": {"CPUManagerPolicyAlphaOptions": True}}

    def any_config(self) -> Json:
        """More often with the one policy that the plugin filters for; pods with resources of
        their own are left alone by the managers, as in every kubelet by default."""
        made = super().a_config()
        made["featureGates"].pop("PodLevelResourceManagers", None)
        excluded = "align-by-socket" in made.get("cpuManagerPolicyOptions", {})
        if not excluded and self.chance.random() < 0.4:
            made["topologyManagerPolicy"] = "single-numa-node"
        if self.chance.random() < 0.3:
            made.setdefault("topologyManagerPolicyOptions", {})["max-allowable-numa-nodes"] = "10"
        return made

    def kinds(self) -> dict[Callable[[], None], float]:
        crowded, has_devices = len(self.node.alive) > 6, bool(self.node.plugins)
        return {
            self.admit: 60,
            self.remove: 14 if crowded else 7,
            self.finish: 7,
            self.clear: 3,
            self.sicken: 4 * has_devices,
            self.change_list: 2,
            self.plug: 2 * has_devices,
            self.restart: 1,
        }

    # The pod

    def next_pod(self, name: str, state: KubeletState) -> Json:
        """One that asks for nothing that nobody has registered: a kubelet passes over that."""
        if self.chance.random() < 0.6:
            return chance.a_pod(self.chance, state, name)
        made = generated.pod(self.chance, name, self.machine, self.config)
        for each in (*made["spec"]["initContainers"], *made["spec"]["containers"]):
            for amounts in each["resources"].values():
                for resource in [r for r in amounts if "/" in r and r not in state.devices]:
                    del amounts[resource]
        if self.chance.random() < 0.1:
            made["spec"]["overhead"] = chance.OVERHEAD
        return made

    def admit(self) -> None:
        self.names += 1
        name = f"p{self.names}"
        observation = observe(self.node.kubelet, self.node.channel, self.node.facts())
        state = self.state(observation)
        made = self.next_pod(name, state)
        spec = parse_pod(made)
        seen = self.seen(observation)
        self.node.check(self.totals())
        admission = self.node.admit(made)
        self.specs[name] = spec
        self.log.append(f"{made} {admission.reason} {admission.message}")
        placed = self.judge(seen, state, spec, admission)
        if not admission.admitted:
            self.ended.append(name)
        elif not placed:
            self.node.remove(name)

    def judge(self, seen: Seen, state: KubeletState, spec: PodSpec, real: Admission) -> bool:
        """Whether the scheduler places the pod; fails where nothing is known to explain that."""
        placed = places(seen, spec)
        answer = admit(state, spec, prefer=first)
        about = f"placed {placed}, {answer}, {real}\n{spec}\n{seen}\n{state}"
        assert isinstance(answer, Admitted) is real.admitted, about
        if placed == real.admitted:
            self.tally["agreed"] += 1
            return placed
        rows = why(seen, state, spec)
        assert rows is not None, about
        if placed:
            known = {reason for row in rows for reason in REFUSALS.get(row, ())}
            assert real.reason in known, f"{sorted(rows)}: {about}"
        self.tally.update(rows)
        return placed

    # Both sides

    def running(self) -> list[PodSpec]:
        return [self.specs[name] for name in sorted(self.node.alive)]

    def seen(self, observation: Observation) -> Seen:
        body = nrt(
            observation,
            node_name="n",
            node_uid=None,
            version="test",
            ours=self.node.our_devices(),
        )
        said = self.node.kubelet.state().allocatable
        found = seen(body, {}, self.running())
        assert found.policy == self.config["topologyManagerPolicy"]
        assert found.scope == self.config["topologyManagerScope"]
        return replace(found, allocatable={name: thousandths(said[name]) for name in said})

    def state(self, observation: Observation) -> KubeletState:
        """The kubelet as it is at the moment, for the model."""
        node = self.node
        said = node.kubelet.state()
        assert observation.policy is not None
        plugins = node.plugins.items()
        listed = {use.pod.name: use for use in observation.usage.pods}
        held = {
            name: (*listed[name].containers, *listed[name].ended) if name in listed else ()
            for name in node.alive
        }
        return kubelet_state(
            observation.machine.numa_nodes,
            self.policy(observation.policy, said.allocatable_cpus),
            cores=[tuple(map(CpuId, core)) for each in self.machine for core in each["cores"]],
            sockets={NumaId(each["id"]): each["socket"] for each in self.machine},
            devices={
                resource: {
                    DeviceId(id): tuple(map(NumaId, numa or ()))
                    for id, numa in plugin.devices.items()
                }
                for resource, plugin in plugins
            },
            unhealthy=frozenset(
                (resource, DeviceId(id))
                for resource, plugin in plugins
                for id in plugin.devices
                if id in plugin.unhealthy or resource in node.gone
            ),
            allocatable={
                name: Fraction(thousandths(text), 1000)
                for name, text in said.allocatable.items()
                if name != "pods"
            },
            pods={
                self.specs[name].pod: Held(spec=self.specs[name], containers=containers)
                for name, containers in held.items()
            },
            memory=self.memory() if observation.policy.memory_manager == "Static" else None,
        )

    def policy(self, policy: Policy, allocatable_cpus: tuple[int, ...]) -> Policy:
        """With the CPUs that the kubelet has reserved where it was only told how many."""
        if policy.cpu_manager != "static":
            return policy
        every = {CpuId(cpu) for node in self.machine for core in node["cores"] for cpu in core}
        reserved = every.difference(map(CpuId, allocatable_cpus))
        return replace(policy, reserved_cpus=tuple(sorted(reserved)))

    def memory(self) -> MemoryTables:
        nodes = memory_nodes(self.node.kubelet.root, set(self.node.alive.values()))
        return MemoryTables(
            free={
                (NumaId(id), kind): table["free"]
                for id, here in nodes.items()
                for kind, table in here["memoryMap"].items()
            },
            assignments={NumaId(id): here["numberOfAssignments"] for id, here in nodes.items()},
            group={NumaId(id): tuple(map(NumaId, here["cells"])) for id, here in nodes.items()},
        )


def run(program: Path, seed: str, steps: int) -> Counter[str]:
    """What the differences come from, and how many pods were agreed about."""
    world = Judged(program, Random(seed))
    with world.lives(seed):
        for _ in range(steps):
            world.step()
    return world.tally


@pytest.mark.parametrize("release", ["kubelet", "kubelet136"])
def test_the_real_kubelet_and_the_scheduler_differ_for_no_other_reason(
    go_program: GoProgram, pytestconfig: pytest.Config, release: str
) -> None:
    program = go_program(release)
    tally = Counter[str]()
    for seed in range(LONG_SEEDS if pytestconfig.getoption("long") else SEEDS):
        tally += run(program, f"{release} {seed}", STEPS)
    print(tally)
    assert tally["agreed"] > 50
    assert len(tally) > 2
