package sim

// source is a seeded stream of random numbers (splitmix64). It is an env.Rand
// for one goroutine.
type source struct{ state uint64 }

func (s *source) Uint64() uint64 {
	s.state += 0x9e3779b97f4a7c15
	return mix(s.state)
}

// mix scatters the bits of v.
func mix(v uint64) uint64 {
	v = (v ^ v>>30) * 0xbf58476d1ce4e5b9
	v = (v ^ v>>27) * 0x94d049bb133111eb
	return v ^ v>>31
}

// fork gives a stream of its own, so that what one actor draws does not move
// what the others draw.
func (s *source) fork() *source { return &source{s.Uint64()} }

// intn gives 0 to n-1.
func (s *source) intn(n int) int { return int(s.Uint64() % uint64(n)) }

// percent is true in p of 100 cases.
func (s *source) percent(p int) bool { return s.intn(100) < p }

// between gives lo to hi, both included.
func (s *source) between(lo, hi int64) int64 { return lo + int64(s.Uint64()%uint64(hi-lo+1)) }

// pick gives one of the values.
func pick[T any](s *source, of ...T) T { return of[s.intn(len(of))] }
