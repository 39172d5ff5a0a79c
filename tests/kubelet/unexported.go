package main

import (
	_ "unsafe" // for go:linkname

	cadvisorapi "github.com/google/cadvisor/lib/model"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

// The exported constructor works in /var/lib/kubelet/device-plugins and nowhere
// else; the one beneath it takes the socket's path, and the folder from that.
// Go's linker guards only the standard library against this. A declaration
// without a body needs an assembly file in its package, hence unexported.s.
//
//go:linkname newDeviceManager k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newDeviceManager(log klog.Logger, socket string, topology []cadvisorapi.Node, store topologymanager.Store) (*devicemanager.ManagerImpl, error)
