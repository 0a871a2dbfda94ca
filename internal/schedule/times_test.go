package schedule

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/robfig/cron/v3"
)

// nextOf gives the instants after one, as clocks of the zone show them.
func nextOf(t *testing.T, expr, zone, after string, n int) (out []string) {
	t.Helper()
	times, err := ParseTimes(expr, zone)
	if err != nil {
		t.Fatal(err)
	}
	at, err := time.Parse(time.RFC3339, after)
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		next := times.Next(at)
		if next.IsZero() {
			return append(out, "never")
		}
		if !next.After(at) || next.Nanosecond() != 0 {
			t.Fatalf("%s: %v follows %v", expr, next, at)
		}
		at = next
		out = append(out, at.In(times.zone).Format("01-02T15:04:05-07"))
	}
	return out
}

func TestNextInstants(t *testing.T) {
	for _, c := range []struct{ expr, zone, after, want string }{
		{"*/20 * * * *", "", "2026-12-01T10:20:00Z", "12-01T10:40:00+00 12-01T11:00:00+00 12-01T11:20:00+00"},
		{"0 3 * * *", "Europe/Berlin", "2026-12-01T01:59:59Z", "12-01T03:00:00+01 12-02T03:00:00+01"},
		{"0 9 * * mon-fri", "", "2026-12-04T09:00:00Z", "12-07T09:00:00+00 12-08T09:00:00+00"},
		{"30 1 13 * 5", "", "2026-11-01T00:00:00Z", "11-06T01:30:00+00 11-13T01:30:00+00 11-20T01:30:00+00"}, // either day
		{"0 0 29 2 *", "", "2026-12-01T00:00:00Z", "02-29T00:00:00+00 02-29T00:00:00+00"},
		{"0 0 31 */2 *", "", "2026-12-01T00:00:00Z", "01-31T00:00:00+00 03-31T00:00:00+00 05-31T00:00:00+00 07-31T00:00:00+00 01-31T00:00:00+00"},
		{"@daily", "Asia/Kolkata", "2026-12-01T00:00:00Z", "12-02T00:00:00+05"},
		{"@monthly", "", "2026-12-01T00:00:00Z", "01-01T00:00:00+00"},
		{"@every 10m", "Asia/Kolkata", "2026-12-01T10:09:59Z", "12-01T15:40:00+05 12-01T15:50:00+05"},
		{"@every 1h30m", "", "1969-12-31T23:00:00Z", "01-01T00:00:00+00 01-01T01:30:00+00"},
		// Clocks go forward at 02:00 to 03:00.
		{"30 2 * * *", "America/New_York", "2026-03-07T12:00:00Z", "03-08T03:00:00-04 03-09T02:30:00-04"},
		{"0,30 2 * * *", "America/New_York", "2026-03-07T12:00:00Z", "03-08T03:00:00-04 03-09T02:00:00-04"},
		{"30 * * * *", "America/New_York", "2026-03-08T06:00:00Z", "03-08T01:30:00-05 03-08T03:30:00-04"},
		{"0 3 * * *", "America/New_York", "2026-03-07T12:00:00Z", "03-08T03:00:00-04 03-09T03:00:00-04"},
		// Clocks go back at 02:00 to 01:00.
		{"30 1 * * *", "America/New_York", "2026-10-31T12:00:00Z", "11-01T01:30:00-04 11-02T01:30:00-05"},
		{"30 * * * *", "America/New_York", "2026-11-01T04:00:00Z", "11-01T00:30:00-04 11-01T01:30:00-04 11-01T01:30:00-05 11-01T02:30:00-05"},
		{"30 1 * * *", "America/New_York", "2026-11-01T05:45:00Z", "11-02T01:30:00-05"}, // between the two
		{"0 0 * * *", "America/Santiago", "2026-09-05T12:00:00Z", "09-06T01:00:00-03 09-07T00:00:00-03"},
		{"15 2 * * *", "Australia/Lord_Howe", "2026-10-03T00:00:00Z", "10-04T02:30:00+11 10-05T02:15:00+11"}, // half an hour
	} {
		want := strings.Fields(c.want)
		if got := nextOf(t, c.expr, c.zone, c.after, len(want)); !slices.Equal(got, want) {
			t.Errorf("%s in %s after %s:\n got %q\nwant %q", c.expr, c.zone, c.after, got, want)
		}
	}
}

// Away from changes of the clock, instants are those of the library whose
// parser is used.
func TestNextIsThatOfTheParser(t *testing.T) {
	parser := cron.NewParser(parseFields)
	for _, expr := range []string{
		"* * * * *", "*/7 3-5 * * *", "0 12 1,15 * *", "5 4 * * sun", "0 0 1 1 *", "59 23 31 12 *", "0 22 * * 1-5", "0-10/5 */6 * 2-4 *", "1 1 10 * 1", "@weekly", "@hourly",
	} {
		ours, err := ParseTimes(expr, "")
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := parser.Parse(expr)
		if err != nil {
			t.Fatal(err)
		}
		at := time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)
		for range 400 {
			a, b := ours.Next(at), theirs.Next(at)
			if !a.Equal(b) {
				t.Fatalf("%s after %v: %v, the library says %v", expr, at, a, b)
			}
			at = a.Add(time.Duration(a.Minute()*a.Day()) * time.Second)
		}
	}
}

func TestBadTimesAreExplained(t *testing.T) {
	for _, c := range []struct{ expr, zone, want string }{
		{"", "", "the cron expression is empty (write five fields, for example 0 3 * * 1-5, or @daily or @every 10m)"},
		{"0 3 * *", "", `the cron expression "0 3 * *" has 4 fields, must have five (the fields are minute, hour, day of month, month, day of week)`},
		{"0 0 3 * * *", "", `the cron expression "0 0 3 * * *" has 6 fields, must have five (the fields are minute, hour, day of month, month, day of week)`},
		{"0 25 * * *", "", `field 2 of the cron expression (hour) is wrong: "25": end of range (25) above maximum (23): 25 (0 to 23, *, lists 8,20, ranges 9-17 and steps */2)`},
		{"x * * * *", "", `field 1 of the cron expression (minute) is wrong: "x": it is not a number (0 to 59, *, lists 0,30, ranges 0-15 and steps */5)`},
		{"0 0 30 2 *", "", `the cron expression "0 0 30 2 *" never fires (check day and month)`},
		{"@reboot", "", `"@reboot" is not known (write @hourly, @daily, @weekly, @monthly, @yearly or @every 10m)`},
		{"@every soon", "", `@every "soon" is not a duration (write for example @every 10m or @every 1h30m)`},
		{"@every 100ms", "", `@every 100ms must be from 1s to 8784h0m0s`},
		{"@every 1500ms", "", `@every 1.5s is not of whole seconds`},
		{"CRON_TZ=Asia/Tokyo 0 0 * * *", "", `the cron expression has a time zone in it (set time_zone beside it)`},
		{"@daily", "Mars/Olympus", `time zone "Mars/Olympus" is not known (write an IANA name, for example Europe/Berlin, or leave it empty for UTC)`},
		{"@daily", "Local", `time zone "Local" is not known (write an IANA name, for example Europe/Berlin, or leave it empty for UTC)`},
		{"@daily", "../../etc/passwd", `time zone "../../etc/passwd" is not known (write an IANA name, for example Europe/Berlin, or leave it empty for UTC)`},
	} {
		if _, err := ParseTimes(c.expr, c.zone); err == nil || err.Error() != c.want {
			t.Errorf("%q in %q:\n got %v\nwant %s", c.expr, c.zone, err, c.want)
		}
	}
}

func FuzzTimes(f *testing.F) {
	f.Add("*/5 1-3 * jan,feb mon", "Europe/Berlin", int64(1774740000))
	f.Add("@every 90s", "", int64(-5))
	f.Add("59 1 * * ?", "America/New_York", int64(1793511000))
	f.Fuzz(func(t *testing.T, expr, zone string, at int64) {
		times, err := ParseTimes(expr, zone)
		if err != nil {
			if _, ok := err.(*Invalid); !ok {
				t.Fatal(err)
			}
			return
		}
		after := time.Unix(at%(1<<34), 0)
		for range 5 {
			next := times.Next(after)
			if next.IsZero() || !next.After(after) {
				t.Fatalf("%q: %v follows %v", expr, next, after)
			}
			// Nothing lies between: asking from just before gives the same.
			if again := times.Next(next.Add(-time.Second)); !again.Equal(next) {
				t.Fatalf("%q: after %v comes %v, but %v after %v", expr, after, next, again, next.Add(-time.Second))
			}
			after = next
		}
	})
}
