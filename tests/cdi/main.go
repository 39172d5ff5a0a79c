// cdi says what a container runtime would make of the CDI specifications in
// folders: the CDI project's own library, with the folders in rising priority.
// It prints one JSON object.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"tags.cncf.io/container-device-interface/pkg/cdi"
)

type spec struct {
	Version string `json:"version"`
	// The lowest version that has all that the specification uses.
	Lowest string `json:"lowest"`
}

type answer struct {
	Devices []string            `json:"devices"`
	Specs   map[string]spec     `json:"specs"`
	Errors  map[string][]string `json:"errors"`
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: cdi FOLDER...")
		os.Exit(2)
	}
	found, err := read(os.Args[1:])
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(found)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cdi:", err)
		os.Exit(1)
	}
}

func read(folders []string) (*answer, error) {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(folders...), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, err
	}
	_ = cache.Refresh() // what is wrong is in GetErrors, by file
	found := &answer{
		Devices: append([]string{}, cache.ListDevices()...),
		Specs:   map[string]spec{},
		Errors:  map[string][]string{},
	}
	for _, vendor := range cache.ListVendors() {
		for _, each := range cache.GetVendorSpecs(vendor) {
			lowest, err := cdi.MinimumRequiredVersion(each.Spec)
			if err != nil {
				return nil, err
			}
			found.Specs[each.GetPath()] = spec{Version: each.Version, Lowest: lowest}
		}
	}
	for path, errs := range cache.GetErrors() {
		for _, err := range errs {
			found.Errors[path] = append(found.Errors[path], err.Error())
		}
	}
	return found, nil
}
