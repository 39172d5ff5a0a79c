"""The running scheduler takes in what is published by the word of the kubelet's pods API, through
all that a pod may become."""

from collections.abc import Collection
from contextlib import ExitStack

import pytest

from rte.follower import Tell, Wake
from rte.kubelet.following import NodePods, Source
from rte.model import PodName
from rte.pacer import Pace
from rte.publish.fingerprint import InformerMode, fingerprint
from rte.publish.pods import MIRRORED
from rte.sources.recorded import read_recorded
from tests.conftest import StartKubelet, StartScheduler
from tests.machines.description import FOLDER
from tests.real_apiserver import ApiServer, Json
from tests.real_kubelet import pod
from tests.real_scheduler import Scheduler
from tests.scheduling import CRD, GPU, Cluster, RealNode, fingerprint_of
from tests.test_scheduler import not_taken_in

CONFIG = {
    "topologyManagerPolicy": "single-numa-node",
    "cpuManagerPolicy": "static",
    "memoryManagerPolicy": "Static",
}
ONE: Json = {GPU: 1, "cpu": 2, "memory": "1Gi"}
BOUND: Json = {"cpu": 2, "memory": "1Gi"}
SOURCE = "kubernetes.io/config.source"


class ToldNode(RealNode):
    """Nobody but the kubelet tells this publisher of the pods."""

    def follow_pods(self, wake: Wake, tell: Tell) -> NodePods:
        return NodePods(socket=self.kubelet.pods_api, api_server=None, wake=wake, tell=tell)

    def until_published(self, running: Collection[str]) -> None:
        if running:
            super().until_published(running)
        else:  # a kubelet without any pod is not believed for a while
            self.until(lambda: bool(self.body()["zones"]))

    def run(self, made: Json) -> None:
        self.cluster.bind(made, self.name)
        assert self.start_pod(made).admitted

    def run_static(self, made: Json) -> None:
        """The kubelet has it from a file, and the API server has its mirror."""
        name, uid = made["metadata"]["name"], f"{self.name}-of-a-file"
        metadata = {"name": name, "namespace": self.cluster.namespace, "uid": uid}
        file = {**made, "metadata": {**metadata, "annotations": {SOURCE: "file"}}}
        assert self.kubelet.admit(file).admitted
        mirror = {"name": name, "annotations": {MIRRORED: uid, SOURCE: "file"}}
        spec = {**made["spec"], "nodeName": self.name}
        self.cluster.real.create(self.cluster.pods, {"metadata": mirror, "spec": spec})
        self.cluster.set_phase(name, "Running")

    def refuse(self, made: Json) -> None:
        self.cluster.bind(made, self.name)
        metadata = {**made["metadata"], "namespace": self.cluster.namespace}
        assert not self.kubelet.admit({**made, "metadata": metadata}).admitted
        self.cluster.set_phase(made["metadata"]["name"], "Failed")

    def evict(self, name: str) -> None:
        """Its containers go on for now, and so its phase in the API server."""
        self.kubelet.evict(name, self.cluster.namespace)

    def finish(self, name: str, phase: str) -> None:
        self.kubelet.finish(name, self.cluster.namespace, phase=phase)
        self.cluster.set_phase(name, phase)


class Watched:
    """Such a node, and a scheduler that counts its pods in the same mode."""

    def __init__(self, node: ToldNode, scheduler: Scheduler) -> None:
        self.node, self.scheduler = node, scheduler
        self.probes: list[str] = []

    def until_taken_in(self, *covered: str) -> None:
        """One more pod of another scheduler makes this one look at the node's object, and at the
        one that covers exactly these pods and the former probes."""
        self.probes.append(f"{self.node.name}-probe-{len(self.probes)}")
        self.node.run(pod(self.probes[-1], BOUND))
        space = self.node.cluster.namespace
        names = (*covered, *self.probes)
        wanted = fingerprint(PodName(namespace=space, name=name) for name in names)
        self.node.until(lambda: fingerprint_of(self.node.body()) == wanted)
        said = {self.node.name: wanted}
        assert not_taken_in(self.node.cluster, self.scheduler, said) == set()


@pytest.fixture
def cluster(apiserver: ApiServer, stack: ExitStack) -> Cluster:
    apiserver.apply_files(CRD)
    cluster = Cluster(apiserver, "told")
    stack.callback(cluster.close)
    return cluster


@pytest.mark.parametrize("mode", list(InformerMode))
def test_an_object_that_follows_the_kubelets_word_is_taken_in(
    cluster: Cluster,
    kubelet: StartKubelet,
    scheduler: StartScheduler,
    stack: ExitStack,
    mode: InformerMode,
) -> None:
    node = ToldNode(
        f"{cluster.namespace}-0",
        cluster,
        kubelet,
        read_recorded(FOLDER / "hgx-h100-oci"),
        CONFIG,
        Pace(echo_s=0, poll_s=60),
        {"informer_mode": mode},
    )
    stack.callback(node.stop)
    node.start()
    started = scheduler(resync_s=1, cache={"informerMode": mode.value}, verbosity=4)
    watched = Watched(node, started)

    def until_taken_in(*running: str, ended: Collection[str] = ()) -> None:
        """Those that have ended count in one mode."""
        dedicated = mode is InformerMode.DEDICATED
        watched.until_taken_in(*running, *(ended if dedicated else ()))

    for name in ("job", "evicted"):
        node.run(pod(name, ONE))
    node.run(pod("again", BOUND))
    node.run(pod("unbound", {"cpu": "500m"}))
    cluster.bind(pod("unheard-of", ONE), node.name)  # Pending, and the kubelet has not got it
    until_taken_in("job", "evicted", "again")
    assert isinstance(node.pods, NodePods)
    assert node.pods.source is Source.KUBELET

    node.finish("job", "Succeeded")
    node.refuse(pod("refused", {GPU: 100, **BOUND}))
    node.evict("evicted")
    until_taken_in("evicted", "again", ended=("job", "refused"))

    node.finish("evicted", "Failed")
    node.end_pod("refused")
    node.run_static(pod("static", ONE))
    until_taken_in("static", "again", ended=("job", "evicted"))

    node.end_pod("again")
    node.run(pod("again", ONE))
    node.kubelet.restart()
    until_taken_in("static", "again", ended=("job", "evicted"))

    cluster.create(pod("next", ONE), started.name, node=node.name)
    assert cluster.verdicts(started, ["next"]) == {"next": node.name}
