/*
 * Resumption (:ref:`spec-resumption`): both ends of a sealed transport, and relays that lose frames, die and return.
 *
 * End 0 has opened the transport and searches; end 1 waits to be found. Each has SIZE bytes, and then its end of stream
 * to send. A path is one REQUEST through one relay: two queues, in order. What a path carries is sealed, so the relay
 * can lose a tail of it but cannot change, repeat or reorder it. FAULTS times in a run the relays may
 *     die          both ends lose the path, with everything on it
 *     cut one end  what it has sent still arrives, then CLOSE peer_gone
 *     make up a CLOSE towards one end
 *     replay a kk1 recorded on an earlier path
 * A byte is written as its offset. An ACK says up to which offset everything has arrived; ALL stands for the end.
 *
 * What is checked (variants that violate it: see check.py):
 *   EXACT        every byte is delivered once and in order
 *   HONEST       no fault of a relay makes an honest end's numbers look impossible (no integrity fault)
 *   CLEAN        an end that is told all is well has everything, and so has its peer
 *   ENOUGH       an end fails only if its peer is gone, never because of relays while another path is to be had
 *   and no run stops with an end that waits for ever (invalid end states)
 */

#define EXACT 1
#define HONEST 2
#define CLEAN 3
#define ENOUGH 4
#define claim(P, expr) assert((PROPERTY != P && PROPERTY != 0) || (expr))

#ifndef SIZE_0
#define SIZE_0 2
#endif
#ifndef SIZE_1
#define SIZE_1 1
#endif
#define SIZE(x) (x == 0 -> SIZE_0 : SIZE_1)
#ifndef WINDOW
#define WINDOW 2
#endif
#ifndef FAULTS
#define FAULTS 2
#endif
#define PATHS (FAULTS + 2)       /* the first, one after each fault, one for a replay */
#define NONE 15
#define ALL 14

mtype = { KK1, KK2, REFUSAL, CONFIRM, FWD, END, ACK, CLOSE, BARE };
mtype = { OPEN, SEARCH, WAIT, DONE, LOST };

typedef Way { chan to[2] = [6] of { mtype, byte } };
Way way[PATHS];
bit broken[8];                   /* end x's connection under path p is gone: broken[2 * p + x] */
bit left_[8];                    /* end x has closed path p: left_[2 * p + x] */

mtype state[2];
byte path[2];                    /* in use */
byte acked[2], next_[2], furthest[2];
byte received[2], drop[2], acknowledged[2], counted[2];
bit end_here[2];                 /* the end of stream has come on the path in use */
bit end_sent[2], end_acked[2], end_received[2], end_acknowledged[2];

byte trying = NONE;              /* end 0: the path of its attempt */
byte told_0;                     /* what end 0 said it had in that attempt */
byte told_1[PATHS], claimed_1[PATHS], attempt_1[PATHS];   /* end 1: offers that wait for their proof */
byte attempts_1, attempt_in_use;
byte next_path = 1, faults = 0;

#define on(p, x) (broken[2 * (p) + (x)])
#define off(p, x) (left_[2 * (p) + (x)])

inline drain(p, x) {
  do :: nempty(way[p].to[x]) -> way[p].to[x]?_,_ :: empty(way[p].to[x]) -> break od
}

/* End x sends on path p: lost if a connection is gone, or if the other end has closed. */
inline send(p, x, what, value) {
  if
  :: !on(p, x) && !on(p, 1 - x) && !off(p, 1 - x) -> way[p].to[1 - x]!what, value
  :: else
  fi
}

inline leave(p, x) { left_[2 * (p) + (x)] = 1; drain(p, x) }

/* Begin to send on path p from what the peer says it has. */
inline take_over(x, p, claimed, told) {
#ifdef FURTHEST_OF_LAST_PATH     /* variant: only what the last path carried counts as sent */
  claim(HONEST, acked[x] <= claimed && claimed <= next_[x]);
#else
  claim(HONEST, acked[x] <= claimed && claimed <= furthest[x]);
#endif
#ifdef GO_ON_FROM_NEXT           /* variant: what was on its way is not sent again */
  acked[x] = claimed;
#else
  acked[x] = claimed; next_[x] = claimed;
#endif
  end_sent[x] = 0; end_acked[x] = 0; end_acknowledged[x] = 0;
#ifdef SKIP_AS_TOLD              /* variant: what came on the old path after the count was told is not looked at */
  drop[x] = 0;
#else
  drop[x] = received[x] - told;
#endif
  acknowledged[x] = told;
  path[x] = p; state[x] = OPEN
}

/* What an end says it has: all of it, or, while it withholds acknowledgements, what its last one stood for. Never less
   than it has said before: the peer may have taken that over although its proof was lost. */
inline count(x, v) {
  if
  :: v = received[x]
  :: v = acknowledged[x];
#ifndef FORGET_COUNT             /* variant: a later count may be smaller */
     if :: counted[x] > v -> v = counted[x] :: else fi
#endif
  fi;
  counted[x] = v
}

/* End 1 is convinced of path p. */
inline move(p) {
  if :: path[1] != NONE -> send(path[1], 1, BARE, 0); leave(path[1], 1) :: else fi;
  attempt_in_use = attempt_1[p];
  end_here[1] = 0;
  take_over(1, p, claimed_1[p], told_1[p])
}

inline lose(x) {
  path[x] = NONE;
  if :: x == 0 -> state[x] = SEARCH :: else -> state[x] = WAIT fi
}

#define complete(x) (end_received[x] && next_[x] == SIZE(x) && acked[x] == SIZE(x))

inline well(x) {
  claim(CLEAN, received[x] == SIZE(1 - x) && end_received[x] && received[1 - x] == SIZE(x) && end_received[1 - x]);
  state[x] = DONE; path[x] = NONE
}
inline over(x) { if :: complete(x) -> well(x) :: else -> claim(ENOUGH, state[1 - x] == DONE); state[x] = LOST; path[x] = NONE fi }

/* What end x does on its path. */
#define moves(x, p) \
  :: atomic { state[x] == OPEN && next_[x] < SIZE(x) && next_[x] - acked[x] < WINDOW && len(way[p].to[1 - x]) < 4 -> \
       send(p, x, FWD, next_[x]); next_[x]++; \
       if :: next_[x] > furthest[x] -> furthest[x] = next_[x] :: else fi } \
  :: atomic { state[x] == OPEN && next_[x] == SIZE(x) && !end_sent[x] && len(way[p].to[1 - x]) < 4 -> \
       send(p, x, END, 0); end_sent[x] = 1 } \
  :: atomic { state[x] == OPEN && received[x] - drop[x] > acknowledged[x] && len(way[p].to[1 - x]) < 4 -> \
       acknowledged[x] = received[x] - drop[x]; send(p, x, ACK, acknowledged[x]) } \
  :: atomic { state[x] == OPEN && end_here[x] && !end_acknowledged[x] && len(way[p].to[1 - x]) < 4 -> \
       acknowledged[x] = received[x]; end_acknowledged[x] = 1; send(p, x, ACK, ALL) } \
  :: atomic { state[x] == OPEN && end_acked[x] && end_acknowledged[x] -> \
       send(p, x, CLOSE, 0); leave(p, x); well(x) }


/* One frame for end x on its path p. */
inline receive(x, p) {
  way[p].to[x]?what, value;
  if
  :: what == FWD ->
     if
     :: drop[x] -> claim(EXACT, value == received[x] - drop[x]); drop[x]--
     :: else -> claim(EXACT, value == received[x]); received[x]++
     fi
  :: what == END -> claim(EXACT, received[x] == SIZE(1 - x) && !drop[x]); end_received[x] = 1; end_here[x] = 1
  :: what == ACK ->
     if
     :: value == ALL -> claim(HONEST, end_sent[x]); acked[x] = SIZE(x); end_acked[x] = 1
     :: else -> claim(HONEST, acked[x] <= value && value <= next_[x]); acked[x] = value
     fi
  :: what == CLOSE -> leave(p, x); claim(CLEAN, end_received[x]); well(x)
  :: what == BARE ->
#ifdef BELIEVE_CLOSE             /* variant: a CLOSE that proves nothing is taken for the peer's */
     leave(p, x); well(x)
#else
     /* it proves nothing: the peer may know nothing of it and has to be told */
#ifndef KEEP_QUIET               /* variant: a CLOSE that proves nothing is not answered */
     send(p, x, BARE, 0);
#endif
     leave(p, x); lose(x)
#endif
  :: else -> skip
  fi;
  what = 0; value = 0
}

proctype Initiator() {
  mtype what; byte value;
  do
  moves(0, path[0])
  :: atomic { state[0] == OPEN && nempty(way[path[0]].to[0]) -> receive(0, path[0]) }
  :: atomic { state[0] == OPEN && on(path[0], 0) -> leave(path[0], 0); lose(0) }
  :: atomic { state[0] == SEARCH && trying == NONE ->
       if
       :: next_path < PATHS -> trying = next_path; next_path++; count(0, told_0); send(trying, 0, KK1, told_0)
       :: else -> over(0)
       fi }
  :: atomic { state[0] == SEARCH && trying != NONE && nempty(way[trying].to[0]) ->
       way[trying].to[0]?what, value;
       if
       :: what == KK2 -> send(trying, 0, CONFIRM, 0); end_here[0] = 0; take_over(0, trying, value, told_0); trying = NONE
       :: what == REFUSAL -> leave(trying, 0); trying = NONE; over(0)
       :: else ->                                                                 /* any CLOSE: the attempt failed */
          send(trying, 0, BARE, 0); leave(trying, 0); trying = NONE
#ifdef ONE_ATTEMPT               /* variant: a CLOSE instead of an answer is final */
          ; over(0)
#endif
       fi;
       what = 0; value = 0 }
  :: atomic { state[0] == SEARCH && trying != NONE && on(trying, 0) -> leave(trying, 0); trying = NONE }
  :: state[0] == DONE || state[0] == LOST -> break
  od
}

/* A frame on a path that is not in use, in every state of the transport. */
inline take_offer(p) {
  way[p].to[1]?what, value;
  if
  :: what == KK1 ->
     if
     :: state[1] == DONE || state[1] == LOST -> send(p, 1, REFUSAL, 0); leave(p, 1)
     :: else ->
        attempts_1++; attempt_1[p] = attempts_1; claimed_1[p] = value;
        count(1, told_1[p]);
        send(p, 1, KK2, told_1[p]);
#ifdef MOVE_UNCONFIRMED          /* variant: the transport moves on kk1 alone */
        move(p)
#endif
     fi
  :: what == CONFIRM ->
#ifndef MOVE_UNCONFIRMED
     if
     :: state[1] == DONE -> send(p, 1, CLOSE, 0); leave(p, 1)  /* both ends of stream are through */
     :: state[1] == LOST -> send(p, 1, BARE, 0); leave(p, 1)
     :: else ->
        if
#ifndef ANY_ORDER                /* variant: the last confirmation counts, whichever attempt it belongs to */
        :: attempt_1[p] < attempt_in_use -> send(p, 1, BARE, 0); leave(p, 1)
#endif
        :: else -> move(p)
        fi
     fi
#else
     skip
#endif
  :: else ->                                                   /* CLOSE: the attempt was given up */
#ifndef KEEP_QUIET
     send(p, 1, BARE, 0);
#endif
     leave(p, 1)
  fi;
  what = 0; value = 0
}

#define offers(p) \
  :: atomic { p != path[1] && !off(p, 1) && nempty(way[p].to[1]) -> take_offer(p) }

proctype Responder() {
  mtype what; byte value;
  do
  moves(1, path[1])
  :: atomic { state[1] == OPEN && nempty(way[path[1]].to[1]) -> receive(1, path[1]) }
  :: atomic { state[1] == OPEN && on(path[1], 1) -> leave(path[1], 1); lose(1) }
  offers(1)
  offers(2)
#if PATHS > 3
  offers(3)
#endif
  :: atomic { state[1] == WAIT && (state[0] == DONE || state[0] == LOST) -> over(1) }     /* the grace is over */
  :: atomic { (state[1] == DONE || state[1] == LOST) && (state[0] == DONE || state[0] == LOST) -> break }
  od
}

proctype Relays() {
  byte p, x;
  do
  :: atomic { faults < FAULTS ->
       faults++;
       if :: p = 0 :: next_path > 1 -> p = 1 :: next_path > 2 -> p = 2 :: next_path > 3 -> p = 3 fi;
       if :: x = 0 :: x = 1 fi;
       if
       :: true                                                                    /* less happens than could */
       :: broken[2 * p] = 1; broken[2 * p + 1] = 1; drain(p, 0); drain(p, 1)      /* the relay dies */
       :: !on(p, x) -> broken[2 * p + x] = 1; drain(p, x);                        /* one end's connection is cut */
          if :: !on(p, 1 - x) && !off(p, 1 - x) -> way[p].to[1 - x]!BARE, 0 :: else fi
       :: !on(p, x) && !off(p, x) && !on(p, 1 - x) -> way[p].to[x]!BARE, 0        /* a CLOSE is made up */
       :: next_path < PATHS ->                                                    /* a kk1 is replayed */
          way[next_path].to[1]!KK1, told_0; broken[2 * next_path] = 1; next_path++
       fi;
       p = 0; x = 0 }
  :: faults == FAULTS -> break
  :: break
  od
}

init {
  atomic {
    state[0] = OPEN; state[1] = OPEN; path[0] = 0; path[1] = 0;
    run Initiator(); run Responder(); run Relays()
  }
}
