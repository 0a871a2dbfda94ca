package partition

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestTimersAgainstAList: what the heap gives is what was set and not taken back,
// in order, and it holds at most about twice that.
func TestTimersAgainstAList(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var h timerHeap
	var list []timer
	now := int64(0)
	most := 0
	for i := range 60_000 {
		roll := rnd.IntN(5)
		if grows := i/10_000%2 == 0; grows && roll < 3 || !grows && roll == 0 {
			roll = 0
		} else if roll < 4 {
			roll = 1
		}
		switch roll {
		case 0:
			tm := timer{now + 1 + rnd.Int64N(200_000), fmt.Sprint("f", rnd.IntN(20)), rnd.Uint64N(3)}
			if rnd.IntN(3) == 0 && len(list) > 0 {
				tm = list[rnd.IntN(len(list))] // once more
			}
			h.add(tm.atUs, tm.flowID, tm.exec)
			list = append(list, tm)
		case 1:
			if len(list) == 0 {
				continue
			}
			i := rnd.IntN(len(list))
			tm := list[i]
			list = slices.Delete(list, i, i+1)
			h.clear(tm.atUs, tm.flowID, tm.exec, now)
		default:
			now += rnd.Int64N(4)
			for {
				tm, ok := h.first()
				if !ok || tm.atUs > now {
					break
				}
				got := h.pop()
				i := slices.Index(list, got)
				if i < 0 {
					t.Fatalf("%v fires, and is not set", got)
				}
				list = slices.Delete(list, i, i+1)
			}
			if slices.ContainsFunc(list, func(tm timer) bool { return tm.atUs <= now }) {
				t.Fatal("a timer that is due has not fired")
			}
		}
		most = max(most, len(list))
		if len(h.h) > 2*len(list)+2*minDead || len(h.h)-h.nDead != len(list) {
			t.Fatalf("%d timers kept, %d taken back, %d are set", len(h.h), h.nDead, len(list))
		}
	}
	if most < 3000 {
		t.Errorf("only %d timers at a time", most)
	}
}
