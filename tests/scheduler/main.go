// scheduler is a real kube-scheduler that also has the NodeResourceTopologyMatch
// plugin of scheduler-plugins. It is a module of its own, as that plugin has not
// come to the Kubernetes release of the other programs yet.
//
// Its arguments are kube-scheduler's own. When standard input ends it ends, so
// that nothing outlives the tests.
package main

import (
	"bufio"
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"

	_ "sigs.k8s.io/scheduler-plugins/apis/config/scheme"
	"sigs.k8s.io/scheduler-plugins/pkg/noderesourcetopology"
)

func main() {
	go func() {
		in := bufio.NewReader(os.Stdin)
		for err := error(nil); err == nil; _, err = in.ReadByte() {
		}
		os.Exit(0)
	}()
	command := app.NewSchedulerCommand(
		app.WithPlugin(noderesourcetopology.Name, noderesourcetopology.New))
	os.Exit(cli.Run(command))
}
