package session

import "context"

// Notify makes the watcher call fn each time that Poll may have something to
// give, at once when it has. fn may be called on any goroutine, also on those
// that publish, so it must not block nor call the watcher. Next is not for a
// watcher that notifies.
func (w *Watcher) Notify(fn func()) {
	w.sub.Notify(fn)
	if w.replay || len(w.early) > 0 || len(w.held) > 0 || w.ended {
		fn()
	}
}

// Poll is Next without the wait for what has not happened yet: it gives no
// events and no error when nothing is there. ctx bounds reading the log.
func (w *Watcher) Poll(ctx context.Context) ([]Event, error) {
	if len(w.early) > 0 {
		out := w.early
		w.early = nil
		return out, nil
	}
	for !w.ended {
		if !w.replay && len(w.held) == 0 && !w.sub.Ready() {
			return nil, nil
		}
		out, err := w.more(ctx)
		if err != nil || len(out) > 0 {
			return out, err
		}
	}
	return nil, ErrEnded
}
