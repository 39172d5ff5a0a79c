package main

import (
	"encoding/json"
	"fmt"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	v1helper "k8s.io/kubernetes/pkg/apis/core/v1/helper"
)

// numaNode is an entry of machine.json, which lists the machine's NUMA nodes.
type numaNode struct {
	ID        int               `json:"id"`     // below 64, gaps allowed
	Socket    int               `json:"socket"` //
	Cores     [][]int           `json:"cores"`  // the hardware threads of each core; none: a node of memory only
	Memory    resource.Quantity `json:"memory"`
	HugePages map[string]uint64 `json:"hugepages"` // "2Mi" to the number of pages
	Distances []uint64          `json:"distances"` // SLIT, in the order of the list
}

// parseMachine is the machine as the kubelet would hear of it from cAdvisor.
func parseMachine(text []byte) (*machineInfo, error) {
	var nodes []numaNode
	if err := json.Unmarshal(text, &nodes); err != nil {
		return nil, fmt.Errorf("machine.json: %w", err)
	}
	m := &machineInfo{MachineID: "test", SystemUUID: "test", BootID: "test"}
	sockets := map[int]bool{}
	pages := map[uint64]uint64{}
	for _, n := range nodes {
		sockets[n.Socket] = true
		node := machineNode{Id: n.ID, Memory: uint64(n.Memory.Value()), Distances: n.Distances}
		for _, threads := range n.Cores {
			node.Cores = append(node.Cores, machineCore{Id: m.NumPhysicalCores, Threads: threads, SocketID: n.Socket})
			m.NumPhysicalCores++
			m.NumCores += len(threads)
		}
		for size, count := range n.HugePages {
			q, err := resource.ParseQuantity(size)
			if err != nil {
				return nil, fmt.Errorf("machine.json: huge page size %q: %w", size, err)
			}
			kib := uint64(q.Value()) / 1024
			node.HugePages = append(node.HugePages, machineHugePages{PageSize: kib, NumPages: count})
			pages[kib] += count
		}
		m.MemoryCapacity += node.Memory
		m.Topology = append(m.Topology, node)
	}
	for kib, count := range pages {
		m.HugePages = append(m.HugePages, machineHugePages{PageSize: kib, NumPages: count})
	}
	m.NumSockets = len(sockets)
	return m, nil
}

// capacity is what the machine has, without devices.
func capacity(m *machineInfo) v1.ResourceList {
	c := v1.ResourceList{
		v1.ResourceCPU:    *resource.NewQuantity(int64(m.NumCores), resource.DecimalSI),
		v1.ResourceMemory: *resource.NewQuantity(int64(m.MemoryCapacity), resource.BinarySI),
	}
	for _, p := range m.HugePages {
		size := resource.NewQuantity(int64(p.PageSize)*1024, resource.BinarySI)
		c[v1helper.HugePageResourceName(*size)] = *resource.NewQuantity(int64(p.PageSize*p.NumPages)*1024, resource.BinarySI)
	}
	return c
}
