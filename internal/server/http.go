package server

import (
	"net/http"
)

func (s *Server) httpServer() *http.Server {
	return &http.Server{}
}
