// protocols writes the kubelet's protocols, as the Go modules of this module's
// Kubernetes have them, to standard output: a FileDescriptorSet.
package main

import (
	"log"
	"os"
	"reflect"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	v1 "k8s.io/api/core/v1"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	pods "k8s.io/kubelet/pkg/apis/pods/v1alpha1"
)

func main() {
	set := &descriptorpb.FileDescriptorSet{}
	for _, m := range []protoreflect.ProtoMessage{
		&deviceplugin.Device{}, &pluginregistration.PluginInfo{}, &podresources.PodResources{},
		&pods.WatchPodsEvent{},
	} {
		file := m.ProtoReflect().Descriptor().ParentFile()
		set.File = append(set.File, protodesc.ToFileDescriptorProto(file))
	}
	set.File = append(set.File, described(reflect.TypeFor[v1.Pod](), "k8s.io.api.core.v1"))
	b, err := proto.Marshal(set)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := os.Stdout.Write(b); err != nil {
		log.Fatal(err)
	}
}
