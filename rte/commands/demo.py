"""`rte demo`: the whole system on a recorded machine; no GPU and no cluster needed."""

from __future__ import annotations

import argparse
import logging
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rte.commands.demo_node import DemoFailed, DemoNode
from rte.commands.manifests import Given, ManifestError, read_manifests
from rte.commands.source import CannotRead, read_folder
from rte.commands.telling import Teller, asked
from rte.kubelet.admission import Admitted, Rejected, not_followed
from rte.kubelet.spec import PodSpec
from rte.kubelet.usage import KubeletError
from rte.model import DeviceId, PodName, Scope, TopologyManagerPolicy, ranges
from rte.publish.nrt import KIND
from rte.standin.kubelet import Admission
from rte.status import StatusError
from rte.view.ink import Ink, plain
from rte.view.text import WIDTH, text
from rte.view.words import counted
from rte.view.zones import LARGEST, available, forecast_table, right_aligned, zone_table

PACKAGE = Path(__file__).parent.parent
MACHINE = PACKAGE / "recorded" / "pcie-a100-pairs"
EXAMPLES = PACKAGE / "examples"
PODS = ("training", "inference", "etl", "notebook")  # in this order

NAME_ROOM = 11  # characters of a pod's name at the head of a column
LOOK_S = 0.3  # between looks at the folder of manifests
SHORT = "/tmp"  # where a socket's path fits when the usual temporary folder is deep
SOCKET_ROOM = 60  # bytes of a socket's path below the temporary folder


class CannotStart(Exception):
    """Something that was given cannot be used; the message says what."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pods",
        metavar="POD.yaml",
        nargs="*",
        type=Path,
        help="manifests that are admitted in this order (default: four examples)",
    )
    parser.add_argument(
        "--machine",
        metavar="FOLDER",
        type=Path,
        default=MACHINE,
        help="a folder that `rte record` wrote (default: eight A100 PCIe in bridged pairs)",
    )
    parser.add_argument(
        "--policy",
        choices=[policy.value for policy in TopologyManagerPolicy],
        default=TopologyManagerPolicy.SINGLE_NUMA_NODE.value,
        help="the kubelet's Topology Manager policy (default: single-numa-node)",
    )
    parser.add_argument(
        "--scope",
        choices=[scope.value for scope in Scope],
        default=Scope.CONTAINER.value,
        help="the Topology Manager's scope (default: container)",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="keep what is published, in a new or empty folder"
    )
    parser.add_argument(
        "--stay", action="store_true", help="keep serving until Ctrl-C, and admit further manifests"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also the log of plugin and publisher"
    )


def main(args: argparse.Namespace) -> int:
    # A kubelet that ends is no news here, and gRPC's C core would say so on standard error.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="rte: %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        run(args, Ink(sys.stdout))
    except (CannotStart, CannotRead, ManifestError) as error:
        print(f"rte demo: {error}", file=sys.stderr)
        return 2
    except (DemoFailed, KubeletError, StatusError) as error:
        print(f"rte demo: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace, ink: Ink) -> None:
    pods = read_manifests(args.pods or [EXAMPLES / f"{name}.yaml" for name in PODS])
    machine = read_folder(args.machine)
    with ExitStack() as ends:
        step = ends.enter_context(interruptible())
        folder = ends.enter_context(temporary_folder())
        out = folder / "objects" if args.out is None else new_folder(args.out)
        node = DemoNode(
            machine,
            args.machine,
            root=folder / "kubelet",
            out=out,
            policy=args.policy,
            scope=args.scope,
        )
        ends.callback(node.stop)
        show = Demo(node, ink)
        show.machine(args.machine)
        step()
        node.start()
        step()
        show.started()
        for pod in pods:
            show.admit(pod.spec)
            step()
        show.published()
        show.files(kept=args.out is not None or args.stay)
        step()
        if args.stay:
            manifests = folder / "pods" if args.out is None else out / "pods"
            Stay(show, pods, manifests).run()
        else:
            show.what_next()


# What was given


def new_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CannotStart(f"--out {folder}: expected a new or empty folder, it holds files")
    except OSError as error:
        raise CannotStart(f"--out {folder}: {error.strerror}") from error
    return folder


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, with room for sockets in its path."""
    usual = tempfile.gettempdir()
    place = usual if len(os.fsencode(usual)) < SOCKET_ROOM - len("/rte-demo-12345678") else SHORT
    folder = tempfile.mkdtemp(prefix="rte-demo-", dir=place)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yields a function to call between two steps, which raises KeyboardInterrupt after SIGINT or
    SIGTERM: within a step an exception would leave servers and threads behind. A second signal
    does not wait for the step's end.
    """
    told = []

    def tell(*_: object) -> None:
        told.append(True)
        if len(told) > 1:
            raise KeyboardInterrupt

    def step() -> None:
        if told:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield step
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# What is printed


class Demo:
    """The demo as it is told: what was done is said right after it was done."""

    def __init__(self, node: DemoNode, ink: Ink) -> None:
        self.node = node
        self.ink = ink
        self.tell = Teller(ink, node.graph, lambda: node.kubelet.state)
        self.moments: list[tuple[str, Mapping[str, object]]] = []

    def machine(self, folder: Path) -> None:
        ink = self.ink
        ink.line(("rte demo", "bold"), ": a GPU node, all of it but the hardware, in one process")
        ink.title("The machine")
        ink.line(heading(folder))
        ink.line((f"its facts, and where each comes from: {near(folder)}", "dim"))
        ink.line()
        ink.line(text(self.node.graph, self.node.groups).rstrip("\n"))

    def started(self) -> None:
        node, ink = self.node, self.ink
        policy = node.kubelet.policy
        ink.title("The node")
        ink.labelled("kubelet", "a stand-in without containers, which decides as Kubernetes 1.37")
        ink.labelled(
            "",
            f"Topology Manager {policy.topology_manager.value}, scope {policy.scope.value}; "
            f"CPU Manager {policy.cpu_manager} with full-pcpus-only, "
            f"CPUs {ranges(policy.reserved_cpus) or 'none'} reserved; "
            f"Memory Manager {policy.memory_manager}",
        )
        for words in not_followed(policy):
            ink.labelled("", f"not followed: {words}")
        lists = [
            f"{name}: {counted(len(r.tables.devices), 'device')}, {len(r.tables.healthy)} healthy"
            for name, r in sorted(node.plugin.resources.items())
        ]
        took = f"registered over its socket in {node.registered_s * 1000:.0f} ms"
        ink.labelled(
            "plugin", f"{'; '.join(lists)}, {took}" if lists else "no GPU to advertise here"
        )
        written = ", ".join(sorted({w.kind for w in node.journal.written}))
        ink.labelled("publisher", f"woken by the kubelet's state files, has written {written}")
        self.moments.append(("at first", node.topology()))
        ink.title("The pods")

    def admit(self, spec: PodSpec) -> bool:
        """Admits the pod and tells what became of it; whether it was admitted."""
        before = available(self.node.topology())
        writes = len(self.node.journal.written)
        free = self.free()
        admission, decisions = self.node.admit(spec)
        self.moments.append((spec.pod.name, self.node.topology()))
        self.tell.head(spec)
        if isinstance(admission.answer, Rejected):
            self.tell.rejected(spec, admission.answer, before)
        else:
            self.tell.placed(spec, admission.answer)
        for decision in decisions:
            self.tell.decided(decision, free)
        self.handed(admission)
        fresh = self.node.journal.written[writes:]
        if fresh:
            self.ink.labelled("published", ", ".join(w.file.name for w in fresh), "dim")
        else:
            self.ink.labelled("published", "nothing: nothing has changed", "dim")
        return isinstance(admission.answer, Admitted)

    def handed(self, admission: Admission) -> None:
        """What the plugin's Allocate gave to each container."""
        several = len({container for container, _ in admission.answers}) > 1
        for (container, _), answer in admission.answers.items():
            of = f"{container}: " if several else ""
            for name, value in sorted(answer.envs.items()):
                self.ink.labelled("gets", f"{of}{name}={shortened(value)}", "dim")
            rest = {
                "mounts": len(answer.mounts),
                "device nodes": len(answer.devices),
                "annotations": len(answer.annotations),
                "CDI devices": len(answer.cdi_devices),
            }
            words = ", ".join(f"{n} {what}" for what, n in rest.items() if n)
            if words:
                self.ink.labelled("", words, "dim")

    def published(self) -> None:
        """What is free on each NUMA node, pod by pod."""
        self.ink.title(f"What a scheduler reads: {KIND} {self.node.config.node_name}")
        self.ink.line(("What there is, and what is free: at first, and after each pod.", "dim"))
        self.ink.line()
        rows = figures(self.moments)
        if sum(map(len, rows[0])) + 2 * len(rows[0]) > WIDTH + 2:
            rows = figures([self.moments[0], ("at last", self.moments[-1][1])])
        for row in rows:
            parts: list[str | tuple[str, str]] = []
            for column, cell in enumerate(row):
                is_new = column > FIRST_MOMENT and cell.strip() != row[column - 1].strip()
                parts += [(cell, "bold cyan") if is_new and row is not rows[0] else cell, "  "]
            self.ink.line(*trimmed(parts))
        labels = {row[0].strip() for row in rows}
        for label, means in FORECASTS.items():
            if label in labels:
                self.ink.line((f"{label}: {means}", "dim"))

    def files(self, *, kept: bool) -> None:
        folder, written = self.node.journal.folder, self.node.journal.written
        first, last = written[0].file.name, written[-1].file.name
        self.ink.line()
        if not kept:
            self.ink.line(f"Each of the {len(written)} writes was a file; --out DIR keeps them.")
            return
        self.ink.line(f"Each write is a file in {folder}; to see what the pods changed:")
        self.ink.line(f"  diff {folder / first} {folder / last}")

    def what_next(self) -> None:
        self.ink.title("What next")
        rte = program()
        rows = [
            (f"{rte} demo --out objects", "keeps what is published: diff two of the files"),
            (f"{rte} demo --policy best-effort", "the same pods where nothing must be aligned"),
            (f"{rte} demo POD.yaml …", "your own pods; the examples are in"),
            ("", near(EXAMPLES)),
            (f"{rte} demo --machine FOLDER", f"your own node, after `{rte} record FOLDER` there"),
            (f"{rte} demo --stay", "keeps serving: metrics, sockets, more pods"),
            (f"{rte} choose --size 2 {near(MACHINE)}", ""),
            ("", "any choice, with every field of its reason"),
        ]
        room = max(len(command) for command, does in rows if does)
        for command, does in rows:
            self.ink.line("  ", (command.ljust(room), "bold"), f"  {does}" if does else "")

    def free(self) -> frozenset[DeviceId]:
        """GPUs that nobody holds."""
        held = self.node.kubelet.usage().device_ids()
        return frozenset(self.node.graph.ids) - frozenset().union(*held.values())


FORECASTS = {
    LARGEST["largestAligned."]: "what one pod can still ask for and be admitted",
    LARGEST["largestNvlinkAligned."]: "the same, of devices that are all joined by NVLink",
}
FIRST_MOMENT = 4  # the column of what was free at first


def figures(moments: Sequence[tuple[str, Mapping[str, object]]]) -> list[list[str]]:
    """The table of zones and forecasts, its cells padded."""
    rows, forecasts = zone_table(moments), forecast_table(moments)
    if forecasts:
        rows += [[""] * len(rows[0]), *forecasts]
    rows[0] = [name[:NAME_ROOM] for name in rows[0]]
    return right_aligned(rows, left=2)


def trimmed(parts: Sequence[str | tuple[str, str]]) -> list[str | tuple[str, str]]:
    """The parts of a line without empty ones at its end."""
    found = list(parts)
    while found and not plain(found[-1]).strip():
        found.pop()
    return found


def heading(folder: Path) -> str:
    """What the recording says of itself in its first line."""
    try:
        first = (folder / "about.md").read_text(errors="replace").split("\n", maxsplit=1)[0]
    except OSError:
        first = ""
    return first.removeprefix("#").strip() or "A recorded machine"


def near(path: Path) -> str:
    """The path from here, where that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


def program() -> str:
    """How this program was called, so that what is printed can be typed."""
    given = Path(sys.argv[0])
    if given.name != "rte":
        return "python -m rte"
    found = shutil.which("rte")
    return "rte" if found is not None and Path(found).samefile(given) else sys.argv[0]


def shortened(value: str) -> str:
    """A list of UUIDs by their first parts; other values as they are."""
    return ",".join(UUID.sub(r"\1-…", part) for part in value.split(","))


UUID = re.compile(r"((?:GPU|MIG)-[0-9a-f]{8})(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


# --stay


class Stay:
    """Serves until Ctrl-C. Files in the folder of manifests are pods, as in the kubelet's own
    folder of static pods: a file that appears is admitted, one that goes is removed."""

    def __init__(self, show: Demo, pods: Sequence[Given], folder: Path) -> None:
        self.show = show
        self.folder = folder
        self.known: dict[Path, tuple[tuple[int, int], tuple[PodName, ...]]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for file in dict.fromkeys(pod.file for pod in pods):
            copy = unused(folder / file.name)
            shutil.copyfile(file, copy)
            held = tuple(pod.spec.pod for pod in pods if pod.file == file)
            self.known[copy] = (signature(copy), held)

    def run(self) -> None:
        node, ink = self.show.node, self.show.ink
        node.status.start("127.0.0.1", 0)
        ink.title("Serving until Ctrl-C")
        base = f"http://127.0.0.1:{node.status.port}"
        places = [
            ("http", f"{base}/metrics /healthz /readyz /topology /decisions"),
            ("kubelet", str(node.kubelet.plugin_socket)),
            *(("plugin", str(r.socket)) for r in node.plugin.registrations.values()),
            ("PodResources", str(node.kubelet.pod_resources)),
            ("objects", str(node.journal.folder)),
            ("pods", f"{self.folder}: add a manifest to admit it, delete it to end the pod"),
        ]
        for label, words in places:
            ink.labelled(label, words, room=14)
        # Not an Event: set by a signal in the middle of its own wait, it can lock itself up.
        told: queue.SimpleQueue[int] = queue.SimpleQueue()
        handlers = {
            number: signal.signal(number, lambda number, _: told.put(number))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            while True:
                with suppress(queue.Empty):
                    told.get(timeout=LOOK_S)
                    break
                self.look()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        ink.line()
        ink.line("stopped")

    def look(self) -> None:
        """Removes the pods of files that have gone or changed, and admits those of new ones."""
        files = {path: signature(path) for path in sorted(self.folder.glob("*.y*ml"))}
        for path, (known, pods) in list(self.known.items()):
            if files.get(path) != known:
                del self.known[path]
                for pod in pods:
                    self.remove(pod)
        for path, found in files.items():
            if path not in self.known:
                self.known[path] = (found, self.admitted(path))

    def remove(self, pod: PodName) -> None:
        node = self.show.node
        if pod not in node.kubelet.state.pods:
            return
        node.remove(pod)
        self.show.ink.line()
        self.show.ink.line(("Pod " + pod.name, "bold"), " has ended")
        self.free()

    def admitted(self, path: Path) -> tuple[PodName, ...]:
        """The pods of a file that are there now."""
        try:
            specs = [pod.spec for pod in read_manifests([path])]
        except ManifestError as error:
            self.show.ink.line()
            self.show.ink.line((str(error), "red"))
            return ()
        found = []
        for spec in specs:
            if spec.pod in self.show.node.kubelet.state.pods:
                self.show.ink.line()
                self.show.ink.line((f"{path}: a pod {spec.pod.name} is here already", "red"))
            elif self.show.admit(spec):
                found.append(spec.pod)
        self.free()
        return tuple(found)

    def free(self) -> None:
        """What is free now, a line for each NUMA node."""
        label = "free"
        for zone, free in available(self.show.node.topology()).items():
            words = ", ".join(asked(name, 1000 * units) for name, units in free.items())
            self.show.ink.labelled(label, f"{zone}: {words}", "dim")
            label = ""


def unused(path: Path) -> Path:
    """The path, with a number where a file has that name already."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_stem(f"{path.stem}-{number}")
    return found


def signature(path: Path) -> tuple[int, int]:
    """What tells a file from what it was before."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
