package main

import (
	"context"
	_ "unsafe" // for go:linkname

	cadvisorapi "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
	podsapi "k8s.io/kubernetes/pkg/kubelet/apis/pods"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/qos"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// What has another shape in another release of Kubernetes is in this file, and
// tests/kubelet136 has the same file for 1.36; it shares all others with us.

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

func (n *Node) newPodsServer() *podsapi.PodsServer {
	return podsapi.NewPodsServer(podsapi.NewBroadcaster(n.ctx), n.view.manager, n.view.statuses, surroundings{n, n.ctx})
}

func (n *Node) newTopologyManager() (topologymanager.Manager, error) {
	c := n.config
	return topologymanager.NewManager(n.log, n.machine.Topology, c.TopologyManagerPolicy, c.TopologyManagerScope, c.TopologyManagerPolicyOptions)
}

func (n *Node) deviceCapacity() (v1.ResourceList, v1.ResourceList, []string) {
	return n.devices.GetCapacity(n.log)
}

func (n *Node) addDeviceHealth(p *v1.Pod, s *v1.PodStatus) {
	n.devices.UpdateAllocatedResourcesStatus(n.log, p, s)
}

func admitBy(ctx context.Context, h lifecycle.PodAdmitHandler, a *lifecycle.PodAdmitAttributes) lifecycle.PodAdmitResult {
	return h.Admit(ctx, a)
}

func (n *Node) track(p *v1.Pod, c *v1.Container, id string) {
	n.topology.AddContainer(n.log, p, c, id)
}

func (n *Node) untrack(id string) {
	_ = n.topology.RemoveContainer(n.log, id)
}

func (n *Node) affinity(uid, container string) topologymanager.TopologyHint {
	return n.topology.GetAffinity(n.log, uid, container)
}

func (l listener) GetTopologyHints(log klog.Logger, p *v1.Pod, c *v1.Container, op lifecycle.Operation) map[string][]topologymanager.TopologyHint {
	hints := l.HintProvider.GetTopologyHints(log, p, c, op)
	l.log.add(c.Name, l.name, hints)
	return hints
}

func (l listener) GetPodTopologyHints(log klog.Logger, p *v1.Pod, op lifecycle.Operation) map[string][]topologymanager.TopologyHint {
	hints := l.HintProvider.GetPodTopologyHints(log, p, op)
	l.log.add("", l.name, hints)
	return hints
}

func (p providers) UpdateAllocatedDevices(log klog.Logger) {
	p.node.devices.UpdateAllocatedDevices(log)
}

func (p providers) GetDevices(pod, container string) []*api.ContainerDevices {
	return deviceEntries(p.node.devices.GetDevices(pod, container))
}

func (p providers) GetAllocatableDevices(log klog.Logger) []*api.ContainerDevices {
	return deviceEntries(p.node.devices.GetAllocatableDevices(log))
}

func (p providers) GetCPUs(pod *v1.Pod, c *v1.Container) []int64 {
	if p.node.cpus.GetResourceIsolationLevel(pod, c) != qos.ResourceIsolationContainer {
		return nil
	}
	return int64s(p.node.cpus.GetExclusiveCPUs(string(pod.UID), c.Name).UnsortedList())
}

func (p providers) GetPodCPUs(pod string) []int64 {
	return int64s(p.node.cpus.GetPodCPUs(pod).UnsortedList())
}

func (p providers) GetAllocatableCPUs() []int64 {
	return int64s(p.node.cpus.GetAllocatableCPUs().UnsortedList())
}

func (p providers) GetMemory(log klog.Logger, pod *v1.Pod, c *v1.Container) []*api.ContainerMemory {
	if p.node.memory.GetResourceIsolationLevel(pod, c) != qos.ResourceIsolationContainer {
		return nil
	}
	return memoryEntries(p.node.memory.GetMemory(log, string(pod.UID), c.Name))
}

func (p providers) GetPodMemory(_ klog.Logger, pod string) []*api.ContainerMemory {
	return memoryEntries(p.node.memory.GetPodMemory(pod))
}

func (p providers) GetAllocatableMemory(log klog.Logger) []*api.ContainerMemory {
	return memoryEntries(p.node.memory.GetAllocatableMemory(log))
}

func (p providers) GetDynamicResources(klog.Logger, *v1.Pod, *v1.Container) []*api.DynamicResource {
	return nil
}
