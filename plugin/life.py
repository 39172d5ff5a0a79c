"""The device plugin as one object: told what the machine is, it keeps the kubelet told."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from plugin import cdi
from plugin.allocation import Handing, Nodes, Owner, owners, read_common_nodes, read_nodes
from plugin.decisions import JOINED_WITHIN_S, Decisions
from plugin.devices import Advertised, Advertising, Device, Known, devices, held_devices, remember
from plugin.held import Container, Held, nic_holders, nic_use
from plugin.moving import Listed, offers, pairs, settled, twice_held
from plugin.nccl import write_topology
from plugin.pod_resources import PodResources
from plugin.registration import KUBELET_SOCKET, Registration, Signature
from plugin.service import Resource, Tables
from plugin.specs import Specs, Wanted, check_start
from plugin.unheard import CHECKPOINT, Unheard
from rte.graph.build import Graph, build
from rte.graph.parts import Sharing
from rte.kubelet.usage import KubeletError, claimed, read_allocatable, read_usage, target
from rte.kubelet.watch import FileWatch, watch
from rte.model import DeviceId, Faults, Machine, PciAddress, PodName, Usage

log = logging.getLogger(__name__)

USAGE_POLL_S = 10.0
USAGE_SOON_S = 1.0  # while a pod is being admitted
TOLD_POLLS = 1.5  # of these times, before PodResources is asked though somebody else should have
# A container that has had NICs and no GPU for longer will not get one.
ADMITTED_WITHIN_S = 5.0
# PodResources has 100 calls a second for all clients; changes that come together are one call.
USAGE_PAUSE_S = 0.05
# How long a list may be on its way to the kubelet, and when nobody can be asked has been read.
SENT_S, READ_S = 0.1, 1.0
BEFORE_S = 1.0  # of each question to PodResources that a Register waits for
# While all is well, and while a resource is not (yet) what the kubelet should see.
CHECK_WELL_S, CHECK_ILL_S = 10.0, 1.0


# While the publisher computes in the same process, a call has the interpreter after at most this
# time, several times a call. With Python's 5 ms an Allocate took 6 ms beside a busy thread, with
# this 0.6 ms.
SWITCH_S = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All that can be said to the device plugin."""

    plugin_dir: Path = Path("/var/lib/kubelet/device-plugins")
    pod_resources: Path | None = None  # None: `observe` is told, or nobody knows what is in use
    is_told: bool = False
    """Whether somebody else in this process asks PodResources at each change and tells `observe`:
    then it is asked here only when nothing has been told for long."""
    advertising: Advertising = field(default_factory=Advertising)
    handing: Handing = field(default_factory=Handing)
    sharing: Sharing = Sharing.DISTRIBUTED
    compute_nics: tuple[str, ...] = ()  # patterns, as `nics.compute`
    cdi_directories: tuple[Path, ...] = (Path("/etc/cdi"), Path("/var/run/cdi"))
    cdi_nodes_only: bool = False
    registry_dir: Path | None = None  # where the plugin watcher finds the sockets; None: Register
    nccl_topology: Callable[[Graph], str | None] | None = None
    """Makes the text of the file for `handing.nccl_topology_dir`."""
    lost_after_s: float = 10.0
    """A kubelet that has had none of our healthy devices for so long has lost this plugin."""
    dev: Path = Path("/dev")
    proc: Path = Path("/proc")

    @property
    def cdi(self) -> Wanted:
        return Wanted(
            handing=self.handing,
            directories=self.cdi_directories,
            nodes_only=self.cdi_nodes_only,
        )


class DevicePlugin:
    """Every resource of the machine, each with a server of its own.

    `update` is called with each changed machine, from any thread; the calls of the kubelet use the
    tables of the one before until the new ones are ready. Nothing is registered before the first.
    """

    def __init__(
        self,
        options: Options,
        *,
        on_allocate: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_allocate` is called in each Allocate before its answer is sent; it must not wait."""
        self.options = options
        self.resources: Mapping[str, Resource] = {}
        self.registrations: Mapping[str, Registration] = {}
        self.decisions = Decisions(clock=clock)
        self.held = Held(clock=clock)
        self.double_uses = 0  # devices that a list showed with several pods
        self._on_allocate = on_allocate or (lambda: None)
        self._clock = clock
        self._lock = threading.RLock()  # of everything that update() makes
        self._machine: Machine | None = None
        self._faults: Faults = {}
        self._graph: Graph | None = None
        self._topology: tuple[Graph, str | None] | None = None  # NCCL's file of a graph
        self._common = Nodes()  # what the tables were made with
        self._known: Mapping[PciAddress, Known] = {}
        self._withheld: Mapping[str, str] = {}
        self._said: set[str] = set()
        self._specs = Specs(options.cdi, self._say_once)
        self._started = False
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._usage_due = threading.Event()
        self._usage_seen = False
        self._observed_at = -math.inf  # when the last list was asked for, monotonic seconds
        self._nic_holders: Mapping[Container, float] = {}  # when each was seen first
        # Where nobody says who got what, a decision's line need not wait for its pod.
        self._join_s = 0.0 if options.pod_resources is None else JOINED_WITHIN_S
        self._holders: Mapping[Listed, tuple[PodName, ...]] = {}
        """Who holds what, ours or not: a GPU that a pod holds may be plugged in only later."""
        self._unheard = Unheard(
            pod_resources=options.pod_resources, checkpoint=options.plugin_dir / CHECKPOINT
        )
        self._used: Mapping[Listed, tuple[PodName, ...]] = {}  # what of that is ours
        self._wanted: frozenset[Listed] = frozenset()  # what would be listed if nothing had to wait
        self._leaving: dict[Listed, float] = {}  # not offered now, since when (monotonic seconds)
        self._former: Mapping[DeviceId, Owner] = {}  # owners, with those of what is leaving
        self._waiting: Mapping[Listed, Listed] = {}  # what of it has to wait, and for what
        self._in_the_way: frozenset[Listed] = frozenset()  # see _obstacles
        self._kubelet: PodResources | None = None
        self._twice: Mapping[DeviceId, tuple[PodName, ...]] = {}
        self._usage_at = self._check_at = 0.0  # when each is due, monotonic seconds
        self._settled = False
        self._lost: dict[str, Lost] = {}
        self._thread = threading.Thread(target=self._run, name="plugin", daemon=True)

    @property
    def ready(self) -> bool:
        """Whether the machine is known and each of its resources is registered."""
        registrations = self.registrations.values()
        return self._machine is not None and all(r.registered_at for r in registrations)

    def start(self) -> None:
        """Begin to serve; what `update` told before is registered now.

        Raises CdiError when CDI is asked for and cannot work, KubeletError for a socket path that
        is too long.
        """
        options = self.options
        check_start(options.cdi)
        target((options.registry_dir or options.plugin_dir) / KUBELET_SOCKET)
        if options.pod_resources is not None:
            self._kubelet = PodResources(options.pod_resources)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        with self._lock:
            self._started = True
            for registration in self.registrations.values():
                self._register(registration)
        self._thread.start()

    def stop(self) -> None:
        """Returns when all servers have ended and their sockets are gone."""
        self._stopping.set()
        self._wake.set()
        with self._lock:
            registrations = tuple(self.registrations.values()) if self._started else ()
            self._started = False
        for registration in registrations:
            registration.ask_to_stop()
        for registration in registrations:
            registration.stop()
        if self._thread.is_alive():
            self._thread.join()
        if self._kubelet is not None:
            self._kubelet.close()  # not before: a Register may still ask something
        self._remove_spec()

    def update(self, machine: Machine, faults: Faults, *, graph: Graph | None = None) -> None:
        """Take a changed machine or changed faults; `graph` spares building the machine's again."""
        with self._lock:
            if graph is not None:
                self._graph = graph
            elif self._graph is None or machine != self._machine:
                self._graph = build(machine, compute_nics=self.options.compute_nics)
            self._machine, self._faults = machine, faults
            self._publish()
        self._ask_usage()

    def withhold(self, withheld: Mapping[str, str]) -> None:
        """Cordon devices, by id or PCI address, with the reason; pods that run on them stay."""
        with self._lock:
            self._withheld = withheld
            self._publish_again()

    def reconfigure(self, options: Options) -> Mapping[Listed, tuple[PodName, ...]]:
        """Take other options, but for sockets and folders, which count from the next start.

        Nothing is changed, and what pods hold is returned with the pods, when an id in use would
        leave its resource. Raises CdiError when CDI is asked for and cannot work.
        """
        now = self.options
        options = replace(
            options,
            plugin_dir=now.plugin_dir,
            registry_dir=now.registry_dir,
            pod_resources=now.pod_resources,
            is_told=now.is_told,
            compute_nics=now.compute_nics,
            dev=now.dev,
            proc=now.proc,
        )
        if options == now:
            return {}
        if self._kubelet is not None and self._machine is not None:
            self._read_usage(self._kubelet)
        with self._lock:
            if self._machine is not None:
                wanted = pairs(self._devices(options).resources)
                here = self._in_use()
                lost = {p: here[p] for p in here if p in self._wanted and p not in wanted}
                if lost:
                    return lost
            check_start(options.cdi)
            self.options = options
            self._specs = Specs(options.cdi, self._say_once)
            self._publish_again()
        log.info("the changed configuration is in force")
        return {}

    def observe(self, usage: Usage, *, asked: float) -> None:
        """Take note of what PodResources shows, asked for at `asked` (monotonic seconds), unless
        what was asked for later is known."""
        with self._lock:  # lists come from this object's thread and from others
            if asked < self._observed_at:
                return
            self._observed_at = asked
            self._observe(usage, asked=asked)
            wait_s = USAGE_SOON_S if self._waits_for_list else USAGE_POLL_S
            self._usage_at = asked + (TOLD_POLLS * wait_s if self.options.is_told else wait_s)
        self._wake.set()  # decisions that this list has completed are logged

    def _observe(self, usage: Usage, *, asked: float) -> None:
        machine, graph = self._machine, self._graph
        if machine is None or graph is None:
            return
        ids = frozenset().union(*usage.device_ids().values()) | claimed(usage, machine)
        ours = frozenset(d.id for r in self.resources.values() for d in r.tables.devices.values())
        nics = frozenset(nic.pci for nic in graph.nics if nic.pci is not None)
        # Whoever holds NICs in the first list held them before we came.
        first = asked if self._usage_seen else asked - 2 * ADMITTED_WITHIN_S
        seen = self._nic_holders
        self._nic_holders = {c: seen.get(c, first) for c in nic_holders(usage, nics)}
        admitted = {c for c, at in self._nic_holders.items() if asked - at > ADMITTED_WITHIN_S}
        use = nic_use(usage, nics=nics, gpus=ours, admitted=admitted)
        self.held.listed(ids, asked=asked, nics=use)
        self.decisions.join(usage, asked=asked)
        listed = _holders(usage)
        self._holders = {**dict.fromkeys(self._unheard.beside(listed), ()), **listed}
        self._used = self._held_of_ours()
        self._usage_seen = True
        self._follow_use()
        self._say_what_waits()
        self._judge(twice_held(self._used))

    def _judge(self, twice: Mapping[DeviceId, tuple[PodName, ...]]) -> None:
        """Count and tell each device that is newly found with several pods."""
        for id, pods in twice.items():
            if self._twice.get(id) != pods:
                self.double_uses += 1
                names = " and ".join(f"{pod.namespace}/{pod.name}" for pod in pods)
                log.error(
                    "%s is held by %s at once: the kubelet has given one device out twice; "
                    "delete one of the pods",
                    id,
                    names,
                )
        self._twice = twice

    # What lists and tables are made of comes by `update`, `withhold` and `reconfigure`, which make
    # them anew; all else is below.

    def _follow_use(self) -> None:
        """Make the lists anew if what is in use, as far as they depend on it, is not what it was.

        Asked after each list of pods, and at each check: our own answers are forgotten in time.
        """
        with self._lock:
            used_up = self._pulled_out_and_free()
            if used_up or self._obstacles(self._in_use()) != self._in_the_way:
                self._publish_again()

    def _follow_files(self) -> None:
        """Make the tables anew if device nodes, CDI's specifications or NCCL's file are not what
        they were. Nobody tells of that, so it is asked at each check."""
        with self._lock:
            if self._machine is None:
                return
            if self._specs.changed() or self._common_nodes() != self._common:
                self._publish()

    def _pulled_out_and_free(self) -> bool:
        """Whether a GPU that left the machine is listed, though none has it any more."""
        if self._machine is None or not self._usage_seen:
            return False
        here = {gpu.pci for gpu in self._machine.gpus if gpu.uuid or gpu.lost}
        gone = [known for known in self._known.values() if known.gpu.pci not in here]
        held = held_devices(self._held_ids()) if gone else frozenset()
        return any(not known.ids & held for known in gone)

    def _held_ids(self) -> frozenset[DeviceId]:
        return self.held.ids().union(pair.id for pair in self._holders)

    def _obstacles(self, in_use: Iterable[Listed]) -> frozenset[Listed]:
        """What of this keeps the lists from being what they should be: what is held and would not
        be listed, and what is listed, though something is in its way, because it is held."""
        return frozenset(p for p in in_use if p not in self._wanted or p in self._waiting)

    # What update() makes

    def _publish_again(self) -> None:
        with self._lock:
            if self._machine is not None:
                self._publish()

    def _publish(self) -> None:
        assert self._machine is not None
        held = self._held_ids() if self._usage_seen else None
        self._known = remember(self._known, self._machine, held)
        advertised = self._devices(self.options)
        for sentence in advertised.left_out:
            self._say_once(sentence)
        made = self._tables(self._settled_lists(advertised.resources))
        fresh = {}
        for name, tables in made.items():
            resource = self.resources.get(name)
            if resource is None:
                fresh[name] = self._resource(name, tables)
                log.info("%s: %s", name, _summary(tables.devices.values()))
            else:
                self._replace(resource, tables)
        self.resources = {**self.resources, **fresh}
        self.registrations = {
            **self.registrations,
            **{name: self._registration(resource) for name, resource in fresh.items()},
        }
        if self._started:
            for name in fresh:
                self._register(self.registrations[name])

    def _devices(self, options: Options) -> Advertised:
        assert self._machine is not None
        return devices(
            self._machine,
            self._faults,
            options=options.advertising,
            known=self._known,
            withheld=self._withheld,
        )

    def _held_of_ours(self) -> Mapping[Listed, tuple[PodName, ...]]:
        """Which pods hold what, under whatever name, of the GPUs and slices that are known, or
        listed, and of their replicas."""
        ids = {id for known in self._known.values() for id in known.ids}
        for resource in self.resources.values():
            ids |= {device.holds for device in resource.tables.devices.values()}
        return {p: pods for p, pods in self._holders.items() if held_devices([p.id]) & ids}

    def _settled_lists(
        self, wanted: Mapping[str, tuple[Device, ...]]
    ) -> Mapping[str, tuple[Device, ...]]:
        """What can be listed now, of what should be; see plugin.moving."""
        listed = {name: resource.tables.devices for name, resource in self.resources.items()}
        self._wanted = pairs(wanted)
        self._used = self._held_of_ours()
        now = self._clock()
        in_use = self._in_use()
        before = offers({name: found.values() for name, found in listed.items()})
        who = owners(known.gpu for known in self._known.values())
        found = settled(
            wanted,
            listed=listed,
            used=in_use,
            leaving=before.union(self._leaving) - self._wanted,
            owners=who,
            former=self._former,
        )
        self._waiting = found.waiting
        self._in_the_way = self._obstacles(in_use)
        after = offers(found.resources)
        self._leaving = {
            pair: at
            for pair, at in (dict.fromkeys(before, now) | self._leaving).items()
            if pair not in after
        }
        leaving = held_devices(pair.id for pair in self._leaving)
        self._former = {**{i: o for i, o in self._former.items() if i in leaving}, **who}
        if self._leaving:
            self._check_soon()
        return found.resources

    def _say_what_waits(self) -> None:
        for new, old in self._waiting.items():
            pods = " and ".join(f"{p.namespace}/{p.name}" for p in self._used.get(old, ()))
            if pods:
                self._say_once(
                    f"{new.id} is not offered as {new.resource} while {pods} has {old.id} as "
                    f"{old.resource}: delete the pod, or wait for its end"
                )

    def _in_use(self) -> Mapping[Listed, tuple[PodName, ...]]:
        """What pods hold; with our latest answers, whose pods are not known yet."""
        held = self.held.ids() - {pair.id for pair in self._used}
        given: dict[Listed, tuple[PodName, ...]] = {
            Listed(name, device.id): ()
            for name, resource in self.resources.items()
            for device in resource.tables.devices.values()
            if device.id in held
        }
        return {**given, **self._used}

    def _served_by_others(self, name: str) -> bool:
        """Asked before a Register: whether the kubelet has healthy devices of this resource.

        What pods hold is learnt here too when it is not known yet: a device that a pod has under
        another name must not be in our first list.
        """
        if self._kubelet is None:
            return False
        try:
            if not self._usage_seen:
                asked = self._clock()
                self.observe(read_usage(self._kubelet.channel, BEFORE_S), asked=asked)
            found = read_allocatable(self._kubelet.channel, BEFORE_S)
        except KubeletError:
            self._believe_checkpoint()
            return False  # one that starts cannot say yet
        return any(device.resource == name for device in found.devices)

    def _register(self, registration: Registration) -> None:
        try:
            registration.start()
        except KubeletError as error:
            self._say_once(f"{registration.resource.name} cannot be registered: {error}")

    def _replace(self, resource: Resource, tables: Tables) -> None:
        before = resource.tables.devices
        if resource.update(tables):
            log.info("%s: %s", resource.name, _summary(tables.devices.values()))
        for id in before.keys() - tables.devices.keys():
            log.warning("%s: %s is no device of this machine any more", resource.name, id)

    def _resource(self, name: str, tables: Tables) -> Resource:
        return Resource(
            name,
            tables,
            held=self.held,
            decisions=self.decisions,
            on_allocate=self._allocated,
            on_decision=self._wake.set,
        )

    def _registration(self, resource: Resource) -> Registration:
        return Registration(
            resource,
            self.options.plugin_dir,
            registry_dir=self.options.registry_dir,
            on_registered=self._ask_whether_well,
            served=self._served_by_others,
        )

    def _tables(self, lists: Mapping[str, tuple[Device, ...]]) -> Mapping[str, Tables]:
        """Tables for each resource that there is, or was: that one has an empty list."""
        assert self._graph is not None
        options = self.options
        who = owners(known.gpu for known in self._known.values())
        self._common = self._common_nodes()
        nodes = replace(
            read_nodes(dev=options.dev, proc=options.proc),
            nccl_topology=self._common.nccl_topology,
        )
        names: Mapping[DeviceId, str] = {}
        extra: tuple[str, ...] = ()
        if options.handing.has_cdi:
            ids = dict.fromkeys(device.holds for found in lists.values() for device in found)
            names = self._specs.names(ids, owners=who, nodes=nodes)
            extra = cdi.extra_names(options.handing, self._specs.listed())
        gone: dict[str, tuple[Device, ...]] = dict.fromkeys(self.resources, ())
        return {
            name: Tables(
                graph=self._graph,
                devices={device.id: device for device in listed},
                owners=who,
                handing=options.handing,
                nodes=nodes,
                cdi_names=names,
                cdi_extra=extra,
                healthy=frozenset(device.id for device in listed if device.healthy),
                nics=frozenset(nic.pci for nic in self._graph.nics if nic.pci is not None),
                parts=_parts(listed, who),
                sharing=options.sharing,
            )
            for name, listed in {**gone, **lists}.items()
        }

    def _remove_spec(self) -> None:
        """Our specification goes when it is not wanted (any more) and no pod has what it names:
        a container that starts again is given the names that it was given first."""
        if self._usage_seen and not self._in_use():
            self._specs.remove_own()

    def _common_nodes(self) -> Nodes:
        """What containers are given beside their devices, as it is now."""
        return replace(read_common_nodes(self.options.dev), nccl_topology=self._write_topology())

    def _write_topology(self) -> bool:
        """Whether NCCL's topology file is there, made from the graph as it is now."""
        folder, made = self.options.handing.nccl_topology_dir, self.options.nccl_topology
        if folder is None or made is None or self._graph is None:
            return False
        if self._topology is None or self._topology[0] is not self._graph:
            self._topology = self._graph, made(self._graph)
        text = self._topology[1]
        if text is None:
            return False
        try:
            if write_topology(text, Path(folder)):
                log.info("NCCL's topology file in %s is that of this machine now", folder)
        except OSError as error:
            self._say_once(
                f"no topology file for NCCL: {error.filename}: {error.strerror}; mount the host's "
                f"folder {folder} here at the same path"
            )
            return False
        return True

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log.warning("%s", sentence)

    def _allocated(self) -> None:
        if not self.options.is_told:
            self._usage_due.set()
        self._on_allocate()

    # What the thread does

    def _run(self) -> None:
        files: FileWatch | None = None
        kubelet = self._kubelet
        if kubelet is not None and not self.options.is_told:
            files = watch([self.options.plugin_dir / CHECKPOINT], self._ask_usage)
        while not self._stopping.is_set():
            try:
                self.look(kubelet)
            except Exception:
                log.exception("the plugin's own look failed; the next is in %g s", CHECK_WELL_S)
                self._usage_at = self._check_at = self._clock() + CHECK_WELL_S
            next_at = self._check_at if kubelet is None else min(self._check_at, self._usage_at)
            log_s = self.decisions.next_log_s(wait_s=self._join_s)
            if log_s is not None:
                next_at = min(next_at, self._clock() + log_s)
            self._wake.wait(max(next_at - self._clock(), 0))
            self._wake.clear()
            self._stopping.wait(USAGE_PAUSE_S)
        self._log_decisions(wait_s=0)
        if files is not None:
            files.close()

    def look(self, kubelet: PodResources | None) -> None:
        """Whatever is due: ask what is in use, log, see whether the kubelet has our devices."""
        now = self._clock()
        if kubelet is not None and (self._usage_due.is_set() or now >= self._usage_at):
            self._usage_due.clear()
            self._read_usage(kubelet)
            self._usage_at = now + (USAGE_SOON_S if self._waits_for_list else USAGE_POLL_S)
        self._log_decisions(wait_s=self._join_s)
        if now >= self._check_at:
            well = self._check(kubelet)
            if self._leaving:
                self._let_go(kubelet)
                well = well and not self._leaving
            self._check_at = now + (CHECK_WELL_S if well else CHECK_ILL_S)
            if self._leaving:
                self._check_soon()
            self._follow_use()
            self._follow_files()
            if not self._specs.wants_own():
                self._remove_spec()
            if well and not self._settled:
                settle_memory()
                self._settled = True

    @property
    def _waits_for_list(self) -> bool:
        """Whether a pod is being admitted, or holds what is in the way of what should be listed: a
        list shows the one and the other's end better than any event."""
        return bool(self.held.nics.own or self.decisions.waiting or self._in_the_way)

    def _ask_usage(self, _: Path | None = None) -> None:
        if not self.options.is_told:
            self._usage_due.set()
        self._wake.set()

    def _ask_whether_well(self) -> None:
        self._check_at = 0.0
        self._wake.set()

    def _check_soon(self) -> None:
        self._check_at = min(self._check_at, self._clock() + SENT_S)
        self._wake.set()

    def _let_go(self, kubelet: PodResources | None) -> None:
        """What has left a list is over once the kubelet neither offers it nor has given it away."""
        asked = self._clock()
        offered = self._allocatable(kubelet)
        nobody_says = kubelet is None or offered is None
        over = {
            pair: at
            for pair, at in tuple(self._leaving.items())
            if asked - at > (READ_S if nobody_says else SENT_S)
            and (offered is None or pair.id not in offered.get(pair.resource, ()))
            and pair.id not in self.held.own()
        }
        if over and kubelet is not None and offered is not None:
            self._read_usage(kubelet)  # what was given away in the last moment is in it
        if over:
            with self._lock:
                left = self._leaving.items()
                self._leaving = {p: at for p, at in left if over.get(p) != at}
                self._publish_again()

    def _log_decisions(self, *, wait_s: float) -> None:
        """A line each, here and not in the call: a full pipe must not hold up an admission."""
        for decision in self.decisions.unlogged(wait_s=wait_s):
            log.info("%s", decision)

    def _read_usage(self, kubelet: PodResources) -> None:
        asked = self._clock()
        usage = kubelet.usage()
        if usage is not None:
            self.observe(usage, asked=asked)
        else:
            self._believe_checkpoint()

    def _believe_checkpoint(self) -> None:
        """Until there is a list: what a pod has under another name must not be in ours."""
        with self._lock:
            if not self._usage_seen:
                self._holders = dict.fromkeys(self._unheard.handed_out(), ())
                self._used = self._held_of_ours()
                self._follow_use()

    def _check(self, kubelet: PodResources | None) -> bool:
        """Whether the kubelet has what it was told; a plugin it has lost registers once more."""
        registrations = {n: r for n, r in self.registrations.items() if r.registered_at}
        if len(registrations) < len(self.registrations):
            return False
        seen = self._allocatable(kubelet)
        now = self._clock()
        # The first seconds tell whether a registration took.
        well = all(
            now - (r.registered_at or now) > self.options.lost_after_s
            for r in registrations.values()
        )
        for name, registration in registrations.items():
            resource = self.resources[name]
            healthy = resource.tables.healthy
            lost = resource.counters.streams == 0 or (
                seen is not None and healthy and not healthy & seen.get(name, frozenset())
            )
            if not lost:
                self._lost.pop(name, None)
                continue
            well = False
            found = self._lost.setdefault(name, Lost(since=now))
            lasted = now - found.since >= self.options.lost_after_s
            if lasted and found.retried != registration.kubelet_seen:
                found.retried = registration.kubelet_seen
                registration.again(
                    f"the kubelet has had none of {len(healthy)} healthy devices for "
                    f"{now - found.since:.0f} s"
                )
        return well

    def _allocatable(
        self, kubelet: PodResources | None
    ) -> Mapping[str, frozenset[DeviceId]] | None:
        """Healthy ids by resource as the kubelet has them; None when it does not say."""
        found = None if kubelet is None else kubelet.allocatable()
        if found is None:
            return None
        ids: dict[str, set[DeviceId]] = {}
        for device in found.devices:
            ids.setdefault(device.resource, set()).add(device.id)
        self.held.offered(found.devices)
        return {resource: frozenset(these) for resource, these in ids.items()}


def _holders(usage: Usage) -> Mapping[Listed, tuple[PodName, ...]]:
    found: dict[Listed, list[PodName]] = {}
    for pod in usage.pods:
        for device in (d for c in pod.containers for d in c.devices):
            found.setdefault(Listed(device.resource, device.id), []).append(pod.pod)
    return {pair: tuple(dict.fromkeys(pods)) for pair, pods in found.items()}


def settle_memory() -> None:
    """Once the start is over: what has been loaded stays, so that a full collection, which takes
    10 ms in the middle of a call, takes nothing; and what only the start needed goes back to the
    kernel, 0.5 MiB, where malloc is glibc's."""
    gc.collect()
    gc.freeze()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(slots=True, kw_only=True)
class Lost:
    """A registered resource of which the kubelet has nothing."""

    since: float  # monotonic seconds
    retried: Signature | None = None  # the kubelet that was registered with again for it


def _parts(
    listed: Iterable[Device], who: Mapping[DeviceId, Owner]
) -> Mapping[DeviceId, DeviceId] | None:
    """Each slice's or replica's GPU; None when all are whole GPUs."""
    gpus = {device.id: who[device.holds].gpu.uuid for device in listed if device.holds in who}
    if all(id == gpu for id, gpu in gpus.items()):
        return None
    return {id: gpu for id, gpu in gpus.items() if gpu is not None}


def _summary(listed: Iterable[Device]) -> str:
    listed = tuple(listed)
    ill = [f"{device.id} ({device.unhealthy})" for device in listed if not device.healthy]
    return f"{len(listed)} devices, {len(listed) - len(ill)} healthy" + (
        f", without {', '.join(ill)}" if ill else ""
    )
