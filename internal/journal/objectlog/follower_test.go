package objectlog

import (
	"context"
	"errors"
	"testing"

	"github.com/perdure-dev/perdure/internal/blob"
	"github.com/perdure-dev/perdure/internal/env"
	"github.com/perdure-dev/perdure/internal/journal"
)

// TestFollowerLooksAtTheHead: what a follower finds below the head is neither
// taken for the log nor for damage.
func TestFollowerLooksAtTheHead(t *testing.T) {
	errHead := errors.New("no manifest")
	type objects = map[uint64][]byte
	misfit := frameAt(2, 3, 3) // of a lower epoch
	for name, c := range map[string]struct {
		there    objects // behind two frames of epoch 3
		seq, lsn uint64  // of the head
		head     error
		want     error
		frames   int // delivered behind those two
	}{
		"nothing new":                {nil, 1, 1, nil, nil, 0},
		"trimmed, but it has all":    {objects{7: frameAt(5, 7, 3)}, 7, 3, nil, nil, 1},
		"trimmed beyond":             {objects{7: frameAt(5, 7, 4)}, 7, 4, nil, ErrTrimmed, 0},
		"no manifest":                {nil, 7, 3, errHead, errHead, 0},
		"a leftover, and it has all": {objects{3: misfit, 7: frameAt(5, 7, 3)}, 7, 3, nil, nil, 1},
		"a leftover, trimmed beyond": {objects{3: misfit, 7: frameAt(5, 7, 4)}, 7, 4, nil, ErrTrimmed, 0},
		"damage":                     {objects{3: misfit}, 3, 3, nil, ErrCorrupt, 0},
		"damage, no manifest":        {objects{3: misfit}, 3, 3, errHead, errHead, 0},
		// It froze before its seal at 3; frame 3 was trimmed meanwhile, and the
		// successor's seal is at 4.
		"a seal of a taker that froze": {objects{3: sealAt(4, 3), 4: sealAt(5, 4), 8: frameAt(5, 8, 3)}, 4, 3, nil, nil, 1},
	} {
		if c.there == nil {
			c.there = objects{}
		}
		c.there[1], c.there[2] = frameAt(3, 1, 1), frameAt(3, 2, 2)
		f := NewFollower(FollowerOptions{Store: blobOf(t, c.there), Prefix: testPrefix, HeadSeq: 1, HeadLSN: 1, Clock: env.SystemClock{},
			Head: func(context.Context) (uint64, uint64, error) { return c.seq, c.lsn, c.head }})
		frames := 0
		var err error
		for range 2 * headEvery {
			if _, err = f.Next(t.Context(), func(journal.Frame) error { frames++; return nil }); err != nil {
				break
			}
		}
		if !errors.Is(err, c.want) || frames != 2+c.frames {
			t.Errorf("%s: %d frames, %v", name, frames, err)
		}
	}
}

func TestFollowerGoesOnAfterErrors(t *testing.T) {
	broken := false
	store := blob.NewFaulty(blobOf(t, map[uint64][]byte{1: frameAt(3, 1, 1), 2: frameAt(3, 2, 2)}), func(blob.Op) blob.Fault {
		if broken {
			return blob.Fault{Outcome: blob.Refused}
		}
		return blob.Fault{}
	}, blob.FaultHooks{})
	f := NewFollower(FollowerOptions{Store: store, Prefix: testPrefix, HeadSeq: 1, HeadLSN: 1, Head: newManifest().head, Clock: env.SystemClock{}})
	var got []uint64
	refuse := errors.New("the tables are full")
	deliver := func(fr journal.Frame) error {
		if fr.Seq == 2 && len(got) == 1 && refuse != nil {
			return refuse
		}
		got = append(got, fr.Seq)
		return nil
	}
	if n, err := f.Next(t.Context(), deliver); n != 1 || !errors.Is(err, refuse) {
		t.Fatal(n, err)
	}
	broken = true
	if n, err := f.Next(t.Context(), deliver); n != 0 || !errors.Is(err, blob.ErrUnavailable) {
		t.Fatal(n, err)
	}
	broken, refuse = false, nil
	if n, err := f.Next(t.Context(), deliver); n != 1 || err != nil || len(got) != 2 {
		t.Fatal(n, err, got)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.Next(ended, deliver); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if seq, lsn := f.Place(); seq != 3 || lsn != 3 || f.Gets() == 0 {
		t.Fatal(seq, lsn, f.Gets())
	}
}
