package env

import (
	"slices"
	"testing"
)

func TestConstantPages(t *testing.T) {
	const exe = "/usr/bin/perdure"
	for line, want := range map[string]bool{
		"00400000-010b3000 r-xp 00000000 fe:00 1234      /usr/bin/perdure\n": true,
		"010b3000-01ecf000 r--p 00cb3000 fe:00 1234      /usr/bin/perdure\n": true,
		"01ecf000-01f80000 rw-p 01acf000 fe:00 1234      /usr/bin/perdure\n": false, // data: its pages are the only ones
		"010b3000-01ecf000 r--p 00cb3000 fe:00 1234      /usr/bin/other\n":   false,
		"01f80000-03fcd000 r--p 00000000 00:00 0 \n":                         false,
		"01ecf000-010b3000 r--p 00cb3000 fe:00 1234      /usr/bin/perdure\n": false,
		"x-010b3000 r--p 00cb3000 fe:00 1234 /usr/bin/perdure\n":             false,
		"": false,
	} {
		if _, _, ok := constantPages([]byte(line), exe); ok != want {
			t.Errorf("%q: %v", line, ok)
		}
	}
	if from, to, ok := constantPages([]byte("00400000-010b3000 r-xp 00000000 fe:00 1 /usr/bin/perdure\n"), exe); !ok || from != 0x400000 || to != 0x10b3000 {
		t.Errorf("%x-%x %v", from, to, ok)
	}
}

func TestConstantMappings(t *testing.T) {
	smaps := "00400000-010b3000 r-xp 00000000 fe:00 1234      /usr/bin/perdure\nSize: 4 kB\nAnonymous:            0 kB\nVmFlags: rd ex\n" +
		"010b3000-01ecf000 r--p 00cb3000 fe:00 1234      /usr/bin/perdure\nSize: 4 kB\nAnonymous:            8 kB\n" + // relocated, then protected
		"01ecf000-01f80000 rw-p 01acf000 fe:00 1234      /usr/bin/perdure\nAnonymous:            0 kB\n" +
		"02000000-02010000 r--p 00cb3000 fe:00 1234      /usr/bin/perdure\nAnonymous:            0 kB\n" +
		"03000000-03010000 r--p 00cb3000 fe:00 1234      /usr/bin/perdure\nSize: 4 kB\n"
	got := constantMappings([]byte(smaps), "/usr/bin/perdure")
	if want := []mapping{{0x400000, 0x10b3000}, {0x2000000, 0x2010000}}; !slices.Equal(got, want) {
		t.Errorf("%x, want %x", got, want)
	}
}

// TestDropCode: the program runs on, and has what it had.
func TestDropCode(t *testing.T) {
	if n := DropCode(); n == 0 {
		t.Error("nothing was dropped")
	}
	if len(t.Name()) == 0 {
		t.Error("constants are gone")
	}
}
