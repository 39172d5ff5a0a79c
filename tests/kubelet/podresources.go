package main

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
	apiv1alpha1 "k8s.io/kubelet/pkg/apis/podresources/v1alpha1"
	kubeletgrpc "k8s.io/kubernetes/pkg/kubelet/apis/grpc"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/memorymanager/state"
)

func (n *Node) servePodResources() error {
	path := filepath.Join(n.root, "pod-resources", "kubelet.sock")
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return err
	}
	listen, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	interceptors := []grpc.ServerOption{grpc.ChainUnaryInterceptor(n.tampering.intercept)}
	if n.rateLimit {
		interceptors = append(interceptors, kubeletgrpc.WithRateLimiter(n.ctx, "podresources", podresources.DefaultQPS, podresources.DefaultBurstTokens))
	}
	p := providers{n}
	from := podresources.PodResourcesProviders{Pods: n.pods, Devices: p, Cpus: p, Memory: p, DynamicResources: p}
	n.server = grpc.NewServer(interceptors...)
	api.RegisterPodResourcesListerServer(n.server, podresources.NewV1PodResourcesServer(n.ctx, from))
	apiv1alpha1.RegisterPodResourcesListerServer(n.server, podresources.NewV1alpha1PodResourcesServer(from))
	go func(s *grpc.Server) { _ = s.Serve(listen) }(n.server)
	return nil
}

// tampering makes PodResources behave worse than it usually does.
type tampering struct {
	mu      sync.Mutex
	is      disturbance
	changed chan struct{} // closed by the next change; calls that wait end their wait then
}

type disturbance struct {
	Before float64 `json:"before_s"` // the call waits this long before it looks
	After  float64 `json:"after_s"`  // and this long after it, so that its answer is old
	Error  string  `json:"error"`    // a gRPC code's name, answered in place of all else
}

func (t *tampering) set(d disturbance) error {
	if d.Error != "" {
		var code codes.Code
		if err := code.UnmarshalJSON([]byte(`"` + d.Error + `"`)); err != nil {
			return err
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.is = d
	if t.changed != nil {
		close(t.changed)
	}
	t.changed = make(chan struct{})
	return nil
}

func (t *tampering) now() (disturbance, chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.is, t.changed
}

func (t *tampering) intercept(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	d, changed := t.now()
	// That the caller has given up does not end a wait: nothing that hangs
	// would notice.
	wait := func(seconds float64) {
		if seconds <= 0 {
			return
		}
		select {
		case <-time.After(time.Duration(seconds * float64(time.Second))):
		case <-changed:
		}
	}
	wait(d.Before)
	if d.Error != "" {
		var code codes.Code
		_ = code.UnmarshalJSON([]byte(`"` + d.Error + `"`))
		return nil, status.Error(code, "as the test asked")
	}
	answer, err := handler(ctx, request)
	wait(d.After)
	return answer, err
}

// providers answer the PodResources server from the managers. The kubelet's own
// are not exported; what they do beyond passing on is the same here: a device
// is listed once for each of its NUMA nodes, once when it has no topology, and
// not at all when its topology is empty; CPUs and memory are listed only for
// containers that have them to themselves.
type providers struct{ node *Node }

func deviceEntries(held devicemanager.ResourceDeviceInstances) (entries []*api.ContainerDevices) {
	for name, devices := range held {
		for id, device := range devices {
			one := func(t *api.TopologyInfo) *api.ContainerDevices {
				return &api.ContainerDevices{ResourceName: name, DeviceIds: []string{id}, Topology: t}
			}
			if device.GetTopology() == nil {
				entries = append(entries, one(nil))
			}
			for _, node := range device.GetTopology().GetNodes() {
				entries = append(entries, one(topology(node.GetID())))
			}
		}
	}
	return entries
}

func memoryEntries(blocks []state.Block) (entries []*api.ContainerMemory) {
	for _, b := range blocks {
		entries = append(entries, &api.ContainerMemory{
			MemoryType: string(b.Type), Size: b.Size, Topology: topology(int64s(b.NUMAAffinity)...)})
	}
	return entries
}

func topology(ids ...int64) *api.TopologyInfo {
	t := &api.TopologyInfo{}
	for _, id := range ids {
		t.Nodes = append(t.Nodes, &api.NUMANode{ID: id})
	}
	return t
}

func int64s(ints []int) []int64 {
	out := make([]int64, len(ints))
	for i, v := range ints {
		out[i] = int64(v)
	}
	return out
}
