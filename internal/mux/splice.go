package mux

import (
	"math/bits"

	"github.com/perdure-dev/perdure/internal/wire"
)

// spliceFrom is the size of values that are sent from where they are, and of
// messages that are looked through for them: to copy less costs less than a part
// more.
const spliceFrom = 4 << 10

// splice sends answers without a copy of the large values of attributes; false:
// m has none. What it sends is, byte by byte, what m's own encoder gives. Guarded
// by mu.
func (f *Frames) splice(m Message, size int) (bool, error) {
	answers, ok := m.(*wire.Answers)
	if !ok {
		return false, nil
	}
	large, known := 0, 0
	for _, a := range answers.Answers {
		known += partBytes(a.SizeVT())
		if re := attributesOnly(a); re != nil {
			large += largeBytes(re)
		}
	}
	if large == 0 || known != size {
		return false, nil
	}
	own := Buffers.Get(headBytes + size - large)
	defer Buffers.Put(own)
	s := splicer{b: (*own)[:headBytes], parts: f.parts[:0]}
	putHead(s.b, kindMessage, size)
	if err := s.answers(answers); err != nil {
		return true, err
	}
	s.cut()
	f.parts = s.parts
	err := f.cfg.Vector(s.parts)
	clear(f.parts) // or values that are gone would be kept
	return true, err
}

// attributesOnly gives the attributes of an answer that has nothing else but its
// ID; nil = it has, or is of another kind.
func attributesOnly(a *wire.Answer) *wire.AttributesReply {
	re, _ := a.GetResult().(*wire.Answer_Attributes)
	if re == nil || re.Attributes == nil {
		return nil
	}
	// Fields that are not known here, and those of later versions, show in the size.
	inner := re.Attributes.SizeVT()
	if answerBytes(a.Id, inner) != a.SizeVT() || replyBytes(re.Attributes) != inner {
		return nil
	}
	return re.Attributes
}

func largeBytes(re *wire.AttributesReply) int {
	n := 0
	for _, at := range re.Attributes {
		if splices(at) {
			n += len(at.Value)
		}
	}
	return n
}

// splices says that an attribute has a large value, and nothing but what splicer
// writes.
func splices(at *wire.Attribute) bool {
	return len(at.GetValue()) >= spliceFrom && attributeBytes(at) == at.SizeVT()
}

// Sizes of what splicer writes.

func varintBytes(v uint64) int { return (bits.Len64(v|1) + 6) / 7 }

func partBytes(n int) int { return 1 + varintBytes(uint64(n)) + n }

func answerBytes(id uint64, inner int) int {
	n := partBytes(inner)
	if id != 0 {
		n += 1 + varintBytes(id)
	}
	return n
}

func replyBytes(re *wire.AttributesReply) int {
	n := 0
	for _, at := range re.Attributes {
		n += partBytes(at.SizeVT())
	}
	if re.RunId != "" {
		n += partBytes(len(re.RunId))
	}
	return n
}

func attributeBytes(at *wire.Attribute) int {
	n := partBytes(len(at.Value))
	if at.Name != "" {
		n += partBytes(len(at.Name))
	}
	if at.Lsn != 0 {
		n += 1 + varintBytes(at.Lsn)
	}
	if at.Index != 0 {
		n += 1 + varintBytes(uint64(at.Index))
	}
	return n
}

// splicer encodes answers into parts: pieces of b, and values where they are. b
// has the capacity for all that is written to it, so it never moves.
type splicer struct {
	b     []byte
	from  int // where the piece of b begins that is not among the parts
	parts [][]byte
}

// Fields that are written, with their wire type: numbers of proto/perdure.
const (
	answersAnswer    = 1<<3 | 2
	answerID         = 1 << 3
	answerAttributes = 14<<3 | 2
	replyAttribute   = 1<<3 | 2
	replyRunID       = 2<<3 | 2
	attributeName    = 1<<3 | 2
	attributeValue   = 2<<3 | 2
	attributeLSN     = 3 << 3
	attributeIndex   = 4 << 3
)

func (s *splicer) varint(v uint64) {
	for ; v >= 0x80; v >>= 7 {
		s.b = append(s.b, byte(v)|0x80)
	}
	s.b = append(s.b, byte(v))
}

func (s *splicer) number(tag byte, v uint64) {
	if v != 0 {
		s.b = append(s.b, tag)
		s.varint(v)
	}
}

func (s *splicer) head(tag byte, n int) {
	s.b = append(s.b, tag)
	s.varint(uint64(n))
}

func (s *splicer) text(tag byte, v string) {
	if v != "" {
		s.head(tag, len(v))
		s.b = append(s.b, v...)
	}
}

// whole writes a message that has nothing to splice.
func (s *splicer) whole(m Message, size int) error {
	at := len(s.b)
	s.b = s.b[:at+size]
	_, err := m.MarshalToSizedBufferVT(s.b[at:])
	return err
}

// cut ends a piece of b.
func (s *splicer) cut() {
	if s.from < len(s.b) {
		s.parts = append(s.parts, s.b[s.from:])
		s.from = len(s.b)
	}
}

func (s *splicer) answers(m *wire.Answers) error {
	for _, a := range m.Answers {
		n := a.SizeVT()
		s.head(answersAnswer, n)
		re := attributesOnly(a)
		if re == nil {
			if err := s.whole(a, n); err != nil {
				return err
			}
			continue
		}
		s.number(answerID, a.Id)
		s.head(answerAttributes, re.SizeVT())
		if err := s.reply(re); err != nil {
			return err
		}
	}
	return nil
}

func (s *splicer) reply(re *wire.AttributesReply) error {
	for _, at := range re.Attributes {
		n := at.SizeVT()
		s.head(replyAttribute, n)
		if !splices(at) {
			if err := s.whole(at, n); err != nil {
				return err
			}
			continue
		}
		s.text(attributeName, at.Name)
		s.head(attributeValue, len(at.Value))
		s.cut()
		s.parts = append(s.parts, at.Value)
		s.number(attributeLSN, at.Lsn)
		s.number(attributeIndex, uint64(at.Index))
	}
	s.text(replyRunID, re.RunId)
	return nil
}
