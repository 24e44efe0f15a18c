/*
 * frontend.pml: front ends. They keep no pause state: each sends its commands in order, any of its
 * repertoire at any time, so duplicate and concurrent calls are among them. A CANCEL names a PAUSE of
 * its own life that was not cancelled yet.
 */
#define OPS(f)  ((f) == 0 -> OPS0 : OPS1)
#define LIFE    life[me]
#define SENT    sent[STREAM(LIFE, me)]
#define LAST    CALL(LIFE, me, SENT)
#define MAY(x)  (SENT < (me == 0 -> C : C1) && ((OPS(me) & (x)) != 0) && !(dead & (1 << me)) && STREAM_FREE)
#ifndef UPDATES
#define STREAM_FREE 1
#endif

inline send(kind, arg)
{
    SENT++;
    op[LAST] = (kind) + 8 * (arg)
}

#ifdef UPDATES
#define OPEN_UPDATE (open_update[me] != 0 && (ans[open_update[me] - 1] & 15) != ALL)
#ifdef NO_R20
#define STREAM_FREE 1
#define UPDATE_FREE 1
#else
#define STREAM_FREE (!OPEN_UPDATE || BESIDE_VERB(ARG(open_update[me] - 1)))
#define UPDATE_FREE (!OPEN_UPDATE)
#endif

inline send_update(v)
{
    send(CMD_UPDATE, v);
    open_update[me] = LAST + 1
}

#ifndef SCRIPT
#define SCRIPT(n) 0
#endif
#define MAY_CALL(v) (UPDATE_FREE && (MAY(MAY_VERB(v)) || (me == 0 && MAY(MAY_SCRIPT) && SCRIPT(SENT) == (v))))
#define UPDATE_CALLS                                                                                \
    :: d_step { MAY_CALL(VERB_INIT) -> send_update(VERB_INIT) }                                     \
    :: d_step { MAY_CALL(VERB_START) -> send_update(VERB_START) }                                   \
    :: d_step { MAY_CALL(VERB_UPDATE) -> send_update(VERB_UPDATE) }                                 \
    :: d_step { MAY_CALL(VERB_FINISH) -> send_update(VERB_FINISH) }                                 \
    :: d_step { MAY_CALL(VERB_ABORT) -> send_update(VERB_ABORT) }                                   \
    :: d_step { MAY_CALL(VERB_SET_VERSION) -> send_update(VERB_SET_VERSION) }
#endif

#define CANCELLABLE(n)                                                                              \
    (MAY(MAY_CANCEL) && SENT >= (n) && KIND(CALL(LIFE, me, n)) == CMD_PAUSE                         \
     && op[LAST] != CMD_CANCEL + 8 * (n))

proctype frontend(byte me)
{
end:
    do
    :: d_step { MAY(MAY_KEEP) -> send(CMD_PAUSE, PAUSE_KEEP) }
    :: d_step { MAY(MAY_ABORT) -> send(CMD_PAUSE, PAUSE_ABORT) }
    :: d_step { MAY(MAY_WAIT) -> send(CMD_PAUSE, PAUSE_WAIT) }
    :: d_step { MAY(MAY_RESUME) -> send(CMD_RESUME, 0) }
    :: d_step { CANCELLABLE(1) -> send(CMD_CANCEL, 1) }
#if C > 2
    :: d_step { CANCELLABLE(2) -> send(CMD_CANCEL, 2) }
#endif
#if C > 3
    :: d_step { CANCELLABLE(3) -> send(CMD_CANCEL, 3) }
#endif
#ifdef UPDATES
    UPDATE_CALLS
#endif
#if LIVES > 1
    :: d_step { me == 0 && LIFE < LIVES && SENT > 0 -> LIFE++ }
#endif
#ifdef DEATHS
    :: d_step { me == 0 && SENT > 0 && !(dead & 1) -> dead = dead | 1 }
#endif
    od
}
