package main

import (
	"net"
	"os"
	"path/filepath"

	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	api "k8s.io/kubelet/pkg/apis/pods/v1alpha1"
	"k8s.io/kubernetes/pkg/apis/core/v1/helper/qos"
	"k8s.io/kubernetes/pkg/features"
	kubeletgrpc "k8s.io/kubernetes/pkg/kubelet/apis/grpc"
	podsapi "k8s.io/kubernetes/pkg/kubelet/apis/pods"
	"k8s.io/kubernetes/pkg/kubelet/pod"
	"k8s.io/kubernetes/pkg/kubelet/status"
	kubetypes "k8s.io/kubernetes/pkg/kubelet/types"
)

// podView is the pods API with what it answers from: the kubelet's own pod
// manager and status manager. The table tells them what the API server and the
// runtime would; nothing takes the statuses to an API server.
type podView struct {
	manager  pod.Manager
	statuses status.Manager
	server   *grpc.Server // nil where the feature is off
}

func (n *Node) servePods() error {
	n.view = podView{manager: pod.NewBasicPodManager()}
	n.view.statuses = status.NewManager(nil, n.view.manager, nil, nil)
	for _, p := range n.pods.GetPods() {
		if kubetypes.IsStaticPod(p) {
			// Read from its file, which has no status.
			p = p.DeepCopy()
			p.Status = v1.PodStatus{}
		}
		n.view.manager.AddPod(p)
	}
	if !utilfeature.DefaultFeatureGate.Enabled(features.PodsAPI) {
		return nil
	}
	path := filepath.Join(n.root, "pods-api", podsapi.Socket+".sock")
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
	var options []grpc.ServerOption
	if n.rateLimit {
		options = append(options, kubeletgrpc.WithRateLimiter(n.ctx, "pods", podsapi.DefaultQPS, podsapi.DefaultBurstTokens))
	}
	answers := n.newPodsServer()
	n.view.statuses.AddPodUpdateNotifier(answers)
	n.view.server = grpc.NewServer(options...)
	api.RegisterPodsServer(n.view.server, answers)
	go func(s *grpc.Server) { _ = s.Serve(listen) }(n.view.server)
	return nil
}

func (v podView) stop() {
	if v.server != nil {
		v.server.Stop()
	}
}

// bound is a pod that the kubelet hears of.
func (n *Node) bound(p *v1.Pod) {
	n.view.manager.AddPod(p)
	n.view.statuses.SetPodStatus(n.log, p, p.Status)
}

// report takes a pod's status in the table to the managers.
func (n *Node) report(p *v1.Pod) {
	for _, now := range n.pods.GetPods() {
		if now.UID == p.UID {
			n.view.statuses.SetPodStatus(n.log, now, now.Status)
			n.view.manager.UpdatePod(now)
		}
	}
}

// evict begins to end a pod: to the kubelet it has failed, and to the API server
// it will have when its last container has ended, which is when it is finished.
func (n *Node) evict(p *v1.Pod) {
	s := p.Status.DeepCopy()
	s.Phase, s.Reason = v1.PodFailed, "Evicted"
	for _, c := range p.Spec.Containers {
		running := v1.ContainerState{Running: &v1.ContainerStateRunning{}}
		s.ContainerStatuses = append(s.ContainerStatuses, v1.ContainerStatus{Name: c.Name, State: running})
	}
	n.view.statuses.SetPodStatus(n.log, p, *s)
}

// terminated is said of a pod that runs no container any more. To those who
// watch the pods API it is gone then; the object still exists.
func (n *Node) terminated(p *v1.Pod) {
	n.view.statuses.TerminatePod(n.log, p)
}

// gone is a pod whose object exists no more. The pods API tells nobody.
func (n *Node) gone(p *v1.Pod) {
	n.view.manager.RemovePod(p)
}

// newStatus is what the API server gives a new pod.
func newStatus(p *v1.Pod) v1.PodStatus {
	return v1.PodStatus{Phase: v1.PodPending, QOSClass: qos.ComputePodQOS(p)}
}
