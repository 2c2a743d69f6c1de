// SPDX-License-Identifier: Apache-2.0

// Stock grpc-go where its official programs have no case: long streams, keepalive, and servers that stop in order.
//
//	go-peer keepalive ADDRESS   a relay: prints "following", a catalog that is followed for 35 s, with a PING every 10 s, which is the
//	                            least that grpc-go allows
//	go-peer farewell ADDRESS    a relay: prints "streaming"; then it has to stop, and another to take its place
//	go-peer server              prints "listening ADDRESS"; "stop" on its standard input stops it in order, and another server
//	                            takes its place; ends with its standard input
//
// Clients print a line "ok - CASE" or "not ok - CASE: why" for each. INTEROP_TLS, a folder, has ca.pem, and client.pem and .key or
// server.pem and .key.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	testing "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/keepalive"
)

const (
	catalog = "/dynamo.kvrelay.v1.KvEventRelay/WatchKvPoolCatalog"
	info    = "/dynamo.kvrelay.v1.KvEventRelay/GetRelayInfo"
)

// The contract's marker as field 127 of a request.
var marker = []byte("\xfd\x071RVK")

// Messages as they are on the wire.
type raw struct{}

func (raw) Name() string                  { return "proto" }
func (raw) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }
func (raw) Unmarshal(b []byte, v any) error {
	*v.(*[]byte) = bytes.Clone(b)
	return nil
}

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return value
}

func file(name string) string { return filepath.Join(os.Getenv("INTEROP_TLS"), name) }

func secure(own string) credentials.TransportCredentials {
	if os.Getenv("INTEROP_TLS") == "" {
		return insecure.NewCredentials()
	}
	authorities := x509.NewCertPool()
	authorities.AppendCertsFromPEM(must(os.ReadFile(file("ca.pem"))))
	config := &tls.Config{RootCAs: authorities, ClientCAs: authorities}
	_, absent := os.Stat(file("client.pem"))
	if own == "server" || absent == nil {
		config.Certificates = []tls.Certificate{must(tls.LoadX509KeyPair(file(own+".pem"), file(own+".key")))}
	}
	if absent == nil {
		config.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return credentials.NewTLS(config)
}

// ---- clients ----

var failed bool

func say(name string, err error) {
	if err == nil {
		fmt.Printf("ok - %s\n", name)
		return
	}
	failed = true
	fmt.Printf("not ok - %s: %q\n", name, err.Error())
}

func dial(address string) *grpc.ClientConn {
	return must(grpc.NewClient(address, grpc.WithTransportCredentials(secure("client")),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{}), grpc.WaitForReady(true))))
}

// The catalog, once its first message has arrived.
func watch(ctx context.Context, conn *grpc.ClientConn) (grpc.ClientStream, error) {
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, catalog)
	if err != nil {
		return nil, err
	}
	var answer []byte
	request := append([]byte("\x0a\x07grpc-go"), marker...)
	if err = errors.Join(stream.SendMsg(&request), stream.CloseSend()); err == nil {
		err = stream.RecvMsg(&answer)
	}
	return stream, err
}

// How the stream ends, whatever comes before.
func end(stream grpc.ClientStream) error {
	for {
		var answer []byte
		if err := stream.RecvMsg(&answer); err != nil {
			return err
		}
	}
}

func followIdle(conn *grpc.ClientConn) {
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := watch(ctx, conn)
	time.AfterFunc(35*time.Second, cancel)
	if err == nil {
		fmt.Println("following")
		if err = end(stream); ctx.Err() != nil {
			err = nil // our own doing
		}
	}
	say("an idle stream with keepalive lasts", err)
}

func farewell(conn *grpc.ClientConn) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	stream, err := watch(ctx, conn)
	if err != nil {
		say("the catalog", err)
		return
	}
	var calls atomic.Int64
	var stop atomic.Bool
	worst := make(chan error, 1)
	go func() { // one call after the other, whatever happens to the server
		var err error
		for err == nil && !stop.Load() {
			var answer []byte
			if err = conn.Invoke(ctx, info, &marker, &answer); err == nil {
				calls.Add(1)
			}
		}
		worst <- err
	}()
	fmt.Println("streaming")
	if err = end(stream); err == io.EOF { // which is status OK
		err = nil
	}
	say("S44 the stream ends with OK", err)
	_, err = watch(ctx, conn)
	say("S44 the same channel finds the next relay", err)
	before := calls.Load()
	for err == nil && calls.Load() < before+1000 && len(worst) == 0 && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	stop.Store(true)
	err = <-worst
	if err == nil && calls.Load() < 1000 {
		err = fmt.Errorf("%d calls", calls.Load())
	}
	say("S44 no call fails meanwhile", err)
}

// ---- server ----

type service struct {
	testing.UnimplementedTestServiceServer
}

func (service) EmptyCall(context.Context, *testing.Empty) (*testing.Empty, error) {
	return &testing.Empty{}, nil
}

func (service) FullDuplexCall(stream testing.TestService_FullDuplexCallServer) error {
	for {
		request, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for _, p := range request.ResponseParameters {
			payload := &testing.Payload{Body: make([]byte, p.Size)}
			if err := stream.Send(&testing.StreamingOutputCallResponse{Payload: payload}); err != nil {
				return err
			}
		}
	}
}

func start(address string) (*grpc.Server, string) {
	listener := must(net.Listen("tcp", address))
	server := grpc.NewServer(grpc.Creds(secure("server")))
	testing.RegisterTestServiceServer(server, service{})
	go func() { _ = server.Serve(listener) }()
	return server, listener.Addr().String()
}

func serve() {
	server, address := start("127.0.0.1:0")
	fmt.Println("listening", address)
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		go server.GracefulStop()
		for { // until the port is free
			if c, err := net.DialTimeout("tcp", address, time.Second); err != nil {
				break
			} else {
				_ = c.Close()
			}
		}
		server, _ = start(address)
	}
}

func main() {
	switch {
	case len(os.Args) == 3 && os.Args[1] == "keepalive":
		followIdle(dial(os.Args[2]))
	case len(os.Args) == 3 && os.Args[1] == "farewell":
		farewell(dial(os.Args[2]))
	case len(os.Args) == 2 && os.Args[1] == "server":
		serve()
	default:
		fmt.Fprintln(os.Stderr, "usage: go-peer keepalive|farewell ADDRESS | go-peer server")
		os.Exit(2)
	}
	if failed {
		os.Exit(1)
	}
}
