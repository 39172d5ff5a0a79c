package main

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	_ "k8s.io/kubernetes/pkg/features" // registers the kubelet's gates
	kubeletconfig "k8s.io/kubernetes/pkg/kubelet/apis/config"
	"k8s.io/kubernetes/pkg/kubelet/apis/config/scheme"
	"k8s.io/utils/cpuset"
)

// config is a KubeletConfiguration, read and defaulted by the kubelet's code,
// and what the kubelet works out of it before it makes its managers.
type config struct {
	*kubeletconfig.KubeletConfiguration
	reservedCPUs cpuset.CPUSet
	reserved     v1.ResourceList // for the system, the kubelet and hard eviction together
}

func parseConfig(text []byte) (*config, error) {
	// The kubelet only warns of a field that it does not know; here it is a
	// test's mistake.
	_, codecs, err := scheme.NewSchemeAndCodecs(serializer.EnableStrict)
	if err != nil {
		return nil, err
	}
	object, _, err := codecs.UniversalDecoder().Decode(text, nil, nil)
	if err != nil {
		return nil, err
	}
	kc, ok := object.(*kubeletconfig.KubeletConfiguration)
	if !ok {
		return nil, fmt.Errorf("config.yaml is a %T", object)
	}
	if err := utilfeature.DefaultMutableFeatureGate.SetFromMap(kc.FeatureGates); err != nil {
		return nil, err
	}
	c := &config{KubeletConfiguration: kc}
	if c.reservedCPUs, err = cpuset.Parse(kc.ReservedSystemCPUs); err != nil {
		return nil, fmt.Errorf("reservedSystemCPUs: %w", err)
	}
	c.reserved, err = reserved(kc, c.reservedCPUs)
	return c, err
}

func reserved(kc *kubeletconfig.KubeletConfiguration, cpus cpuset.CPUSet) (v1.ResourceList, error) {
	sum := v1.ResourceList{}
	add := func(name, text string) error {
		q, err := resource.ParseQuantity(text)
		if err != nil {
			return fmt.Errorf("reservation of %s: %q: %w", name, text, err)
		}
		total := sum[v1.ResourceName(name)]
		total.Add(q)
		sum[v1.ResourceName(name)] = total
		return nil
	}
	for _, part := range []map[string]string{kc.SystemReserved, kc.KubeReserved} {
		for name, text := range part {
			if err := add(name, text); err != nil {
				return nil, err
			}
		}
	}
	if threshold := hardEviction(kc); strings.HasSuffix(threshold, "%") {
		return nil, fmt.Errorf("evictionHard: memory.available %q: only quantities are understood here", threshold)
	} else if threshold != "" {
		if err := add("memory", threshold); err != nil {
			return nil, err
		}
	}
	// A list of CPUs takes the place of every other reservation of CPU.
	if cpus.Size() > 0 {
		sum[v1.ResourceCPU] = *resource.NewQuantity(int64(cpus.Size()), resource.DecimalSI)
	}
	return sum, nil
}

// hardEviction is the memory below which the kubelet evicts. Its default comes
// from the kubelet's command, not from the configuration's defaults.
func hardEviction(kc *kubeletconfig.KubeletConfiguration) string {
	threshold, ok := kc.EvictionHard["memory.available"]
	if !ok && (kc.EvictionHard == nil || kc.MergeDefaultEvictionSettings) {
		return "100Mi"
	}
	return threshold
}
