package query

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/perdure-dev/perdure/internal/wire"
)

var now = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// order is what most queries here are asked about.
func order() *wire.Flow {
	return &wire.Flow{
		Id: "acme/f/ord-17", Type: "order", RunId: "r1", Status: wire.Status_FAILED, Error: "Payment Timeout",
		CreatedUs: now.Add(-time.Hour).UnixMicro(), UpdatedUs: now.UnixMicro(), ClosedUs: now.UnixMicro(), Priority: 3,
		Attributes: []*wire.Attribute{
			{Name: "a b", Index: wire.Attribute_BOOL, Value: []byte(`true`)},
			{Name: "amount", Index: wire.Attribute_INT, Value: []byte(`100`)},
			{Name: "big", Index: wire.Attribute_INT, Value: []byte(`9007199254740993`)},
			{Name: "customer", Index: wire.Attribute_KEYWORD, Value: []byte(`"acme"`)},
			{Name: "due", Index: wire.Attribute_TIME, Value: []byte(`"2026-12-02T00:00:00+02:00"`)},
			{Name: "hidden", Value: []byte(`"acme"`)},
			{Name: "nothing", Index: wire.Attribute_KEYWORD, Value: []byte(`null`)},
			{Name: "rate", Index: wire.Attribute_FLOAT, Value: []byte(` 1.5 `)},
			{Name: "tag", Index: wire.Attribute_KEYWORD, Value: []byte(`["x", 7, "\u00fc\"y"]`)},
			{Name: "type", Index: wire.Attribute_KEYWORD, Value: []byte(`"inner"`)},
		},
	}
}

func TestMatch(t *testing.T) {
	for text, want := range map[string]bool{
		``:    true,
		` 	 `: true,
		`type = "order" and status in (running, failed) and created > "2026-12-01" and (customer = "acme" or amount >= 1000) and not tag = "z" and id ^= "ord-"`: true,
		`type = 'order'`:                  true,
		`TYPE = "order" AND NOT id = "x"`: true,
		"`type` = \"inner\"":              true,
		"`type` = \"order\"":              false,
		"`a b` = true":                    true,
		"`a b` = false":                   false,
		"`a b` != false":                  true,
		`status = "failed"`:               true,
		`status != running`:               true,
		`status in (running)`:             false,
		`error ~ "TIMEOUT"`:               true,
		`run = "r1"`:                      true,
		`priority >= 3`:                   true,
		`priority > 3.0`:                  false,
		`created > -2h`:                   true,
		`created > -30m`:                  false,
		`created < now and closed <= now and updated = now`: true,
		`closed > +1d`: false,
		`created > "2026-12-01 10:59" and created < "2026-12-01T11:00:01"`: true,
		`amount = 100`:                 true,
		`amount = 100.0`:               true,
		`amount = 1e2`:                 true,
		`amount in (1, 2, 100)`:        true,
		`amount > 99.5`:                true,
		`amount = "100"`:               false,
		`not amount = "100"`:           false, // another kind: not known
		`big = 9007199254740992`:       false,
		`big > 9007199254740992`:       true,
		`big < 9007199254740992.0`:     false,
		`rate = 1.5 and rate < 2`:      true,
		`due = "2026-12-01T22:00:00Z"`: true,
		`due > now and due < +1d`:      true,
		`due ^= "2026"`:                false,
		`tag = "x" and tag = "ü\"y"`:   true,
		`tag = "\u00FC\"y"`:            true,
		`tag != "x"`:                   false,
		`tag != "z"`:                   true,
		`tag = 7`:                      false,
		`tag ^= "ü"`:                   true,
		`tag > "m" and tag < "y"`:      true,
		`exists(tag) and not exists(absent) and exists(closed)`: true,
		`exists(nothing)`:                     false,
		`exists(hidden)`:                      false,
		`hidden = "acme"`:                     false,
		`absent = "x"`:                        false,
		`not absent = "x"`:                    false,
		`absent != "x"`:                       false,
		`not exists(absent) or absent != "x"`: true,
		`absent = "x" or amount = 100`:        true,
		`not (absent = "x" and amount = 99)`:  true, // false and unknown is false
		`not (absent = "x" and amount = 100)`: false,
	} {
		q, err := Parse(text, now)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got := q.Match("ord-17", order()); got != want {
			t.Errorf("%s: %v", text, got)
		}
		again, err := Parse(q.String(), now)
		if err != nil || again.String() != q.String() || again.Match("ord-17", order()) != want {
			t.Errorf("%s: printed as %s: %v", text, q, err)
		}
	}
}

func TestErrorsHavePositions(t *testing.T) {
	for text, want := range map[string]string{
		`type`:                              `4: expected an operator behind type, got the end`,
		`type = `:                           `7: expected a value, got the end`,
		`type = order`:                      `7: expected a value, got "order" (put text in quotes: "order")`,
		`type = 5`:                          `7: 5 is not a text (put it in quotes)`,
		`type "order"`:                      `5: expected an operator behind type, got "order"`,
		`type = "order" status = running`:   `15: expected "and", "or" or the end, got "status"`,
		`status = broken`:                   `9: broken is not a status (one of running, completed, failed, cancelled, terminated, timed_out)`,
		`status > running`:                  `7: status cannot be compared by > (see the fields and their comparisons)`,
		`created = "yesterday"`:             `10: "yesterday" is not an instant (write "2026-12-01", "2026-12-01T15:04:05Z", -2h or now)`,
		`created > 5`:                       `10: 5 is not an instant (write "2026-12-01", "2026-12-01T15:04:05Z", -2h or now)`,
		`created ^= "2026"`:                 `8: created cannot be compared by ^= (see the fields and their comparisons)`,
		`amount > -2x`:                      `9: "-2x" is neither a number nor a relative time (write 12, 1.5, -2h, -7d or +30m)`,
		`amount > 2h`:                       `9: "2h" is neither a number nor a relative time (write 12, 1.5, -2h, -7d or +30m)`,
		`amount > -999999999999w`:           `9: "-999999999999w" is neither a number nor a relative time (write 12, 1.5, -2h, -7d or +30m)`,
		`tag ^= 5`:                          `7: ^= is for texts (put the text in quotes)`,
		`tag in ()`:                         `8: expected a value, got ")"`,
		`tag in ("a" "b")`:                  `12: expected "," or ")", got "b"`,
		`tag not in ("a")`:                  `4: expected an operator behind tag, got "not" (not stands in front: not name in (…))`,
		`tag = "open`:                       `6: a text has no closing quote (end it with ")`,
		`tag = "\q"`:                        `7: unknown escape in a text (escapes are \\ \" \' \n \r \t and \u followed by four hexadecimal digits)`,
		`tag = "\ud800"`:                    `7: unknown escape in a text (escapes are \\ \" \' \n \r \t and \u followed by four hexadecimal digits)`,
		"``":                                "0: a name in backquotes is empty or has no end (write `name`)",
		`tag = "ä" & x`:                     `11: unexpected character '&' (operators are = != < <= > >= ^= ~ in)`,
		`(type = "x"`:                       `11: expected "and", "or" or ")", got the end`,
		`in = 5`:                            `0: expected a field or an attribute, got "in" (an attribute of that name stands in backquotes)`,
		`"type" = 5`:                        `0: expected a field or an attribute, got "type" (names stand without quotes, or in backquotes)`,
		`exists tag`:                        `7: expected "(" behind exists, got "tag"`,
		`exists(5)`:                         `7: expected a field or an attribute, got "5"`,
		"tag = \"\xff\"":                    `7: the query is not valid UTF-8 here`,
		strings.Repeat("(", 40):             `32: nested deeper than 32`,
		strings.Repeat("not ", 40):          `128: nested deeper than 32`,
		strings.Repeat(" ", 5000):           `4096: the query has 5000 bytes, at most 4096`,
		"a in (" + strings.Repeat("1,", 80): `134: more than 64 comparisons (ask in several queries)`,
	} {
		_, err := Parse(text, now)
		var qe *Error
		if !errors.As(err, &qe) || err.Error() != "query, position "+want {
			t.Errorf("%s:\n got %v\nwant query, position %s", clip(text), err, want)
		}
	}
}

func TestPrintedWithFewParentheses(t *testing.T) {
	for text, want := range map[string]string{
		`((a=1) and ((b=2)))or(not(not c<3))`: `a = 1 and b = 2 or not not c < 3`,
		`(a=1 or b=2) and c in ( 'x' , "y")`:  `(a = 1 or b = 2) and c in ("x", "y")`,
		`not (a=1 and b=2)`:                   `not (a = 1 and b = 2)`,
		`a=1 and (b=2 and (c=3 and d=4))`:     `a = 1 and b = 2 and c = 3 and d = 4`,
		"`and`=1 and `x y`=2 and `plain`=NOW": "`and` = 1 and `x y` = 2 and plain = now",
		`status="FAILED" and Created<-1h30m`:  `status = failed and created < -1h30m`,
	} {
		q, err := Parse(text, now)
		if err != nil || q.String() != want {
			t.Errorf("%s: %q %v", text, q, err)
		}
	}
}

func TestCompareMixed(t *testing.T) {
	for _, c := range []struct {
		i    int64
		f    float64
		want int
	}{
		{5, 5, 0}, {5, 5.5, -1}, {5, 4.5, 1}, {-5, -5.5, 1}, {-5, -4.5, -1}, {0, -0.5, 1}, {0, 0.5, -1},
		{1<<63 - 1, 1 << 63, -1}, {-1 << 63, -1 << 63, 0}, {-1 << 63, -1 << 64, 1}, {1<<53 + 1, 1 << 53, 1},
	} {
		if got := compareMixed(c.i, c.f); got != c.want {
			t.Errorf("%d and %g: %d", c.i, c.f, got)
		}
	}
}
