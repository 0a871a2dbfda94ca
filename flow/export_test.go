package flow

import "time"

// SetPace makes a worker look at its streams this often. It opens one after hot
// looks at which all were writing for the share busy of the time, and gives one
// back after cold looks at which fewer would have done; after one that was lost
// it rests.
func SetPace(w *Worker, look time.Duration, busy float64, hot, cold, rest int) {
	w.pace = pace{look: look, busy: busy, idle: usualPace.idle, hot: hot, cold: cold, rest: rest}
}
