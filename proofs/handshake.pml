/*
 * The end-to-end handshake (:ref:`spec-e2e-handshake`, :ref:`spec-confirmation`) with an intruder who owns both relays.
 *
 * Two honest parties, A and B, and the intruder's own key M. Two initiator sessions (each of A or B, with any peer) and
 * two responder sessions (each of A or B) run in any order. The intruder sees every message, keeps it back, delivers it
 * wherever and whenever it likes, makes up every message it has the keys for, and may learn long-term secrets.
 *
 * Cryptography is symbolic. A Diffie-Hellman value is known to those who know one of its two secrets. A message opens
 * exactly if it was sealed under the same key and the same transcript; so what the intruder can deliver is what an
 * honest session has sent with that transcript, or what it can seal itself because it knows every secret mixed into the
 * key. The guards delivers_*() say that; no message has to be stored twice.
 *
 * What is checked, each shown to be violable by a variant (see check.py):
 *   SECRECY        the keys of a session between A and B are never known to the intruder, even with all long-term
 *                  secrets stolen after it opened (forward secrecy)
 *   AGREE_R        a responder that opens with an honest initiator has a partner session that meant it, with the same
 *                  service, the same two ephemeral keys, and the same relay
 *   AGREE_I        the same for an initiator that opens with an honest responder
 *   INJECTIVE      no two sessions of one role open with the same partner session
 * With STOLEN_BEFORE the intruder has B's long-term secret from the beginning: what B is told by an honest initiator
 * must hold all the same (no key compromise impersonation).
 */

#define A 0
#define B 1
#define M 2          /* the intruder's own identity */
#define X 4          /* the intruder's ephemeral key; 0..3 are those of the honest sessions */
#define NONE 7

#define SECRECY 1
#define AGREE_R 2
#define AGREE_I 3
#define INJECTIVE 4
#define claim(P, expr) assert((PROPERTY != P && PROPERTY != 0) || (expr))

mtype = { IDLE, WAIT, OPEN };

typedef Session {
  mtype state;
  byte me; byte peer; byte relay; byte service;
  byte other;        /* the ephemeral key of the other side */
};

Session s[4];        /* 0, 1: initiators; 2, 3: responders. A session's ephemeral key has its number. */
bit stolen[3];       /* long-term secrets the intruder has */
bit opened_before_theft[4];

/* Which secrets the intruder can mix: one of the two of each Diffie-Hellman value is enough. */
#define has_static(p)  (p == M || stolen[p])
#define has_eph(e)     (e == X)
#define knows_es(e, r) (has_eph(e) || has_static(r))
#define knows_ss(i, r) (has_static(i) || has_static(r))
#define knows_ee(e, f) (has_eph(e) || has_eph(f))
#define knows_se(i, f) (has_static(i) || has_eph(f))

#ifdef NO_STATIC     /* variant: a handshake of ephemeral keys alone */
#define knows_1(i, r, e)    (true)
#define knows_2(i, r, e, f) (knows_ee(e, f))
#else
#ifdef NO_EE         /* variant: without the ephemeral-ephemeral value */
#define knows_2(i, r, e, f) (knows_es(e, r) && knows_ss(i, r) && knows_se(i, f))
#else
#ifdef NO_SE         /* variant: without the value that proves the initiator afresh */
#define knows_2(i, r, e, f) (knows_es(e, r) && knows_ss(i, r) && knows_ee(e, f))
#else
#define knows_2(i, r, e, f) (knows_es(e, r) && knows_ss(i, r) && knows_ee(e, f) && knows_se(i, f))
#endif
#endif
#define knows_1(i, r, e)    (knows_es(e, r) && knows_ss(i, r))
#endif

#ifdef NO_RELAY_BINDING   /* variant: the prologue does not name the relay */
#define same_relay(a, b) (true)
#else
#define same_relay(a, b) (a == b)
#endif

#ifdef NO_STATIC          /* with no static key mixed in, nothing ties a message to two identities */
#define same_pair(n, i, r) (true)
#else
#define same_pair(n, i, r) (s[n].me == i && s[n].peer == r)
#endif

/* Message 1, e ‖ Seal(service): sent by initiator session e, or sealed by the intruder. */
#define sent_1(n, i, r, relay_, service_) \
  (s[n].state != IDLE && same_pair(n, i, r) && same_relay(s[n].relay, relay_) && s[n].service == service_)
#define delivers_1(i, r, relay_, service_, e) \
  (((e == 0 || e == 1) && sent_1(e, i, r, relay_, service_)) || knows_1(i, r, e))

/* Message 2, f ‖ Seal(): sent by responder session f for exactly this message 1. */
#define sent_2(n, i, r, relay_, service_, e) \
  (s[n].state != IDLE && same_pair(n, r, i) && same_relay(s[n].relay, relay_) && s[n].service == service_ \
   && s[n].other == e)
#define delivers_2(i, r, relay_, service_, e, f) \
  (((f == 2 || f == 3) && sent_2(f, i, r, relay_, service_, e)) || knows_2(i, r, e, f))

/* The confirmation: the first frame sealed under k1, by the initiator session that is open with this transcript. */
#define confirmed_by(n, i, r, relay_, service_, f) \
  (s[n].state == OPEN && same_pair(n, i, r) && same_relay(s[n].relay, relay_) && s[n].service == service_ \
   && s[n].other == f)
#define delivers_3(i, r, relay_, service_, e, f) \
  (((e == 0 || e == 1) && confirmed_by(e, i, r, relay_, service_, f)) || knows_2(i, r, e, f))

inline any_honest(v) { if :: v = A :: v = B fi }
inline any_peer(v)   { if :: v = A :: v = B :: v = M fi }
inline any_bit(v)    { if :: v = 0 :: v = 1 fi }

#define check_secrecy(i, r, e, f) \
  claim(SECRECY, i == M || r == M || stolen[i] || stolen[r] || !knows_2(i, r, e, f))

proctype Initiator(byte n) {
  byte f;
  atomic {
#ifndef STOLEN_BEFORE
    /* A and B, the relays and the services can be exchanged for each other: session 0 is one of A, at relay 0 */
    if
    :: n == 0 -> s[n].me = A; s[n].relay = 0; s[n].service = 0
    :: else   -> any_honest(s[n].me); any_bit(s[n].relay); any_bit(s[n].service)
    fi;
#else
    any_honest(s[n].me); any_bit(s[n].relay); any_bit(s[n].service);
#endif
    any_peer(s[n].peer);
    s[n].peer != s[n].me;
    s[n].state = WAIT
  }
  atomic {
    if :: f = 2 :: f = 3 :: f = X fi;
    delivers_2(s[n].me, s[n].peer, s[n].relay, s[n].service, n, f);
    s[n].other = f;
    s[n].state = OPEN;
    opened_before_theft[n] = !stolen[A] && !stolen[B];
    if
    :: s[n].peer != M && !stolen[s[n].me] && !stolen[s[n].peer] ->
       claim(AGREE_I, f == 2 || f == 3);
       claim(AGREE_I, s[f].state != IDLE && s[f].me == s[n].peer && s[f].peer == s[n].me && s[f].other == n
              && s[f].service == s[n].service && s[f].relay == s[n].relay);
       claim(INJECTIVE, !(s[1 - n].state == OPEN && s[1 - n].other == f));
       check_secrecy(s[n].me, s[n].peer, n, f)
    :: else
    fi;
    f = 0
  }
}

proctype Responder(byte n) {
  byte e, i, r, relay_, service_;
  atomic {
    any_honest(r); any_peer(i);
    i != r;
    if
    :: i == M -> relay_ = 0; service_ = 0    /* no honest session means M: relay and service change nothing */
    :: else   -> any_bit(relay_); any_bit(service_)
    fi;
    if :: e = 0 :: e = 1 :: e = X fi;
    delivers_1(i, r, relay_, service_, e);
    s[n].me = r; s[n].peer = i; s[n].relay = relay_; s[n].service = service_; s[n].other = e;
    s[n].state = WAIT;
    e = 0; i = 0; r = 0; relay_ = 0; service_ = 0
  }
  atomic {
#ifndef NO_CONFIRMATION   /* variant: the application is told on message 1 alone */
    delivers_3(s[n].peer, s[n].me, s[n].relay, s[n].service, s[n].other, n);
#endif
    s[n].state = OPEN;
    opened_before_theft[n] = !stolen[A] && !stolen[B];
    e = s[n].other; i = s[n].peer; r = s[n].me;
    if
    :: i != M && i != r && !stolen[i] ->     /* the responder's own secret may be stolen: KCI */
       claim(AGREE_R, e == 0 || e == 1);
       claim(AGREE_R, s[e].state != IDLE && s[e].me == i && s[e].peer == r && s[e].service == s[n].service
              && s[e].relay == s[n].relay);
#ifndef NO_CONFIRMATION
       claim(AGREE_R, s[e].state == OPEN && s[e].other == n);
#endif
       claim(INJECTIVE, !(s[5 - n].state == OPEN && s[5 - n].other == e));
       if :: !stolen[r] -> check_secrecy(i, r, e, n) :: else fi
    :: else
    fi;
    e = 0; i = 0; r = 0
  }
}

/* Long-term secrets are stolen: of all parties after the sessions have opened (forward secrecy), or, in KCI, of one
   party before they begin. */
proctype Thief() {
  atomic {
    stolen[A] = 1; stolen[B] = 1;
    byte n = 0;
    do
    :: n < 4 ->
       if
       :: s[n].state == OPEN && opened_before_theft[n] && s[n].peer != M && s[n].me != s[n].peer ->
          if
          :: n < 2 -> claim(SECRECY, !knows_2(s[n].me, s[n].peer, n, s[n].other))
          :: else  -> claim(SECRECY, !knows_2(s[n].peer, s[n].me, s[n].other, n))
          fi
       :: else
       fi;
       n++
    :: else -> break
    od
  }
}

init {
  atomic {
    byte k = 0;
    do :: k < 4 -> s[k].state = IDLE; s[k].other = NONE; k++ :: else -> break od;
#ifdef STOLEN_BEFORE
    stolen[B] = 1;
#else
    run Thief();
#endif
    run Initiator(0); run Initiator(1); run Responder(2); run Responder(3)
  }
}
