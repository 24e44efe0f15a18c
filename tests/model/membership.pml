/*
 * membership.pml: group epochs, from docs/MEMBERSHIP.md: the coordinator (M), the enrolment of each rank (E),
 * the facts of the join rounds (J) and an update that a death may cut anywhere. DEATHS processes of
 * ranks are killed and started again by their launcher, STOPS are stopped and woken or killed,
 * RESTARTS are the coordinator's. What is said arrives in order; what is under way to a process that
 * ends is lost, and what is under way from it may be.
 */
#include "settings.pml"
#ifndef N
#define N 2
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef STOPS
#define STOPS 0
#endif
#ifndef RESTARTS
#define RESTARTS 0
#endif
#ifndef UPDATES
#define UPDATES 0
#endif
#ifndef PAUSES
#define PAUSES 0
#endif
#define EPOCHS 8 /* no search comes to more: asserted */

/* a rank's process */
#define DOWN       0
#define CALLING    1
#define CONNECTING 2
#define MEMBER     3
/* the coordinator's record of it */
#define ABSENT  0
#define WAITING 1
#define PLACED  2
#define READY   3
#define CLAIMS  4 /* after the coordinator's restart: says that it is a member */
/* the coordinator */
#define GATHERING 1
#define FORMING   2
#define SERVING   3

mtype = { HELLO, IS_READY, INIT, DISSOLVE, ROLLCALL, REFUSED };
chan up[N] = [3] of { mtype, byte, byte, byte, byte };   /* generation, address, left, member of */
chan down[N] = [4] of { mtype, byte };                   /* epoch */

byte gen[N], state[N], epoch[N], left[N], address[N];
byte stopped, joined, open, paused, dirty, undecided; /* a bit per rank */
byte content[N], weights[N];                          /* what it holds; its weight epoch */
/* facts, frozen when a rank forms an epoch */
byte fact_content[N], fact_weights[N], fact_bad, fact_paused;

byte G, phase = GATHERING, newest; /* newest: weight epoch ever reported */
byte record[N], rec_gen[N], rec_address[N], rec_left[N], expelled[N];
byte init_gen[N * EPOCHS], init_address[N * EPOCHS], init_floor[EPOCHS];

#define IDLE      0
#define RECEIVED  1
#define COMMITTED 2
byte stage[N]; /* of an update */
short lived;   /* ghost: epochs that had a member */
byte known;    /* newest epoch that the front ends have heard of; their HELLO says it */
byte served;   /* ghost: newest weights that any rank stepped with */

byte deaths, stops, restarts;
bit pause_called, pause_answered;

hidden byte i, j, e, ref, a1, a2, a3, a4;
hidden byte broken;

#define BIT(r)        (1 << (r))
#define AT(g, r)      ((g) * N + (r))
#define ALIVE(r)      (state[r] != DOWN && !(stopped & BIT(r)))
#define SAME_LIFE(g, r) (gen[r] == init_gen[AT(g, r)] && address[r] == init_address[AT(g, r)])
#define IN(g, r)      (SAME_LIFE(g, r) && state[r] >= CONNECTING && epoch[r] == (g))
#define GONE(g, r)    (!SAME_LIFE(g, r) || state[r] == DOWN || (stopped & BIT(r)))
#define ALL           ((1 << N) - 1)
#if N == 2
#define EVERY(x) (x(0) && x(1))
#define SOME(x)  (x(0) || x(1))
#else
#define EVERY(x) (x(0) && x(1) && x(2))
#define SOME(x)  (x(0) || x(1) || x(2))
#endif

/* ---- E: a rank ---- */

inline say_hello(member_of)
{
    up[me] ! HELLO, gen[me], address[me], left[me], member_of
}

/* The epoch is over here. */
inline leave()
{
    left[me] = epoch[me];
    epoch[me] = 0;
    address[me]++;
    state[me] = CALLING;
    joined = joined & ~BIT(me);
    open = open & ~BIT(me);
    stage[me] = IDLE
}

/* Ends, and with it what was under way to it. */
inline end_process()
{
    state[me] = DOWN;
    joined = joined & ~BIT(me);
    open = open & ~BIT(me);
    paused = paused & ~BIT(me);
    dirty = dirty & ~BIT(me);
    undecided = undecided & ~BIT(me);
    stopped = stopped & ~BIT(me);
    stage[me] = IDLE;
    do
    :: nempty(down[me]) -> down[me] ? a1, a2
    :: empty(down[me]) -> break
    od;
    epoch[me] = 0
}

inline begin_process()
{
    gen[me]++;
    address[me]++;
    left[me] = 0;
    content[me] = 0; /* the launcher's checkpoint */
    weights[me] = 0;
    state[me] = CALLING
}

inline form()
{
    state[me] = MEMBER;
    lived = lived | BIT(epoch[me]);
    known = (epoch[me] > known -> epoch[me] : known); /* HERE */
    fact_content[me] = content[me];
    fact_weights[me] = weights[me];
    fact_bad = (((dirty | undecided) & BIT(me)) -> fact_bad | BIT(me) : fact_bad & ~BIT(me));
    fact_paused = ((paused & BIT(me)) -> fact_paused | BIT(me) : fact_paused & ~BIT(me));
    up[me] ! IS_READY, epoch[me], gen[me], 0, 0
}

/* J: from the facts of all, the same on every rank. */
inline join()
{
    e = init_floor[epoch[me]];
    for (i : 0 .. N - 1) {
        e = (fact_weights[i] > e -> fact_weights[i] : e)
    }
    ref = N;
    for (i : 0 .. N - 1) {
#ifdef NO_UNDECIDED
        ref = (ref == N && fact_weights[i] == e -> i : ref)
#else
        ref = (ref == N && fact_weights[i] == e && !(fact_bad & BIT(i)) -> i : ref)
#endif
    }
    j = ref != N;
    for (i : 0 .. N - 1) {
#ifdef NO_CONTENT
        skip
#else
        j = j && (fact_content[i] == fact_content[ref % N]) && !(dirty & BIT(i))
#endif
    }
    weights[me] = e;
    undecided = undecided & ~BIT(me);
    if
    :: j -> open = open | BIT(me)
    :: else -> dirty = dirty | BIT(me) /* in lockstep the gate is set on all */
    fi;
#ifndef NO_PAUSE_FACT
    if
    :: fact_paused -> paused = paused | BIT(me)
    :: else -> skip
    fi;
#endif
    joined = joined | BIT(me);
    for (i : 0 .. N - 1) {
        if
        :: j && (open & BIT(i)) && epoch[i] == epoch[me] ->
            assert(content[i] == content[me]) /* who steps together holds the same weights */
        :: else -> skip
        fi
    }
    assert(!j || content[me] == weights[me]);
    assert(!j || DEATHS > 1 || STOPS > 0 || weights[me] >= served);
    assert(!pause_answered || DEATHS > 1 || STOPS > 0 || (paused & BIT(me)));
    i = 0
}

#define PEER_GONE(r)     ((r) != me && GONE(epoch[me], r))
#define PEER_IN(r)       ((r) == me || IN(epoch[me], r))
#define PEER_MEMBER(r)   (IN(epoch[me], r) && state[r] == MEMBER)
#define PEER_JOINED(r)   (PEER_MEMBER(r) && (joined & BIT(r)))
#define PEER_LEVEL(r)    (weights[r] == weights[me] && stage[r] != COMMITTED)
#define PEER_RECEIVED(r) (weights[r] == weights[me] && stage[r] != IDLE)
#define PEER_TOOK(r)     (stage[r] == COMMITTED || weights[r] == weights[me] + 1)
#define PEER_PAUSED(r)   (PEER_JOINED(r) && (paused & BIT(r)))
#define TOGETHER         (ALIVE(me) && state[me] == MEMBER && EVERY(PEER_JOINED))

/* An update in place: received by all, then committed by each, then published by each. */
inline receive()
{
    stage[me] = RECEIVED;
    open = open & ~BIT(me);
    dirty = dirty | BIT(me)
}

inline commit()
{
    stage[me] = COMMITTED;
    content[me] = weights[me] + 1;
    dirty = dirty & ~BIT(me);
    undecided = undecided | BIT(me)
}

inline publish()
{
    stage[me] = IDLE;
    weights[me]++;
    undecided = undecided & ~BIT(me);
    open = open | BIT(me);
    served = (weights[me] > served -> weights[me] : served)
}

/* Nothing goes on any more: all ranks are in the coordinator's epoch. */
inline check_rest()
{
    assert(state[me] == MEMBER && epoch[me] == G && phase == SERVING && (joined & BIT(me)));
    assert(!pause_called || (paused & BIT(me)));
    assert(record[me] == READY && rec_gen[me] == gen[me])
}

inline be_dissolved()
{
    down[me] ? DISSOLVE, e;
    if
    :: state[me] >= CONNECTING && e >= epoch[me] -> leave(); say_hello(0)
    :: else -> skip
    fi
}

inline be_placed()
{
    down[me] ? INIT, e;
    if
    :: state[me] == CALLING && e > left[me] ->
        assert(SAME_LIFE(e, me));
        epoch[me] = e;
        state[me] = CONNECTING
    :: state[me] >= CONNECTING && e > epoch[me] -> leave(); say_hello(0)
    :: else -> skip
    fi
}

inline be_called()
{
    down[me] ? ROLLCALL, e;
    if
    :: state[me] == MEMBER ->
        say_hello(epoch[me]);
        up[me] ! IS_READY, epoch[me], gen[me], 0, 0
    :: state[me] == CONNECTING -> leave(); say_hello(0)
    :: else -> say_hello(0)
    fi
}

#define UNHEARD (rec_gen[me] != gen[me] || rec_address[me] != address[me] || record[me] == ABSENT)

proctype rank(byte me)
{
end:
    do
    :: d_step { state[me] == DOWN && nfull(up[me]) -> begin_process(); say_hello(0) }
    /* again, while the coordinator has not heard of this attempt */
    :: d_step { ALIVE(me) && state[me] == CALLING && empty(up[me]) && UNHEARD -> say_hello(0) }
    :: d_step { ALIVE(me) && nempty(down[me]) && len(up[me]) <= 1 && down[me] ? [INIT, _] -> be_placed() }
    :: d_step { ALIVE(me) && nempty(down[me]) && len(up[me]) <= 1 && down[me] ? [DISSOLVE, _] -> be_dissolved() }
    :: d_step { ALIVE(me) && nempty(down[me]) && len(up[me]) <= 1 && down[me] ? [ROLLCALL, _] -> be_called() }
    :: d_step { ALIVE(me) && nempty(down[me]) && down[me] ? [REFUSED, _] -> end_process() }
    :: d_step { ALIVE(me) && state[me] == CONNECTING && EVERY(PEER_IN) && nfull(up[me]) -> form() }
    :: d_step { ALIVE(me) && state[me] >= CONNECTING && SOME(PEER_GONE) && nfull(up[me]) ->
        leave(); say_hello(0) }
    :: d_step { ALIVE(me) && state[me] == MEMBER && !(joined & BIT(me)) && EVERY(PEER_MEMBER) -> join() }
#if UPDATES
    :: d_step { TOGETHER && stage[me] == IDLE && weights[me] < UPDATES && EVERY(PEER_LEVEL) -> receive() }
    :: d_step { TOGETHER && stage[me] == RECEIVED && EVERY(PEER_RECEIVED) -> commit() }
    :: d_step { TOGETHER && stage[me] == COMMITTED && EVERY(PEER_TOOK) -> publish() }
    :: d_step { (joined & BIT(me)) && newest < weights[me] -> newest = weights[me] }
#endif
    :: d_step { TOGETHER && pause_called && !(paused & BIT(me)) -> paused = paused | BIT(me);
        pause_answered = pause_answered || EVERY(PEER_PAUSED) }
    /* what may happen to a process */
    :: d_step { state[me] != DOWN && deaths < DEATHS -> deaths++; end_process() }
    :: d_step { ALIVE(me) && stops < STOPS -> stops++; stopped = stopped | BIT(me) }
    :: d_step { (stopped & BIT(me)) -> stopped = stopped & ~BIT(me) }
    :: d_step { (stopped & BIT(me)) && record[me] == ABSENT -> end_process() }
    :: timeout -> d_step { check_rest(); i = 0 }; break
    od
}

/* ---- M: the coordinator ---- */

#define CLAIMED(r)     (record[r] == CLAIMS)
#define CLAIMS_SAME(r) (rec_left[r] == rec_left[0])
#define HEARD(r)       (record[r] != ABSENT)
#define IS_THERE(r)    (record[r] == READY)
#define IS_WAITING(r)  (record[r] == WAITING)
#define ROOM(r)        (len(down[r]) <= 1)

/* To the life that is recorded; one that is not there any more is an unknown peer. */
inline tell(r, what, g)
{
    if
    :: state[r] != DOWN && gen[r] == rec_gen[r] -> down[r] ! what, g
    :: else -> skip
    fi
}

inline break_epoch(g)
{
    phase = GATHERING;
    for (j : 0 .. N - 1) {
        tell(j, DISSOLVE, g)
    }
    j = 0
}

inline gather()
{
    for (i : 0 .. N - 1) {
#ifndef NO_LEFT
        G = (rec_left[i] > G -> rec_left[i] : G);
        G = (known > G -> known : G)
#else
        skip
#endif
    }
    G++;
    assert(G < EPOCHS);
    init_floor[G] = newest;
    for (i : 0 .. N - 1) {
        assert(!(lived & BIT(G))); /* no epoch that ever was is used again */
        init_gen[AT(G, i)] = rec_gen[i];
        init_address[AT(G, i)] = rec_address[i];
        record[i] = PLACED;
        tell(i, INIT, G)
    }
    phase = FORMING;
    i = 0
}

/* HELLO of a1 generation, a2 address, a3 left, a4 member of. */
inline on_hello()
{
    if
#ifndef NO_EXPULSION
    :: a1 <= expelled[i] || a1 < rec_gen[i] ->
        if
        :: state[i] != DOWN && gen[i] == a1 -> down[i] ! REFUSED, a1
        :: else -> skip
        fi
#endif
    :: else ->
        if
        :: a1 == rec_gen[i] && a2 == rec_address[i] && record[i] != ABSENT ->
            if
            :: record[i] >= PLACED && record[i] != CLAIMS -> tell(i, INIT, G)
            :: else -> skip
            fi
        :: else ->
            broken = phase != GATHERING && (record[i] == PLACED || record[i] == READY || a3 == G);
            expelled[i] = (rec_gen[i] != 0 && rec_gen[i] < a1 -> rec_gen[i] : expelled[i]);
            rec_gen[i] = a1;
            rec_address[i] = a2;
            rec_left[i] = (a4 -> a4 : a3);
            record[i] = (a4 -> CLAIMS : WAITING);
            if
            :: broken -> break_epoch(G)
            :: else -> skip
            fi;
            if
            :: EVERY(CLAIMED) && EVERY(CLAIMS_SAME) -> /* a restarted coordinator finds its group whole */
                G = rec_left[0];
                for (j : 0 .. N - 1) {
                    record[j] = READY
                }
                phase = SERVING
            :: EVERY(HEARD) && SOME(CLAIMED) ->
                for (j : 0 .. N - 1) {
                    if
                    :: record[j] == CLAIMS -> tell(j, DISSOLVE, rec_left[j])
                    :: else -> skip
                    fi
                }
            :: else -> skip
            fi
        fi
    fi;
    i = 0;
    j = 0
}

inline on_ready()
{
    if
    :: a1 == G && phase == FORMING && record[i] == PLACED && a2 == rec_gen[i] ->
        record[i] = READY;
        if
        :: EVERY(IS_THERE) -> phase = SERVING
        :: else -> skip
        fi
    :: else -> skip
    fi;
    i = 0
}

inline expel()
{
    expelled[i] = rec_gen[i];
    broken = phase != GATHERING && (record[i] == PLACED || record[i] == READY);
    e = (record[i] == CLAIMS -> rec_left[i] : 0);
    if
    :: broken -> break_epoch(G)
#ifndef NO_CLAIM_BREAK
    :: !broken && e != 0 -> break_epoch(e) /* the group that it was found in */
#endif
    :: else -> skip
    fi;
    record[i] = ABSENT;
    i = 0
}

inline start_again()
{
    restarts++;
    phase = GATHERING;
    G = 0;
    for (i : 0 .. N - 1) {
        record[i] = ABSENT;
        rec_gen[i] = 0;
        rec_address[i] = 0;
        rec_left[i] = 0;
        expelled[i] = 0;
        do
        :: nempty(up[i]) -> up[i] ? a1, a1, a2, a3, a4
        :: empty(up[i]) -> break
        od;
        do
        :: nempty(down[i]) -> down[i] ? a1, a2
        :: empty(down[i]) -> break
        od;
        if
        :: state[i] != DOWN -> down[i] ! ROLLCALL, 0
        :: else -> skip
        fi
    }
    newest = 0;
    i = 0
}

#define FROM(r)                                                                                     \
    :: d_step { EVERY(ROOM) && nempty(up[r]) && up[r] ? [HELLO, _, _, _, _] ->                        \
        up[r] ? HELLO, a1, a2, a3, a4; i = r; on_hello() }                                          \
    :: d_step { nempty(up[r]) && up[r] ? [IS_READY, _, _, _, _] ->                                  \
        up[r] ? IS_READY, a1, a2, a3, a4; i = r; on_ready() }                                       \
    :: d_step { EVERY(ROOM) && (stopped & BIT(r)) && record[r] != ABSENT -> i = r; expel() }

proctype coordinator()
{
end:
    do
    FROM(0)
    FROM(1)
#if N > 2
    FROM(2)
#endif
    :: d_step { phase == GATHERING && EVERY(IS_WAITING) && EVERY(ROOM) -> gather() }
#if RESTARTS
    :: d_step { restarts < RESTARTS -> start_again() }
#endif
#if PAUSES
    :: d_step { phase == SERVING && !pause_called -> pause_called = 1 }
#endif
    od
}

init
{
    atomic {
        run coordinator();
        for (i : 0 .. N - 1) {
            run rank(i)
        }
        i = 0
    }
}
