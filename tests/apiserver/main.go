// apiserver is a cluster without nodes: a real kube-apiserver and the etcd it
// needs, in one process on the loopback device.
//
// When it is ready it prints one JSON line that says how to reach it; when
// standard input ends it removes its directory and ends, so that nothing
// outlives the tests. Its arguments are kube-apiserver's own. No controllers
// run: no namespace gets a service account by itself, nothing is garbage
// collected, and a pod is in the phase that a test gives it.
package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/server/v3/embed"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/client-go/rest"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
)

// patience is generous: a machine busy with builds may take its time.
const patience = 2 * time.Minute

func main() {
	dir, err := os.MkdirTemp("", "rte-apiserver-")
	if err == nil {
		err = run(dir, os.Args[1:])
		_ = os.RemoveAll(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "apiserver:", err)
		os.Exit(1)
	}
}

func run(dir string, args []string) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	inputEnded := make(chan struct{})
	go func() {
		in := bufio.NewReader(os.Stdin)
		for err := error(nil); err == nil; _, err = in.ReadByte() {
		}
		close(inputEnded)
	}()

	if err := startEtcd(dir); err != nil {
		return err
	}
	// The port is known before anything is started, and nobody can take it.
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	token := rand.Text()
	server, err := configure(ctx, dir, token, listener, args)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- app.Run(ctx, server) }()

	reach := reach{URL: "https://" + listener.Addr().String(), CA: filepath.Join(dir, "apiserver.crt"),
		Token: token, Kubeconfig: filepath.Join(dir, "kubeconfig")}
	if err := os.WriteFile(reach.Kubeconfig, reach.kubeconfig(), 0o600); err != nil {
		return err
	}
	if err := reach.awaitReady(ended); err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(reach); err != nil {
		return err
	}
	select {
	case <-inputEnded:
		// Nobody needs the data, and a graceful end takes seconds: the process
		// just ends, its folder removed under it.
		return nil
	case err := <-ended:
		return err
	}
}

// startEtcd runs the only member of an etcd that nothing but the API server
// can reach and that never waits for a disk.
func startEtcd(dir string) error {
	c := embed.NewConfig()
	c.Dir = filepath.Join(dir, "etcd")
	socket := func(name string) []url.URL { return []url.URL{{Scheme: "unix", Path: filepath.Join(dir, name)}} }
	c.ListenClientUrls, c.AdvertiseClientUrls = socket("etcd.sock"), socket("etcd.sock")
	c.ListenPeerUrls, c.AdvertisePeerUrls = socket("peer.sock"), socket("peer.sock")
	c.InitialCluster = c.InitialClusterFromName(c.Name)
	c.LogLevel = "error"
	c.UnsafeNoFsync = true
	e, err := embed.StartEtcd(c)
	if err != nil {
		return err
	}
	select {
	case <-e.Server.ReadyNotify():
		return nil
	case err := <-e.Err():
		return err
	case <-time.After(patience):
		return errors.New("etcd did not become ready")
	}
}

func configure(ctx context.Context, dir, token string, listener net.Listener, args []string) (options.CompletedOptions, error) {
	var none options.CompletedOptions
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return none, err
	}
	keyFile, tokenFile := filepath.Join(dir, "service-account.key"), filepath.Join(dir, "tokens.csv")
	block := &pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}
	if err := os.WriteFile(keyFile, pem.EncodeToMemory(block), 0o600); err != nil {
		return none, err
	}
	if err := os.WriteFile(tokenFile, []byte(token+",admin,admin,system:masters\n"), 0o600); err != nil {
		return none, err
	}
	o := options.NewServerRunOptions()
	flags := pflag.NewFlagSet("kube-apiserver", pflag.ContinueOnError)
	for _, set := range o.Flags().FlagSets {
		flags.AddFlagSet(set)
	}
	err = flags.Parse(append([]string{
		"--etcd-servers=unix://" + filepath.Join(dir, "etcd.sock"),
		"--advertise-address=127.0.0.1",
		"--cert-dir=" + dir, // where it puts the certificate that it makes for itself
		"--token-auth-file=" + tokenFile,
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + keyFile,
		"--service-account-signing-key-file=" + keyFile,
		"--service-cluster-ip-range=10.0.0.0/24",
		"--endpoint-reconciler-type=none",
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		// Each of these asks for something that only a controller makes.
		"--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
		"--allow-privileged=true",
	}, args...))
	if err != nil {
		return none, err
	}
	o.SecureServing.Listener = listener
	o.SecureServing.BindAddress = listener.Addr().(*net.TCPAddr).IP
	o.SecureServing.BindPort = listener.Addr().(*net.TCPAddr).Port
	if err := o.GenericServerRunOptions.ComponentGlobalsRegistry.Set(); err != nil {
		return none, err
	}
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	completed, err := o.Complete(ctx)
	if err != nil {
		return none, err
	}
	return completed, utilerrors.NewAggregate(completed.Validate())
}

// reach is how the cluster can be reached.
type reach struct {
	URL        string `json:"url"`
	CA         string `json:"ca"`
	Token      string `json:"token"` // of a member of system:masters
	Kubeconfig string `json:"kubeconfig"`
}

func (r reach) kubeconfig() []byte {
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: test
clusters: [{name: test, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: admin, user: {token: %q}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
`, r.URL, r.CA, r.Token)
}

func (r reach) awaitReady(ended chan error) error {
	// The certificate is not looked at: it does not exist yet at the first try.
	client := &http.Client{Timeout: time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	defer client.CloseIdleConnections()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		select {
		case err := <-ended:
			return fmt.Errorf("ended before it was ready: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
		request, err := http.NewRequest(http.MethodGet, r.URL+"/readyz", nil)
		if err != nil {
			return err
		}
		request.Header.Set("Authorization", "Bearer "+r.Token)
		if answer, err := client.Do(request); err == nil {
			_ = answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return nil
			}
		}
	}
	return errors.New("did not become ready")
}
