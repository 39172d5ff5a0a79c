"""What to do about a problem of the daemon, by its subject.

docs/alerts.md has the same list, with what each means.
"""

from __future__ import annotations

from collections.abc import Mapping

DO: Mapping[str, str] = {
    "kubelet": "is it running, and its folder mounted? `rte doctor` tries its sockets",
    "API server": "`rte doctor` tries each right and each definition",
    "policy": "is kubelet.configFile right? Or state kubelet.topologyManagerPolicy",
    "hardware": "`rte doctor` looks at sysfs and NVML",
    "publication": "another line here, or the log, says why",
    "plugin": "the log says what the kubelet answered; is another plugin there for the resource?",
    "agent": "a bug: the log has its trace, and `rte record` makes a report",
    "another writer": "let one program write the object: remove the other from this node",
    "pods": "may it list and watch pods? Else set nrt.fingerprint.watchPods to false",
    "state files": "seen at the next poll; report the file and the kubelet's release",
    "kubelet configuration": "restart the kubelet, or put its file back",
    "configuration": "repair the file; the last good one is in force",
    "certificate": "see what renews its Secret; the last good one is in force",
    "Node": "may it get nodes? Unbound resources have the machine's figures until then",
}


def do(subject: str) -> str:
    """What to do; never empty."""
    return DO.get(subject, "the log has the whole story")
