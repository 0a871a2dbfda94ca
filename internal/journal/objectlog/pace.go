package objectlog

import "time"

const (
	// usefulLatency is the PUT latency that one more frame in flight hides:
	// below it, a PUT costs more CPU than the wait for the last one.
	usefulLatency = 8 * time.Millisecond
	// maxLatency bounds the smoothed latency, and so the distance of two PUTs,
	// after an outage.
	maxLatency = time.Second
)

// pace decides from the latency of PUTs how many should be in flight and how
// far apart they start.
type pace struct{ latency time.Duration }

// sample takes a PUT's time in: an eighth of it counts. A single long one
// counts as four times the latency so far, no more.
func (p *pace) sample(d time.Duration) {
	if p.latency == 0 {
		p.latency = max(1, min(d, maxLatency))
		return
	}
	d = min(d, max(4*p.latency, usefulLatency))
	p.latency = max(1, min(p.latency+(d-p.latency)/8, maxLatency))
}

// window is how many frames to have in flight, 1 to most.
func (p *pace) window(most int) int {
	return max(1, min(int((p.latency+usefulLatency-1)/usefulLatency), most))
}

// gap is the least time between the starts of two frames, so that n of them
// spread over the latency. An eighth less than their even share, because a
// start that waits for a timer is late already; with the window full, answers
// set the pace.
func (p *pace) gap(n int) time.Duration { return p.latency / time.Duration(n) / 8 * 7 }
