/*
 * The rule against downgrades (:ref:`spec-downgrade-rule`, :ref:`spec-carriers`): a peer whose signed entry promises 0.1
 * is never spoken to in the clear. The relay answers whatever it likes; discovery may keep an entry back. What neither
 * can do is make up a signed entry or a handshake message (handshake.pml).
 *
 * What is checked (variants that violate it: see check.py):
 *   DIALLER    the dialler speaks in the clear only if its policy is hop, or is prefer and the entry it holds, signed by
 *              the listener, promises nothing
 *   LISTENER   the listener hands a plain transport to the application only under the same conditions
 *   BOTH       when neither policy is hop, the two applications never exchange a byte in the clear
 */

#define DIALLER 1
#define LISTENER 2
#define BOTH 3
#define claim(P, expr) assert((PROPERTY != P && PROPERTY != 0) || (expr))

mtype = { E2E, PREFER, HOP };
mtype = { YES, NO, NO_ENTRY };                          /* what discovery says a key promises */
mtype = { BARE, WITH_KK };                              /* REQUEST, ACCEPT and the first FWD, by what they carry */
mtype = { REFUSED, PLAIN, SEALED, NOTHING };

mtype dial_policy, listen_policy;
mtype dialler = NOTHING, listener = NOTHING;
bit dialler_sent_kk1, listener_sent_kk2;                /* all that makes these messages exist */

/* An entry is signed: discovery hands out the real one, or none. A client that never asks for security publishes 0.0.1. */
inline look_up(policy, answer) {
  atomic {
  if
  :: policy == HOP -> answer = NO
  :: policy != HOP -> answer = YES
  :: answer = NO_ENTRY
  fi;
#ifdef OPEN_WITHOUT_ENTRY       /* variant: no entry is taken for no promise */
  if :: answer == NO_ENTRY -> answer = NO :: else fi
#endif
  }
}

inline choose(policy) { if :: policy = E2E :: policy = PREFER :: policy = HOP fi }

/* The message the relay delivers: a handshake message only if the other end has made it. */
inline delivered(exists, what) {
  if
  :: exists -> what = WITH_KK
  :: what = BARE
  fi
}

proctype Dialler() {
  mtype promised, came;
  look_up(listen_policy, promised);
  if
  :: dial_policy == HOP -> goto plain
  :: dial_policy == PREFER && promised == NO -> goto plain
  :: dial_policy == E2E && promised == NO -> dialler = REFUSED; goto over
  :: else
  fi;

  dialler_sent_kk1 = 1;
  if
  :: true ->                    /* carrier A: an extended connection */
     if
     :: atomic { delivered(listener_sent_kk2, came);
                 if :: came == WITH_KK -> dialler = SEALED; goto over
                    :: else -> dialler = REFUSED; goto over      /* an ACCEPT without a message */
                 fi }
     :: dialler = REFUSED; goto over                             /* CLOSE for any reason, or silence */
     :: skip                                                     /* CLOSE unsupported: carrier B */
#ifdef FALL_BACK                /* variant: "unsupported" is answered with a plain transport */
        ; goto plain
#endif
     fi
  :: true
  fi;

  /* carrier B: ACCEPT, then kk1 in the first FWD; what comes first back is a message or ends it */
  if
  :: dialler = REFUSED
  :: atomic { delivered(listener_sent_kk2, came);
              if
              :: came == WITH_KK -> dialler = SEALED
#ifdef TAKE_PLAIN_FWD           /* variant: a first FWD without a message is taken as data */
              :: came == BARE -> dialler = PLAIN
#else
              :: came == BARE -> dialler = REFUSED
#endif
              fi }
  fi;
  goto over;

plain:
  dialler = PLAIN;
over:
  claim(BOTH, dial_policy == HOP || listen_policy == HOP || (dialler != PLAIN && listener != PLAIN));
  claim(DIALLER, dialler != PLAIN || dial_policy == HOP || (dial_policy == PREFER && listen_policy == HOP))
}

proctype Listener() {
  mtype promised, came;
  atomic { delivered(dialler_sent_kk1, came) }          /* REQUEST, in the dialler's name */
  if
  :: came == WITH_KK -> listener_sent_kk2 = 1; listener = SEALED; goto over
  :: else
  fi;
  if
  :: listen_policy == HOP -> listener = PLAIN; goto over
  :: listen_policy == E2E -> skip
  :: listen_policy == PREFER ->
     look_up(dial_policy, promised);
     if
     :: promised == NO -> listener = PLAIN; goto over
     :: else
     fi
  fi;
  atomic { delivered(dialler_sent_kk1, came) }          /* its first FWD: the message, or the end */
  if
  :: came == WITH_KK -> listener_sent_kk2 = 1; listener = SEALED
#ifdef TAKE_PLAIN_FWD
  :: came == BARE -> listener = PLAIN
#else
  :: came == BARE -> listener = REFUSED
#endif
  fi;
over:
  claim(LISTENER, listener != PLAIN || listen_policy == HOP || (listen_policy == PREFER && dial_policy == HOP));
  claim(BOTH, dial_policy == HOP || listen_policy == HOP || (dialler != PLAIN && listener != PLAIN))
}

init {
  atomic {
    choose(dial_policy);
    choose(listen_policy);
    run Dialler();
    run Listener()
  }
}
