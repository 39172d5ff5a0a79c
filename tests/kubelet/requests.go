package main

import (
	"encoding/json"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	corev1 "k8s.io/kubernetes/pkg/apis/core/v1"
)

type request struct {
	ID json.RawMessage `json:"id"`
	Op string          `json:"op"`

	Pod       *v1.Pod     `json:"pod"`       // admit
	Namespace string      `json:"namespace"` // remove, finish, evict, pod_status
	Name      string      `json:"name"`
	Phase     v1.PodPhase `json:"phase"` // finish

	Resource v1.ResourceName `json:"resource"` // wait_devices
	Count    int64           `json:"count"`
	Within   float64         `json:"within_s"`

	Running bool `json:"running"` // restart
	Deaf    bool `json:"deaf"`    // restart
	Ready   bool `json:"ready"`   // sources_ready
	Forced  bool `json:"forced"`  // remove

	disturbance // pod_resources
}

func (n *Node) do(r *request) (any, error) {
	switch r.Op {
	case "admit":
		return n.admitNew(r.Pod)
	case "remove":
		return nil, n.withPod(r, func(p *v1.Pod) {
			n.end(p, p.Status.Phase)
			n.pods.remove(p.UID)
			if !r.Forced && !over(p) {
				n.terminated(p)
			}
			n.gone(p)
		})
	case "finish":
		return nil, n.withPod(r, func(p *v1.Pod) {
			n.end(p, r.Phase)
			n.report(p)
			n.terminated(p)
		})
	case "evict":
		return nil, n.withPod(r, n.evict)
	case "sources_ready":
		if r.Ready && n.pods.deaf.Load() {
			n.admitting.Lock()
			defer n.admitting.Unlock()
			return n.hear(true)
		}
		n.ready.Store(r.Ready)
		return nil, nil
	case "pod_status":
		return n.podStatus(r)
	case "restart":
		n.admitting.Lock()
		defer n.admitting.Unlock()
		n.stop()
		return n.start(r.Running, r.Deaf)
	case "state":
		return n.state(), nil
	case "wait_devices":
		return nil, n.awaitDevices(r.Resource, r.Count, time.Duration(r.Within*float64(time.Second)))
	case "pod_resources":
		return nil, n.tampering.set(r.disturbance)
	}
	return nil, fmt.Errorf("unknown op %q", r.Op)
}

func (n *Node) admitNew(p *v1.Pod) (any, error) {
	if p == nil {
		return nil, fmt.Errorf("admit needs a pod")
	}
	if p.Namespace == "" {
		p.Namespace = "default"
	}
	if p.UID == "" {
		p.UID = uuid.NewUUID()
	}
	p.CreationTimestamp = metav1.Now()
	corev1.SetObjectDefaults_Pod(p)
	p.Status = newStatus(p)
	n.admitting.Lock()
	defer n.admitting.Unlock()
	if err := n.pods.add(p); err != nil {
		return nil, err
	}
	n.bound(p)
	a := n.admit(p, false)
	return a, n.pods.save()
}

func (n *Node) withPod(r *request, do func(*v1.Pod)) error {
	n.admitting.Lock()
	defer n.admitting.Unlock()
	p, ok := n.pods.GetPodByName(r.Namespace, r.Name)
	if !ok {
		return fmt.Errorf("there is no pod %s/%s", r.Namespace, r.Name)
	}
	do(p)
	return n.pods.save()
}

// podStatus is the pod's status with the health of its devices, as the kubelet
// would send it to the API server.
func (n *Node) podStatus(r *request) (any, error) {
	p, ok := n.pods.GetPodByName(r.Namespace, r.Name)
	if !ok {
		return nil, fmt.Errorf("there is no pod %s/%s", r.Namespace, r.Name)
	}
	s := p.Status.DeepCopy()
	for _, c := range p.Spec.Containers {
		s.ContainerStatuses = append(s.ContainerStatuses, v1.ContainerStatus{Name: c.Name})
	}
	n.addDeviceHealth(p, s)
	return s, nil
}

func (n *Node) state() any {
	type pod struct {
		Namespace string      `json:"namespace"`
		Name      string      `json:"name"`
		UID       string      `json:"uid"`
		Phase     v1.PodPhase `json:"phase"`
		Reason    string      `json:"reason"`
		Message   string      `json:"message"`
	}
	pods := []pod{}
	for _, p := range n.pods.GetPods() {
		pods = append(pods, pod{p.Namespace, p.Name, string(p.UID), p.Status.Phase, p.Status.Reason, p.Status.Message})
	}
	all, allocatable := n.resources()
	return map[string]any{"capacity": all, "allocatable": allocatable, "pods": pods,
		"shared_cpus":      n.cpus.State().GetDefaultCPUSet().List(),
		"allocatable_cpus": n.cpus.GetAllocatableCPUs().List()}
}
