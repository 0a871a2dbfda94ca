// Package bench measures the durable engine as its users meet it: a server, a
// worker and a client, each a process of its own on this machine, each on the
// public packages only. `perdure bench` starts all three, unless it is pointed
// at a server.
//
// How a point is measured:
//
//   - Each run has a fresh server on a fresh folder. A point is the run with the
//     median throughput (open loop: the median p50), with all its figures, so
//     that they belong together.
//   - A closed loop keeps N operations in flight, an open loop starts them at a
//     steady rate; there latency counts from the intended start. What a unit and
//     its latency are is said by the scenario.
//   - The window begins after the warm-up. CPU is that of each process in the
//     window, by the units of the window; memory is the highest of the window.
//   - Journal batches and bytes are deltas of the server's own metrics.
//
// hist.go, loop.go and process.go need the standard library only: the drivers in
// bench/peers are built with the same files, so that the same code measures the
// peers.
package bench
