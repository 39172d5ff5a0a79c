// kustomize prints what `kubectl apply -k FOLDER` would send: kubectl's own
// library with kubectl's options.
package main

import (
	"fmt"
	"os"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: kustomize FOLDER")
		os.Exit(2)
	}
	if err := render(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "kustomize:", err)
		os.Exit(1)
	}
}

func render(folder string) error {
	kustomizer := krusty.MakeKustomizer(krusty.MakeDefaultOptions())
	objects, err := kustomizer.Run(filesys.MakeFsOnDisk(), folder)
	if err != nil {
		return err
	}
	text, err := objects.AsYaml()
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(text)
	return err
}
