package main

import (
	"sync"

	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// hint is a set of NUMA nodes that a manager offers; nil is any.
type hint struct {
	Nodes     []int `json:"nodes"`
	Preferred bool  `json:"preferred"`
}

func toHint(h topologymanager.TopologyHint) hint {
	if h.NUMANodeAffinity == nil {
		return hint{Preferred: h.Preferred}
	}
	return hint{Nodes: h.NUMANodeAffinity.GetBits(), Preferred: h.Preferred}
}

// providerHints are hints by manager and resource. A resource with nil has no
// preference, one with an empty list cannot be had.
type providerHints map[string]map[string][]hint

// hintLog keeps the hints of the admission under way.
type hintLog struct {
	mu sync.Mutex
	by map[string]providerHints // container; "" is the pod as a whole
}

func (l *hintLog) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.by = map[string]providerHints{}
}

func (l *hintLog) of(container string) providerHints {
	l.mu.Lock()
	defer l.mu.Unlock()
	if own, ok := l.by[container]; ok {
		return own
	}
	return l.by[""]
}

func (l *hintLog) add(container, provider string, hints map[string][]topologymanager.TopologyHint) {
	if len(hints) == 0 {
		return
	}
	byResource := map[string][]hint{}
	for name, list := range hints {
		if list != nil {
			byResource[name] = []hint{}
		} else {
			byResource[name] = nil
		}
		for _, h := range list {
			byResource[name] = append(byResource[name], toHint(h))
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.by[container] == nil {
		l.by[container] = providerHints{}
	}
	l.by[container][provider] = byResource
}

// listener is a manager whose hints are noted on their way to the Topology Manager.
type listener struct {
	topologymanager.HintProvider
	name string
	log  *hintLog
}
