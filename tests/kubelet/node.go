package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/record"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	v1helper "k8s.io/kubernetes/pkg/apis/core/v1/helper"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/cpumanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/memorymanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
)

// Node holds the managers in the way and the order in which the kubelet's
// container manager does, and stands in for what surrounds them there.
type Node struct {
	root      string // what /var/lib/kubelet is on a node
	machine   *machineInfo
	rateLimit bool
	pods      *podTable
	hints     *hintLog
	log       klog.Logger

	admitting sync.Mutex  // a kubelet admits one pod at a time
	ready     atomic.Bool // the pods from before the start are admitted
	tampering tampering   // outlives a restart

	// Made anew by every start.
	config   *config
	topology topologymanager.Manager
	devices  *devicemanager.ManagerImpl
	cpus     cpumanager.Manager
	memory   memorymanager.Manager
	handlers []lifecycle.PodAdmitHandler
	server   *grpc.Server
	view     podView
	cancel   context.CancelFunc
	ctx      context.Context
}

func newNode(dir string, rateLimit bool) (*Node, error) {
	text, err := os.ReadFile(filepath.Join(dir, "machine.json"))
	if err != nil {
		return nil, err
	}
	machine, err := parseMachine(text)
	if err != nil {
		return nil, err
	}
	pods, err := openPodTable(filepath.Join(dir, "pods.json"))
	if err != nil {
		return nil, err
	}
	return &Node{root: filepath.Join(dir, "kubelet"), machine: machine, rateLimit: rateLimit,
		pods: pods, hints: &hintLog{}, log: klog.Background()}, nil
}

// start reads the configuration and makes the managers, then hears of the pods
// that were there, at once or, when it is deaf, later.
func (n *Node) start(running, deaf bool) ([]admission, error) {
	n.ready.Store(false)
	n.pods.deaf.Store(deaf)
	text, err := os.ReadFile(filepath.Join(n.root, "config.yaml"))
	if err != nil {
		return nil, err
	}
	if n.config, err = parseConfig(text); err != nil {
		return nil, err
	}
	n.ctx, n.cancel = context.WithCancel(klog.NewContext(context.Background(), n.log))
	if err := n.makeManagers(); err != nil {
		return nil, err
	}
	if err := n.startManagers(running); err != nil {
		return nil, err
	}
	if err := n.servePodResources(); err != nil {
		return nil, err
	}
	if err := n.servePods(); err != nil {
		return nil, err
	}
	if deaf {
		return nil, nil
	}
	return n.hear(running)
}

// hear admits again the pods that were there. Their containers are still
// running after a restart of the kubelet, and gone after one of the machine.
func (n *Node) hear(running bool) ([]admission, error) {
	n.pods.deaf.Store(false)
	var again []admission
	for _, p := range n.pods.GetActivePods() {
		again = append(again, n.admit(p, running))
	}
	n.ready.Store(true)
	return again, n.pods.save()
}

func (n *Node) makeManagers() (err error) {
	// Hint providers are asked to allocate in the order in which they are added.
	c := n.config
	n.topology, err = n.newTopologyManager()
	if err != nil {
		return fmt.Errorf("topology manager: %w", err)
	}
	n.devices, err = newDeviceManager(n.log, filepath.Join(n.root, "device-plugins", "kubelet.sock"), n.machine.Topology, n.topology)
	if err != nil {
		return fmt.Errorf("device manager: %w", err)
	}
	n.topology.AddHintProvider(n.log, listener{n.devices, "devices", n.hints})
	n.cpus, err = cpumanager.NewManager(n.log, c.CPUManagerPolicy, c.CPUManagerPolicyOptions, c.CPUManagerReconcilePeriod.Duration,
		n.machine, c.reservedCPUs, c.reserved, n.root, n.topology)
	if err != nil {
		return fmt.Errorf("cpu manager: %w", err)
	}
	n.topology.AddHintProvider(n.log, listener{n.cpus, "cpus", n.hints})
	n.memory, err = memorymanager.NewManager(n.log, c.MemoryManagerPolicy, n.machine, c.reserved, c.ReservedMemory, n.root, n.topology)
	if err != nil {
		return fmt.Errorf("memory manager: %w", err)
	}
	n.topology.AddHintProvider(n.log, listener{n.memory, "memory", n.hints})
	n.handlers = []lifecycle.PodAdmitHandler{n.topology, lifecycle.NewPredicateAdmitHandler(
		func(context.Context, bool) (*v1.Node, error) { return n.object(), nil },
		lifecycle.NewAdmissionFailureHandlerStub(), n.devices.UpdatePluginResources)}
	return nil
}

func (n *Node) startManagers(running bool) error {
	known := containermap.NewContainerMap()
	alive := sets.New[string]()
	for _, c := range n.pods.containers() {
		known.Add(c.pod, c.name, c.id)
		if running {
			alive.Insert(c.id)
		}
	}
	around := surroundings{n, n.ctx}
	if err := n.cpus.Start(n.ctx, n.pods.GetActivePods, around, around, around, known.Clone()); err != nil {
		return fmt.Errorf("cpu manager: %w", err)
	}
	if err := n.memory.Start(n.ctx, n.pods.GetActivePods, around, around, around, known.Clone()); err != nil {
		return fmt.Errorf("memory manager: %w", err)
	}
	if err := n.devices.Start(n.log, n.pods.GetActivePods, around, known.Clone(), alive); err != nil {
		return fmt.Errorf("device manager: %w", err)
	}
	go drain(n.ctx, n.devices)

	registry := filepath.Join(n.root, "plugins_registry")
	if err := os.MkdirAll(registry, 0o750); err != nil {
		return err
	}
	plugins := pluginmanager.NewPluginManager(registry, &record.FakeRecorder{})
	plugins.AddHandler(pluginregistration.DevicePlugin, n.devices.GetWatcherHandler())
	go plugins.Run(n.ctx, around, n.ctx.Done())
	return nil
}

// drain takes the news of changed devices, which would fill its channel.
func drain(ctx context.Context, devices *devicemanager.ManagerImpl) {
	for {
		select {
		case <-devices.Updates():
		case <-ctx.Done():
			return
		}
	}
}

func (n *Node) stop() {
	_ = n.devices.Stop(n.log)
	n.server.Stop()
	n.view.stop()
	n.cancel()
}

// object is the Node that the kubelet would have in its cache.
func (n *Node) object() *v1.Node {
	all, allocatable := n.resources()
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{v1.LabelOSStable: "linux"}},
		Status:     v1.NodeStatus{Capacity: all, Allocatable: allocatable},
	}
}

// resources are the node's capacity and allocatable, of which the kubelet takes
// off what is reserved, and of memory all that is in huge pages. A resource
// whose plugin is gone is 0 in both once the kubelet has given it up.
func (n *Node) resources() (all, allocatable v1.ResourceList) {
	all = capacity(n.machine)
	all[v1.ResourcePods] = *resource.NewQuantity(int64(n.config.MaxPods), resource.DecimalSI)
	allocatable = all.DeepCopy()
	takeOff := func(name v1.ResourceName, q resource.Quantity) {
		if left, ok := allocatable[name]; ok {
			left.Sub(q)
			if left.Sign() < 0 {
				left.Set(0)
			}
			allocatable[name] = left
		}
	}
	for name, q := range n.config.reserved {
		takeOff(name, q)
	}
	for name, q := range all {
		if v1helper.IsHugePageResourceName(name) {
			takeOff(v1.ResourceMemory, q)
		}
	}
	ours, healthy, gone := n.deviceCapacity()
	for name, q := range ours {
		all[name] = q
	}
	for name, q := range healthy {
		allocatable[name] = q
	}
	for _, name := range gone {
		all[v1.ResourceName(name)] = resource.Quantity{}
		allocatable[v1.ResourceName(name)] = resource.Quantity{}
	}
	return all, allocatable
}

// awaitDevices returns when exactly count devices of the resource are healthy.
func (n *Node) awaitDevices(name v1.ResourceName, count int64, within time.Duration) error {
	for end := time.Now().Add(within); ; time.Sleep(2 * time.Millisecond) {
		_, healthy, _ := n.deviceCapacity()
		have := healthy[name]
		if have.Value() == count {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s: %d devices after %s, not %d", name, have.Value(), within, count)
		}
	}
}

// surroundings are the parts of a kubelet that the managers ask for things and
// that do not exist here. Each start has its own: the CPU manager's loop outlives
// a restart within this process, and must write no more then.
type surroundings struct {
	node *Node
	ctx  context.Context
}

func (s surroundings) AddSource(string) {}
func (s surroundings) AllReady() bool   { return s.ctx.Err() == nil && s.node.ready.Load() }

func (s surroundings) GetPodStatus(types.UID) (v1.PodStatus, bool) { return v1.PodStatus{}, false }

func (s surroundings) UpdateContainerResources(context.Context, string, *runtimeapi.ContainerResources) error {
	return nil
}
