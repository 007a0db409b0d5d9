// A client of a DERP relay that a bench starts and talks to, one JSON object a line: see benchmarks/others/derp.py.
//
// Its argument is {"url": …, "certificate": …}: where the relay is, and the file of the certificate it has (PEM).
// First it tells {"key": …}. Then {"do": "push", …} sends packets to another one and {"do": "pings", …} measures
// round trips; what others send is counted and answered.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"tailscale.com/derp"
	"tailscale.com/derp/derphttp"
	"tailscale.com/net/netmon"
	"tailscale.com/types/key"
)

// The first byte of a packet says what it is; its answer has the next value.
const (
	data      = 0 // no answer
	countable = 2 // answered with as much as its head
	ping      = 4 // answered with as much
	end       = 6 // answered with how many bytes came since the last one that had another number
	head      = 9 // the first byte, and a number
)

const (
	// How long an answer may take until "end" is sent again: it may be among the packets that the relay drops.
	patience = 20 * time.Millisecond
	// After this time without an answer, packets that were not answered are lost.
	lostAfter = 2 * time.Second
)

type command struct {
	Do      string
	Target  string
	Size    int
	Total   int
	Window  int // packets that have not been answered; 0: as many as the relay takes
	Rounds  int
	Seconds float64
}

type answer struct {
	kind   byte
	number uint64
	bytes  uint64
}

type client struct {
	relay   *derphttp.Client
	answers chan answer
	got     map[key.NodePublic]uint64
	ended   map[key.NodePublic]answer // the last end of each, and how much had come
}

func packet(kind byte, number uint64, size int) []byte {
	made := make([]byte, max(size, head))
	made[0] = kind
	binary.BigEndian.PutUint64(made[1:], number)
	return made
}

func (c *client) receive() {
	for {
		message, err := c.relay.Recv()
		if err != nil {
			fail(err)
		}
		got, ok := message.(derp.ReceivedPacket)
		if !ok || len(got.Data) < head {
			continue
		}
		from, number := got.Source, binary.BigEndian.Uint64(got.Data[1:])
		switch kind := got.Data[0]; kind {
		case data, countable:
			c.got[from] += uint64(len(got.Data))
			if kind == countable {
				c.send(from, packet(countable+1, number, head))
			}
		case ping:
			back := slices.Clone(got.Data)
			back[0] = ping + 1
			c.send(from, back)
		case end:
			if last, ok := c.ended[from]; !ok || last.number != number {
				c.ended[from] = answer{end, number, c.got[from]}
				c.got[from] = 0
			}
			told := packet(end+1, number, head+8)
			binary.BigEndian.PutUint64(told[head:], c.ended[from].bytes)
			c.send(from, told)
		case countable + 1, ping + 1:
			c.answers <- answer{kind, number, 0}
		case end + 1:
			c.answers <- answer{kind, number, binary.BigEndian.Uint64(got.Data[head:])}
		}
	}
}

func (c *client) send(to key.NodePublic, packet []byte) {
	if err := c.relay.Send(to, packet); err != nil {
		fail(err)
	}
}

// push sends total bytes in packets of size; tells how long until the receiver had seen the end, and how much it got.
func (c *client) push(to key.NodePublic, order command) map[string]any {
	count, open := order.Total/order.Size, 0
	began := time.Now()
	for number := range count {
		if order.Window == 0 {
			c.send(to, packet(data, uint64(number), order.Size))
			continue
		}
		for open >= order.Window {
			open -= c.counted(open)
		}
		c.send(to, packet(countable, uint64(number), order.Size))
		open++
	}
	for open > 0 {
		open -= c.counted(open)
	}
	number := uint64(began.UnixNano())
	for {
		c.send(to, packet(end, number, head))
		select {
		case told := <-c.answers:
			if told.kind == end+1 && told.number == number {
				return map[string]any{"elapsed_s": time.Since(began).Seconds(), "received_bytes": told.bytes}
			}
		case <-time.After(patience):
		}
	}
}

// counted waits for an answer and tells how many of the open packets are done: one, or all if none is answered. Late
// answers to an end may come between them.
func (c *client) counted(open int) int {
	select {
	case told := <-c.answers:
		if told.kind == countable+1 {
			return 1
		}
		return 0
	case <-time.After(lostAfter):
		return open
	}
}

// pings measures round trips, one after another.
func (c *client) pings(to key.NodePublic, order command) map[string]any {
	var times []float64
	until := time.Now().Add(time.Duration(order.Seconds * float64(time.Second)))
	for number := 0; number < order.Rounds && time.Now().Before(until); number++ {
		sent := time.Now()
		c.send(to, packet(ping, uint64(number), order.Size))
		for told := range c.answers {
			if told.kind == ping+1 && told.number == uint64(number) {
				break
			}
		}
		times = append(times, float64(time.Since(sent).Nanoseconds())/1e6)
	}
	slices.Sort(times)
	at := func(share float64) float64 { return times[min(len(times)-1, int(share*float64(len(times))))] }
	return map[string]any{"rounds": len(times), "p50_ms": at(0.5), "p99_ms": at(0.99)}
}

func tell(fact map[string]any) {
	line, _ := json.Marshal(fact)
	os.Stdout.Write(append(line, '\n'))
}

func fail(err error) {
	tell(map[string]any{"error": err.Error()})
	os.Exit(1)
}

func main() {
	var options struct{ URL, Certificate string }
	if err := json.Unmarshal([]byte(os.Args[1]), &options); err != nil {
		fail(err)
	}
	mine := key.NewNode()
	quiet := func(string, ...any) {}
	relay, err := derphttp.NewClient(mine, options.URL, quiet, netmon.NewStatic())
	if err != nil {
		fail(err)
	}
	certificate, err := os.ReadFile(options.Certificate)
	if err != nil {
		fail(err)
	}
	relay.TLSConfig = &tls.Config{RootCAs: x509.NewCertPool()}
	relay.TLSConfig.RootCAs.AppendCertsFromPEM(certificate)
	if err := relay.Connect(context.Background()); err != nil {
		fail(err)
	}
	c := &client{relay, make(chan answer, 1<<16), map[key.NodePublic]uint64{}, map[key.NodePublic]answer{}}
	go c.receive()
	tell(map[string]any{"key": mine.Public().String()})
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var order command
		if err := json.Unmarshal(lines.Bytes(), &order); err != nil {
			fail(err)
		}
		var target key.NodePublic
		if err := target.UnmarshalText([]byte(strings.TrimSpace(order.Target))); err != nil {
			fail(err)
		}
		switch order.Do {
		case "push":
			tell(c.push(target, order))
		case "pings":
			tell(c.pings(target, order))
		default:
			fail(fmt.Errorf("unknown: %s", order.Do))
		}
	}
}
