//go:build !plant_ack_early

package objectlog

// plantAckEarly acknowledges a frame when its PUT begins, before it is durable: a mistake that the
// checkers must find when a test is built with the tag plant_ack_early.
const plantAckEarly = false
