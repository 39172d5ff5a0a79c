// kubelet is a node without a machine: the kubelet's own managers and servers,
// unmodified, over a described machine, with no containers and no API server.
//
// It is driven by JSON lines, one object each. A request has an "op" and an
// "id"; requests run side by side, and every answer repeats its id. The first
// line it prints says that it is ready, or why not. When standard input ends it
// stops and removes its directory, so that nothing outlives the tests.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"k8s.io/klog/v2"
)

func main() {
	dir := flag.String("dir", "", "directory with machine.json and kubelet/config.yaml; keep it short, Unix socket paths end at 107 bytes")
	rateLimit := flag.Bool("rate-limit", true, "limit PodResources to the kubelet's 100 calls a second")
	klog.InitFlags(nil)
	flag.Parse()

	out := &answers{to: os.Stdout}
	node, err := start(*dir, *rateLimit)
	if err != nil {
		out.write(map[string]any{"error": err.Error()})
		os.Exit(1)
	}
	out.write(map[string]any{"ready": true})
	serve(node, os.Stdin, out)
	node.stop()
	klog.Flush()
	_ = os.RemoveAll(*dir)
}

func start(dir string, rateLimit bool) (*Node, error) {
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("-dir must be an absolute path, not %q", dir)
	}
	log, err := os.OpenFile(filepath.Join(dir, "kubelet.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	klog.LogToStderr(false)
	_ = flag.Set("stderrthreshold", "FATAL")
	klog.SetOutput(log)
	node, err := newNode(dir, rateLimit)
	if err != nil {
		return nil, err
	}
	// A directory that has pods in it was left by a kubelet that was killed:
	// to the pods that is a restart.
	_, err = node.start(true, false)
	return node, err
}

func serve(node *Node, in io.Reader, out *answers) {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		line := append([]byte{}, lines.Bytes()...)
		go func() { out.write(answer(node, line)) }()
	}
}

func answer(node *Node, line []byte) map[string]any {
	var r request
	err := json.Unmarshal(line, &r)
	var result any
	if err == nil {
		result, err = node.do(&r)
	}
	klog.Flush()
	if err != nil {
		return map[string]any{"id": r.ID, "error": err.Error()}
	}
	return map[string]any{"id": r.ID, "result": result}
}

// answers writes one line at a time.
type answers struct {
	mu sync.Mutex
	to io.Writer
}

func (a *answers) write(v map[string]any) {
	b, err := json.Marshal(v)
	if err != nil {
		b, _ = json.Marshal(map[string]any{"id": v["id"], "error": err.Error()})
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	_, _ = a.to.Write(append(b, '\n'))
}
