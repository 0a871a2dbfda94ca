package server

import (
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
)

// serveAdmin answers with profiles on the admin address: never on the API's,
// since a profile shows memory of every tenant.
func (s *Server) serveAdmin() (stop func(), err error) {
	if s.cfg.AdminListen == "" {
		return func() {}, nil
	}
	l, err := net.Listen("tcp", s.cfg.AdminListen)
	if err != nil {
		return nil, fmt.Errorf("admin_listen: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	mux.Handle("/metrics", s.metrics.handler())
	hs := &http.Server{Handler: mux, ReadHeaderTimeout: s.cfg.Limits.ReadHeaderTimeout}
	go func() { _ = hs.Serve(l) }() // ends with Close
	s.log.Info("admin", "url", "http://"+l.Addr().String()+"/debug/pprof/")
	return func() { _ = hs.Close() }, nil
}
