//go:build plant_ack_early

package objectlog

const plantAckEarly = true
