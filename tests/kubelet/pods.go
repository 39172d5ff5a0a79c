package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// podTable is what the API server and the container runtime would know: the
// pods of the node in the order in which they came, and their containers.
type podTable struct {
	path string      // outlives the process, as those two do
	deaf atomic.Bool // the kubelet has heard of none of them yet

	mu   sync.Mutex
	pods []*podEntry
}

type podEntry struct {
	Pod        *v1.Pod           `json:"pod"` // replaced, never changed: the managers keep it
	Containers map[string]string `json:"containers"`
}

func openPodTable(path string) (*podTable, error) {
	t := &podTable{path: path}
	text, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return t, nil
	}
	if err != nil {
		return nil, err
	}
	return t, json.Unmarshal(text, &t.pods)
}

func (t *podTable) save() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	text, err := json.Marshal(t.pods)
	if err != nil {
		return err
	}
	if err := os.WriteFile(t.path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(t.path+".new", t.path)
}

func over(p *v1.Pod) bool {
	return p.Status.Phase == v1.PodFailed || p.Status.Phase == v1.PodSucceeded
}

// GetActivePods, GetPods and GetPodByName are what the PodResources server asks.

func (t *podTable) GetActivePods() []*v1.Pod {
	return slices.DeleteFunc(t.GetPods(), over)
}

func (t *podTable) GetPods() []*v1.Pod {
	if t.deaf.Load() {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]*v1.Pod, len(t.pods))
	for i, e := range t.pods {
		all[i] = e.Pod
	}
	return all
}

func (t *podTable) GetPodByName(namespace, name string) (*v1.Pod, bool) {
	for _, p := range t.GetPods() {
		if p.Namespace == namespace && p.Name == name {
			return p, true
		}
	}
	return nil, false
}

func (t *podTable) add(p *v1.Pod) error {
	if _, ok := t.GetPodByName(p.Namespace, p.Name); ok {
		return fmt.Errorf("pod %s/%s is there already", p.Namespace, p.Name)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pods = append(t.pods, &podEntry{Pod: p, Containers: map[string]string{}})
	return nil
}

func (t *podTable) remove(uid types.UID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pods = slices.DeleteFunc(t.pods, func(e *podEntry) bool { return e.Pod.UID == uid })
}

// update changes what is known of a pod; change gets a copy of the Pod.
func (t *podTable) update(uid types.UID, change func(*v1.Pod, map[string]string)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.pods {
		if e.Pod.UID == uid {
			e.Pod = e.Pod.DeepCopy()
			change(e.Pod, e.Containers)
		}
	}
}

type containerRef struct{ pod, name, id string }

func (t *podTable) containers() (refs []containerRef) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range t.pods {
		for name, id := range e.Containers {
			refs = append(refs, containerRef{string(e.Pod.UID), name, id})
		}
	}
	return refs
}
