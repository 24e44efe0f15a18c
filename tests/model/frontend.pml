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
