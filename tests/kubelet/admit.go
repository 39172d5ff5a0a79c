package main

import (
	"slices"
	"sort"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// admission is what became of a pod.
type admission struct {
	Namespace  string      `json:"namespace"`
	Name       string      `json:"name"`
	UID        string      `json:"uid"`
	Admitted   bool        `json:"admitted"`
	Reason     string      `json:"reason"`  // of the rejection, else empty
	Message    string      `json:"message"` // likewise
	Containers []container `json:"containers"`
}

// container is what the managers have decided for one container; init
// containers come first. All but the hints is empty when the pod was rejected.
type container struct {
	Name          string              `json:"name"`
	Devices       map[string][]string `json:"devices"` // by resource, sorted
	CPUs          []int               `json:"cpus"`    // where it may run
	ExclusiveCPUs []int               `json:"exclusive_cpus"`
	MemoryNodes   []int               `json:"memory_nodes"`
	Affinity      *hint               `json:"affinity"`
	Hints         providerHints       `json:"hints"`
	Options       *options            `json:"options"` // what the runtime is told; absent without devices and on a restart
	Error         string              `json:"error"`   // the container could not be created
}

// options is what Allocate's answers came to.
type options struct {
	Envs        map[string]string `json:"envs"`
	Annotations map[string]string `json:"annotations"`
	CDIDevices  []string          `json:"cdi_devices"`
	Devices     []device          `json:"devices"`
	Mounts      []mount           `json:"mounts"`
}

type device struct {
	Host        string `json:"host"`
	Container   string `json:"container"`
	Permissions string `json:"permissions"`
}

type mount struct {
	Host      string `json:"host"`
	Container string `json:"container"`
	ReadOnly  bool   `json:"read_only"`
}

func allContainers(p *v1.Pod) []v1.Container {
	return slices.Concat(p.Spec.InitContainers, p.Spec.Containers)
}

// admit asks the kubelet's handlers about a pod of the table. The pod has to be
// among the active ones meanwhile; a rejected one stays, as Failed. When
// admitted, its containers are created unless they are running already.
func (n *Node) admit(p *v1.Pod, running bool) admission {
	n.hints.clear()
	a := admission{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID)}
	others := slices.DeleteFunc(n.pods.GetActivePods(), func(o *v1.Pod) bool { return o.UID == p.UID })
	attributes := &lifecycle.PodAdmitAttributes{Pod: p, OtherPods: others, Operation: lifecycle.AddOperation}
	a.Admitted = true
	for _, h := range n.handlers {
		if r := admitBy(n.ctx, h, attributes); !r.Admit {
			a.Admitted, a.Reason, a.Message = false, r.Reason, r.Message
			n.pods.update(p.UID, func(p *v1.Pod, _ map[string]string) {
				p.Status = v1.PodStatus{Phase: v1.PodFailed, QOSClass: p.Status.QOSClass, Reason: r.Reason, Message: "Pod was rejected: " + r.Message}
			})
			break
		}
	}
	if a.Admitted {
		n.pods.update(p.UID, func(p *v1.Pod, _ map[string]string) { p.Status.Phase = v1.PodRunning })
	}
	n.report(p)
	for _, c := range allContainers(p) {
		decided := container{Name: c.Name}
		if a.Admitted {
			decided = n.create(p, &c, running)
		}
		decided.Hints = n.hints.of(c.Name)
		a.Containers = append(a.Containers, decided)
	}
	return a
}

// create does what the kubelet does around the creation of a container.
func (n *Node) create(p *v1.Pod, c *v1.Container, running bool) container {
	uid := string(p.UID)
	out := container{Name: c.Name}
	if !running {
		o, err := n.devices.GetDeviceRunContainerOptions(n.ctx, p, c)
		if err != nil {
			out.Error = err.Error()
			return out
		}
		out.Options = toOptions(o)
		id := string(uuid.NewUUID())
		n.cpus.AddContainer(n.log, p, c, id)
		n.memory.AddContainer(n.log, p, c, id)
		n.track(p, c, id)
		n.pods.update(p.UID, func(_ *v1.Pod, containers map[string]string) { containers[c.Name] = id })
	}
	out.Devices = map[string][]string{}
	for name, devices := range n.devices.GetDevices(uid, c.Name) {
		for id := range devices {
			out.Devices[name] = append(out.Devices[name], id)
		}
		sort.Strings(out.Devices[name])
	}
	out.CPUs = n.cpus.GetCPUAffinity(uid, c.Name).List()
	out.ExclusiveCPUs = n.cpus.GetExclusiveCPUs(uid, c.Name).List()
	out.MemoryNodes = sets.List(n.memory.GetMemoryNUMANodes(n.log, p, c))
	affinity := toHint(n.affinity(uid, c.Name))
	out.Affinity = &affinity
	return out
}

func toOptions(o *devicemanager.DeviceRunContainerOptions) *options {
	if o == nil {
		return nil
	}
	out := &options{Envs: map[string]string{}, Annotations: map[string]string{}}
	for _, e := range o.Envs {
		out.Envs[e.Name] = e.Value
	}
	for _, a := range o.Annotations {
		out.Annotations[a.Name] = a.Value
	}
	for _, d := range o.CDIDevices {
		out.CDIDevices = append(out.CDIDevices, d.Name)
	}
	for _, d := range o.Devices {
		out.Devices = append(out.Devices, device{d.PathOnHost, d.PathInContainer, d.Permissions})
	}
	for _, m := range o.Mounts {
		out.Mounts = append(out.Mounts, mount{m.HostPath, m.ContainerPath, m.ReadOnly})
	}
	return out
}

// end stops the containers of a pod and leaves it in the phase.
func (n *Node) end(p *v1.Pod, phase v1.PodPhase) {
	n.pods.update(p.UID, func(p *v1.Pod, containers map[string]string) {
		for name, id := range containers {
			n.untrack(id)
			delete(containers, name)
		}
		p.Status.Phase = phase
	})
}
