package objectlog

import (
	"fmt"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/env"
)

// handClock is moved by hand; it has one timer at most for each AfterFunc.
type handClock struct {
	now    time.Time
	timers []*handTimer
}

type handTimer struct {
	at   time.Time
	f    func()
	over bool
}

func (c *handClock) Now() time.Time { return c.now }

func (c *handClock) AfterFunc(d time.Duration, f func()) env.Timer {
	t := &handTimer{at: c.now.Add(d), f: f}
	c.timers = append(c.timers, t)
	return t
}

func (t *handTimer) Stop() bool { was := !t.over; t.over = true; return was }

// pass lets d pass and runs what is due, in order.
func (c *handClock) pass(d time.Duration) {
	end := c.now.Add(d)
	for {
		var next *handTimer
		for _, t := range c.timers {
			if !t.over && !t.at.After(end) && (next == nil || t.at.Before(next.at)) {
				next = t
			}
		}
		if next == nil {
			c.now = end
			return
		}
		c.now, next.over = next.at, true
		next.f()
	}
}

func newHandClock() *handClock { return &handClock{now: time.Unix(1e9, 0)} }

// TestBudgetIsFair: three logs that always want to write share 40 PUTs a second
// equally, and get no more.
func TestBudgetIsFair(t *testing.T) {
	clock := newHandClock()
	b := NewBudget(clock, 40)
	var puts [3]int
	claims := make([]*claim, len(puts))
	for i := range claims {
		claims[i] = &claim{}
		claims[i].granted = func() {
			for b.ask(claims[i]) {
				b.spend(claims[i])
				puts[i]++
			}
		}
		claims[i].granted()
	}
	clock.pass(10 * time.Second)
	if sum := puts[0] + puts[1] + puts[2]; sum < 400 || sum > 405 {
		t.Errorf("%d PUTs in 10 s", sum)
	}
	for _, n := range puts {
		if n < 130 || n > 140 {
			t.Errorf("shares %v", puts)
		}
	}
}

func TestBudgetIsInOrder(t *testing.T) {
	clock := newHandClock()
	b := NewBudget(clock, 1)
	var got []string
	logs := map[string]*claim{}
	for _, name := range []string{"a", "b", "c", "d"} {
		c := &claim{granted: func() { got = append(got, name) }}
		logs[name] = c
		if b.ask(c) != (name == "a") {
			t.Fatal(name)
		}
	}
	if b.ask(logs["b"]) || !b.ask(logs["a"]) {
		t.Fatal("asking again changed something")
	}
	b.leave(logs["c"])
	clock.pass(2500 * time.Millisecond)
	if fmt.Sprint(got) != "[b d]" {
		t.Fatal(got)
	}
	// A repetition is paid for afterwards, up to a second of debt.
	for _, name := range []string{"a", "b", "d"} {
		b.spend(logs[name])
	}
	for range 100 {
		b.repeated()
	}
	got = nil
	b.ask(logs["d"])
	clock.pass(900 * time.Millisecond)
	if len(got) != 0 {
		t.Fatal("the debt was forgotten")
	}
	clock.pass(200 * time.Millisecond)
	if fmt.Sprint(got) != "[d]" {
		t.Fatal(got)
	}
}
