package main

import (
	"context"
	_ "unsafe" // for go:linkname

	cadvisorapi "github.com/google/cadvisor/info/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
	podsapi "k8s.io/kubernetes/pkg/kubelet/apis/pods"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// What is different from tests/kubelet, with which all other files are shared:
// the managers of 1.36 take no context and no logger in these calls, and know
// nothing of CPUs and memory that a pod has as a whole.

type (
	machineInfo      = cadvisorapi.MachineInfo
	machineNode      = cadvisorapi.Node
	machineCore      = cadvisorapi.Core
	machineHugePages = cadvisorapi.HugePagesInfo
)

// The exported constructor works in /var/lib/kubelet/device-plugins and nowhere
// else; the one beneath it takes the socket's path, and the folder from that.
// Go's linker guards only the standard library against this. A declaration
// without a body needs an assembly file in its package, hence release.s.
//
//go:linkname newDeviceManager k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newDeviceManager(log klog.Logger, socket string, topology []cadvisorapi.Node, store topologymanager.Store) (*devicemanager.ManagerImpl, error)

// The pods API of 1.36 answers also before the kubelet has heard of its pods.
func (n *Node) newPodsServer() *podsapi.PodsServer {
	return podsapi.NewPodsServer(podsapi.NewBroadcaster(), n.view.manager, n.view.statuses)
}

func (n *Node) newTopologyManager() (topologymanager.Manager, error) {
	c := n.config
	return topologymanager.NewManager(n.machine.Topology, c.TopologyManagerPolicy, c.TopologyManagerScope, c.TopologyManagerPolicyOptions)
}

func (n *Node) deviceCapacity() (v1.ResourceList, v1.ResourceList, []string) {
	return n.devices.GetCapacity()
}

func (n *Node) addDeviceHealth(p *v1.Pod, s *v1.PodStatus) {
	n.devices.UpdateAllocatedResourcesStatus(p, s)
}

func admitBy(ctx context.Context, h lifecycle.PodAdmitHandler, a *lifecycle.PodAdmitAttributes) lifecycle.PodAdmitResult {
	return h.Admit(a)
}

func (n *Node) track(p *v1.Pod, c *v1.Container, id string) {
	n.topology.AddContainer(p, c, id)
}

func (n *Node) untrack(id string) {
	_ = n.topology.RemoveContainer(id)
}

func (n *Node) affinity(uid, container string) topologymanager.TopologyHint {
	return n.topology.GetAffinity(uid, container)
}

func (l listener) GetTopologyHints(p *v1.Pod, c *v1.Container) map[string][]topologymanager.TopologyHint {
	hints := l.HintProvider.GetTopologyHints(p, c)
	l.log.add(c.Name, l.name, hints)
	return hints
}

func (l listener) GetPodTopologyHints(p *v1.Pod) map[string][]topologymanager.TopologyHint {
	hints := l.HintProvider.GetPodTopologyHints(p)
	l.log.add("", l.name, hints)
	return hints
}

func (p providers) UpdateAllocatedDevices() { p.node.devices.UpdateAllocatedDevices() }

func (p providers) GetDevices(pod, container string) []*api.ContainerDevices {
	return deviceEntries(p.node.devices.GetDevices(pod, container))
}

func (p providers) GetAllocatableDevices() []*api.ContainerDevices {
	return deviceEntries(p.node.devices.GetAllocatableDevices())
}

func (p providers) GetCPUs(pod, container string) []int64 {
	return int64s(p.node.cpus.GetExclusiveCPUs(pod, container).UnsortedList())
}

func (p providers) GetAllocatableCPUs() []int64 {
	return int64s(p.node.cpus.GetAllocatableCPUs().UnsortedList())
}

func (p providers) GetMemory(pod, container string) []*api.ContainerMemory {
	return memoryEntries(p.node.memory.GetMemory(pod, container))
}

func (p providers) GetAllocatableMemory() []*api.ContainerMemory {
	return memoryEntries(p.node.memory.GetAllocatableMemory())
}

func (p providers) GetDynamicResources(*v1.Pod, *v1.Container) []*api.DynamicResource {
	return nil
}
