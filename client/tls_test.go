package client

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/test/bufconn"

	"github.com/perdure-dev/perdure/internal/mux"
	"github.com/perdure-dev/perdure/internal/wire"
)

// TestTLS: with the right authority a call goes through, the key with it.
func TestTLS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"perdure.test"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{t: t, lis: bufconn.Listen(1 << 20), onCall: echo}
	f.server = grpc.NewServer(grpc.ForceServerCodecV2(mux.Codec{}), grpc.Creds(credentials.NewServerTLSFromCert(&tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key})))
	wire.RegisterFlowsServer(f.server, f)
	go f.server.Serve(f.lis)
	t.Cleanup(f.server.Stop)

	trusted := x509.NewCertPool()
	trusted.AddCert(cert)
	c := f.client(Options{Key: "good", TLS: &tls.Config{ServerName: "perdure.test", RootCAs: trusted}})
	if got, err := c.RPC(background(t), "f", "r", 7, RPCOptions{}); err != nil || string(got) != "7" {
		t.Errorf("%s, %v", got, err)
	}
	if _, err := Dial(background(t), Options{Address: "fake", Dialer: f.dial, Patience: -1, TLS: &tls.Config{ServerName: "perdure.test"}}); err == nil {
		t.Error("a certificate of nobody known was taken")
	}
}
